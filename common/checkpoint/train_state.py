"""State of a training on one rank, as a checkpoint keeps it: parts of the model, optimizer, position in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from common.checkpoint import state_dicts
from common.checkpoint.checkpointer import CheckpointState, LoadedCheckpoint
from common.data.loader import Loader
from common.data.rounds import Rounds
from common.distributed import ddp, sync_batchnorm
from common.distributed.rendezvous import World


def get_recipe(model: nn.Module) -> dict[str, Any]:
    """Return what builds a model again: its class and the constructor's arguments, None where it does not tell them.

    A recipe inherited from the parent class is ignored: it would build the parent.
    """
    kinds = type(model).__mro__  # FSDP2 puts a class of its own before a model's
    name, *parents = (kind.__name__ for kind in kinds if not kind.__module__.startswith("torch.distributed."))
    recipe: dict[str, Any] | None = getattr(model, "recipe", None)
    return {"class": name, "arguments": None} if recipe is None or recipe["class"] in parents else recipe


class TrainState:
    """State of this rank's `parts` of the model, whose parameters have the names of the full model.

    With `replicated` every rank holds the full model, as in data parallelism: rank 0's is kept. BatchNorm's statistics
    differ between such ranks, so each keeps its own, too. Where only some ranks hold the same parts, as the replicas of
    a stage do, these are the `peers`. The `scaler` of the loss has the same state on all ranks; the state of
    PowerSGD is each rank's own. `tensors` are named tensors that the run updates in place, e.g.
    measurements; rank 0's are saved. A rank without a part of the model or without an optimizer gives none. DDP's
    `replica` of the model may hold a state of PowerSGD, and is wrapped anew where an elastic run changes its ranks.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizer: Optimizer | None,
        loader: Loader | Rounds[Any],
        world: World,
        *,
        replicated: bool = False,
        peers: World | None = None,
        scaler: GradScaler | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        replica: nn.Module | None = None,
    ) -> None:
        self.parts, self.optimizer, self.loader = list(parts), optimizer, loader
        self.peers = world if replicated else peers
        self.scaler, self.replica, self.tensors = scaler, replica, dict(tensors or {})
        self.compression = ddp.get_powersgd_state(replica) if replica is not None else None
        self.parameters = [pair for part in parts for pair in part.named_parameters()]
        self.gpus = {parameter.device for _, parameter in self.parameters if parameter.is_cuda}
        kept = {name for part in parts for name in part.state_dict()} - {name for name, _ in self.parameters}
        self.buffers = [(name, value) for part in parts for name, value in part.named_buffers() if name in kept]
        self.held: list[Tensor] | None = None
        self.recipe = get_recipe(parts[0]) if parts else {}

    @property
    def weight(self) -> float:
        """Samples of this rank in a step by those of an equal shard."""
        return 1.0 if isinstance(self.loader, Rounds) else self.loader.weight

    @property
    def irreplaceable(self) -> bool:
        """True where the others of an elastic run cannot go on without this rank: it alone has a part of the state."""
        return False

    @torch.no_grad()
    def snapshot_buffers(self) -> None:
        """Copy the buffers, for `collect_state` to return: an evaluation replaces those of several ranks by means."""
        self.held = [value.clone() for _, value in self.buffers]

    def drop_buffer_snapshot(self) -> None:
        """Drop the copies of the buffers: `collect_state` again returns the buffers as they are when it is called."""
        self.held = None

    def collect_state(self) -> CheckpointState:
        """Return the state to save. All ranks call it."""
        return self._collect_among(self.peers)

    def collect_own_state(self) -> CheckpointState:
        """Return the state of this rank, which holds the full model."""
        return self._collect_among(None)

    def _collect_among(self, peers: World | None) -> CheckpointState:
        keep = peers is None or peers.is_main
        model = state_dicts.gather_full_tensors(self.parameters, keep)
        values = [value for _, value in self.buffers] if self.held is None else self.held
        buffers = {name: value for (name, _), value in zip(self.buffers, values, strict=True)}
        means = {name: value.clone() for name, value in buffers.items()}
        optimizer, parameters = self.optimizer, self.parameters
        if peers is not None and peers.size > 1:
            floating = [mean for mean in means.values() if mean.is_floating_point()]
            sync_batchnorm.average_tensors(floating, peers.group, self.weight)
        return CheckpointState(
            model=model | means if keep else {},
            optimizer=state_dicts.collect_optimizer_state(optimizer, parameters, keep) if optimizer else {},
            common=self.loader.state_dict()
            | ({"scaler": self.scaler.state_dict()} if self.scaler else {})
            | ({"tensors": self.tensors} if self.tensors else {}),
            local={"random": state_dicts.capture_rng_state(), "buffers": buffers if self.peers else {}}
            | ({"compression": ddp.capture_powersgd_state(self.compression)} if self.compression else {}),
        )

    def _select_own_buffers(self, loaded: LoadedCheckpoint) -> dict[str, Tensor]:
        """Return the buffers that this rank saved, if it shared the same parts then; {} where the means count."""
        shared = self.peers is not None and self.peers.size > 1
        saved: dict[str, Tensor] = loaded.local["buffers"] if loaded.local and shared else {}
        return saved if saved.keys() == {name for name, _ in self.buffers} else {}

    def check_ranks(self, loaded: LoadedCheckpoint) -> None:
        """Raise UserError where only as many ranks as saved a checkpoint can load it; here any number can."""

    @torch.no_grad()
    def load(self, loaded: LoadedCheckpoint) -> None:
        """Load a checkpoint. Raises UserError if it is of another model."""
        state_dicts.load_tensors(self.parameters, loaded.model)
        state_dicts.load_tensors(self.buffers, loaded.model | self._select_own_buffers(loaded))
        state_dicts.load_tensors(self.tensors.items(), loaded.common.get("tensors", {}))
        if self.optimizer is not None:
            state_dicts.load_optimizer_state(self.optimizer, self.parameters, loaded.optimizer)
        self.loader.load_state_dict({name: loaded.common[name] for name in self.loader.state_dict()})
        if self.scaler is not None and self.scaler.is_enabled() and loaded.common.get("scaler"):
            self.scaler.load_state_dict(loaded.common["scaler"])  # there is none where training went on without one
        if self.compression and loaded.local and "compression" in loaded.local:
            ddp.load_powersgd_state(self.compression, loaded.local["compression"], self.parameters[0][1].device)
        if loaded.local:
            state_dicts.restore_rng_state(loaded.local["random"])

    # ---- elastic runs

    def load_copy(self, loaded: LoadedCheckpoint) -> None:
        """Load what `collect_own_state` returned on another rank, which may have done a step more than this one."""
        self.load(loaded)

    def leave_group(self, *, together: bool) -> None:
        """End what this rank does in the process group beside its steps.

        All ranks leave it after the same step, or `together` is false and the connections are cut.
        """

    def enter_group(self, done: int) -> None:
        """Go on in the process group that is now the default one, which has other ranks, after so many steps."""
        ddp.rewrap_ddp(self.replica)
