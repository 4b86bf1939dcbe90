"""Explanation of errors of torch's layers that are caused by the settings of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from common.system import foreign_text
from common.system.errors import UserError


@contextlib.contextmanager
def explain_layer_errors() -> Iterator[None]:
    """Raise UserError if the block fails because a BatchNorm layer got a single value per channel."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        # torch.distributed.pipelining raises a RuntimeError whose cause is the error of the layer
        if not foreign_text.is_single_value_error(error) and not foreign_text.is_single_value_error(error.__cause__):
            raise
        raise UserError(
            "BatchNorm requires more than one value per channel in training, but a microbatch with one sample has only "
            "one; use a larger batch (or split_size), or larger images"
        ) from error
