"""Settings for clipping gradients and for dropout, which every experiment that trains has."""

from __future__ import annotations

from dataclasses import dataclass

from configs.fields import between, find_group


@dataclass(frozen=True)
class Regularization:
    """Settings for clipping gradients and for dropout."""

    clip: float = between(0, 1e6, 0)
    """Maximum gradient norm; 0 disables clipping. The norm is the Euclidean norm over the gradients of all parameters,
    for the whole batch."""
    dropout: float = between(0, 0.95, 0)
    """Dropout probability for the inputs of the last layer. The dropout mask of a sample depends only on the sample's
    position in the epoch, so the division into shards and microbatches does not change the result."""


def get_dropout(cfg: object) -> float:
    """Return the dropout probability of a config, or 0 if the config has no such setting."""
    settings = find_group(cfg, Regularization)
    return settings.dropout if settings else 0.0
