"""Transformers divided among ranks: tensor, sequence, context and pipeline parallelism, shards, and replicas.

`parallelize` divides a GPT according to the settings of `configs.layout.Layout`. The layers of tensor parallelism are
in `tensor_layers`, their communication in `tensor_ranks`, and the loss of a divided vocabulary in `vocabulary_loss`.
`context_ranks` contains ring attention, whose blocks are computed in `attention_blocks`. `data_ranks` contains the
data-parallel dimensions. `pipeline_model` divides the layers into stages, which `common.techniques.pipeline` executes,
and `table_copy` exchanges a tied table between the first and the last stage.
"""

from common.techniques.parallel_layout.division import parallelize

__all__ = ["parallelize"]
