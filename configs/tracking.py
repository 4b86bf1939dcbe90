"""Settings for Weights & Biases, and for the description of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from configs.fields import MAX_NOTES_LENGTH, between, short_text


@dataclass(frozen=True)
class Wandb:
    """Settings for Weights & Biases (W&B)."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """W&B mode. auto is online if an account is configured and the W&B server is reachable, and otherwise offline. The
    environment variable WANDB_MODE overrides `wandb.mode`."""
    project: str = "distributed-experiments"
    """W&B project of the run."""
    entity: str = ""
    """W&B user or team. An empty value uses the default of the account."""
    group: str = ""
    """W&B group that related runs share."""
    tags: list[str] = field(default_factory=list)
    """Additional W&B tags. The experiment, the data set and the world size are always added as tags."""
    model: bool = True
    """Upload the trained model to W&B as an artifact. The run folder always contains the model."""
    finish_timeout: float = between(1, 3600, 60)
    """Maximum seconds to wait for W&B after training. Data not uploaded by then stays on disk for `make sync`."""

    def check(self) -> None:
        """Raise ValueError for names that W&B rejects."""
        if not set("/\\#?%:").isdisjoint(self.project) or len(self.project) > 128:
            raise ValueError(f"wandb.project={self.project} must have at most 128 characters and none of / \\ # ? % :")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ValueError(f"wandb.tags: {tag!r} has {len(tag)} characters; a tag must have 1 to 64")


@dataclass(frozen=True)
class Description:
    """Settings that describe a run to people. They have no effect on training."""

    name: str = short_text(64)
    """Name of the run in `make status`, in `make compare` and in W&B. The name need not be unique, and commands do not
    accept it in place of the id."""
    notes: str = short_text(MAX_NOTES_LENGTH)
    """Notes about the run, such as its purpose. `make note` changes the notes later."""
