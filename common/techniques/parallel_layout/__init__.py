"""Transformers divided among ranks: tensor and sequence parallelism, sharded parameters, and replicas.

`parallelize` divides a GPT according to the settings of `configs.layout.Layout`. The layers of tensor parallelism are
in `tensor_layers`, their communication in `tensor_ranks`, the loss of a divided vocabulary in `vocabulary_loss`, and
the data-parallel dimensions in `data_ranks`.
"""

from common.techniques.parallel_layout.parallel_model import parallelize

__all__ = ["parallelize"]
