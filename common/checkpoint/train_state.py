"""Training state of one rank, as saved in a checkpoint: parts of the model, optimizer and data position."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from common.checkpoint import state_dicts
from common.checkpoint.checkpointer import CheckpointState
from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.local_part import LocalPart
from common.data.step_source import StepSource
from common.ranks.averaging import average_tensors
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World


def get_model_recipe(model: nn.Module) -> dict[str, Any]:
    """Return the class name and the constructor arguments with which a model can be rebuilt.

    The arguments are None if they are unknown. A recipe that the model's class has inherited is ignored, because such a
    recipe would build the parent class.
    """
    # FSDP2 inserts a class from torch.distributed before the model's class.
    classes = [kind for kind in type(model).__mro__ if not kind.__module__.startswith("torch.distributed.")]
    names = [kind.__name__ for kind in classes]
    recipe: dict[str, Any] | None = getattr(model, "recipe", None)
    if recipe is None or recipe["class"] in names[1:]:
        return {"class": names[0], "arguments": None}
    return recipe


class TrainState:
    """Training state of one rank: its parts of the model, its optimizer and its loader.

    `parts`: modules of this rank, whose parameters have the names of the full model; empty if this rank has none.
    `optimizer`: the optimizer, or None if this rank has none.
    `peers`: the ranks that hold the same parts as this rank: all ranks in data parallelism, or the replicas of a
        pipeline stage; None if no other rank holds these parts. The first peer saves the parts. The BatchNorm
        statistics of peers differ, so each peer also saves its own statistics.
    `scaler`: gradient scaler, whose state must be the same on all ranks.
    `has_stages`: True if other ranks hold other stages of the model.
    `tensors`: named tensors that the run updates in place, such as measurements. Rank 0's tensors are saved.
    `local`: further state by name, such as the errors of a gradient compression. Each rank saves its own.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizer: Optimizer | None,
        loader: StepSource,
        *,
        peers: Ranks | None = None,
        scaler: GradScaler | None = None,
        has_stages: bool = False,
        tensors: Mapping[str, Tensor] | None = None,
        local: Mapping[str, LocalPart] | None = None,
    ) -> None:
        self.parts = list(parts)
        self.optimizer = optimizer
        self.loader = loader
        self.peers = peers
        self.scaler = scaler
        self.has_stages = has_stages
        self.tensors = dict(tensors or {})
        self.local_parts = dict(local or {})
        self.parameters: list[tuple[str, Tensor]] = []
        self.buffers: list[tuple[str, Tensor]] = []
        for part in parts:
            self.parameters += part.named_parameters()
            persistent = part.state_dict().keys()
            self.buffers += [(name, buffer) for name, buffer in part.named_buffers() if name in persistent]
        self.infinite_buffers = {name for name, buffer in self.buffers if not bool(buffer.isfinite().all())}
        """Names of buffers that contain infinity or NaN from the start, such as an attention mask."""
        self.gpus = {parameter.device for _, parameter in self.parameters if parameter.is_cuda}
        self.buffer_copies: list[Tensor] | None = None
        """Copies of the buffers made before an evaluation; None outside of an evaluation."""
        self.recipe = get_model_recipe(parts[0]) if parts else {}

    @property
    def shard_weight(self) -> float:
        """Number of samples of this rank in a step, divided by the number in an equal shard."""
        return self.loader.shard_weight

    @property
    def irreplaceable(self) -> bool:
        """True if an elastic run cannot continue without this rank.

        A rank is irreplaceable if it holds a part of the state that no other rank holds. In this base class, the value
        is always False.
        """
        return False

    def prepare_evaluation(self) -> nn.Module:
        """Return the model that is evaluated, which is the registered model. All ranks must call this method."""
        return self.parts[0]

    @contextlib.contextmanager
    def buffer_snapshot(self) -> Iterator[None]:
        """Copy the buffers before an evaluation, which may replace the buffers with means over the ranks.

        Within the `with` block, `collect_state` returns the copies of the buffers. After an error, the copies remain
        until `restore_buffers` is called.
        """
        self.buffer_copies = [buffer.detach().clone() for _, buffer in self.buffers]
        yield
        self.buffer_copies = None

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Set the buffers to the copies that a failed evaluation has left, if any."""
        if self.buffer_copies is None:
            return
        for (_, buffer), copy in zip(self.buffers, self.buffer_copies, strict=True):
            buffer.copy_(copy)
        self.buffer_copies = None

    def collect_state(self) -> CheckpointState:
        """Return the state that this rank saves. All ranks must call this method."""
        return self._collect_state_among(self.peers.current if self.peers else None)

    def collect_local_state(self) -> CheckpointState:
        """Return the state of this rank, without communication. This rank must hold the full model."""
        return self._collect_state_among(None)

    def _collect_state_among(self, peers: World | None) -> CheckpointState:
        """Return the state that this rank saves.

        `peers` are the ranks that hold the same parts as this rank. Only the first of the `peers` saves the model, and
        only the first peer that has the optimizer state of a parameter saves this state. The saved buffers are the
        means over all peers.
        """
        # Only the first peer keeps the gathered tensors. The other peers participate in the collectives.
        is_first = peers is None or peers.is_main
        model = state_dicts.gather_full_tensors(self.parameters, is_first)

        buffers = dict(self.buffers)
        if self.buffer_copies is not None:
            buffers = dict(zip(buffers, self.buffer_copies, strict=True))
        means = {name: buffer.clone() for name, buffer in buffers.items()}
        if peers is not None and peers.size > 1:
            floating = [mean for mean in means.values() if mean.is_floating_point()]
            average_tensors(floating, peers.group, self.shard_weight)

        optimizer: dict[str, dict[str, Any]] = {}
        if self.optimizer is not None:
            names = self._list_saved_optimizer_states(self.optimizer, peers)
            optimizer = state_dicts.collect_optimizer_state(self.optimizer, self.parameters, names)

        common: dict[str, Any] = dict(self.loader.state_dict()) | {"recipe": self.recipe}
        if self.scaler is not None:
            common["scaler"] = self.scaler.state_dict()
        if self.tensors:
            common["tensors"] = self.tensors
        local: dict[str, Any] = {"random": state_dicts.capture_rng_state()}
        local["buffers"] = buffers if self.peers else {}
        for name, part in self.local_parts.items():
            local[name] = part.state_dict()
        return CheckpointState(model | means if is_first else {}, optimizer, common, local)

    def _list_saved_optimizer_states(self, optimizer: Optimizer, peers: World | None) -> list[str]:
        """Return the names of the parameters whose optimizer state this rank saves.

        Each state is saved once, by the first peer that has it. Peers have different states if the optimizer state is
        divided among them.
        """
        has_state = [bool(optimizer.state.get(parameter)) for _, parameter in self.parameters]
        earlier_peers: list[list[bool]] = []
        if peers is not None and peers.size > 1:
            earlier_peers = peers.all_gather(has_state)[: peers.rank]
        names = []
        for number, (name, _) in enumerate(self.parameters):
            if has_state[number] and not any(peer[number] for peer in earlier_peers):
                names.append(name)
        return names

    def _select_local_buffers(self, loaded: LoadedCheckpoint) -> dict[str, Tensor]:
        """Return the buffers that this rank saved, or {} if the buffers saved with the model must be used.

        The buffers saved with the model are used if the number of ranks has changed, if this rank now holds other parts
        of the model, or if no other rank holds the same parts.
        """
        if self.peers is None or self.peers.current.size == 1 or not loaded.local:
            return {}
        saved: dict[str, Tensor] = loaded.local["buffers"]
        return saved if saved.keys() == dict(self.buffers).keys() else {}

    def check_number_of_ranks(self, loaded: LoadedCheckpoint) -> None:
        """Raise UserError if the checkpoint cannot be loaded with the current number of ranks.

        This base class accepts any number of ranks. A subclass may require the number of ranks that saved the
        checkpoint.
        """

    @torch.no_grad()
    def load(self, loaded: LoadedCheckpoint) -> None:
        """Load a checkpoint. Raises UserError if the checkpoint belongs to a different model."""
        state_dicts.load_tensors(self.parameters, loaded.model)
        state_dicts.load_tensors(self.buffers, loaded.model | self._select_local_buffers(loaded))
        state_dicts.load_tensors(self.tensors.items(), loaded.common.get("tensors", {}))
        if self.optimizer is not None:
            state_dicts.load_optimizer_state(self.optimizer, self.parameters, loaded.optimizer)
        position = {name: loaded.common[name] for name in self.loader.state_dict()}
        self.loader.load_state_dict(position)
        scaler_state = loaded.common.get("scaler")  # None or {} if the saving attempt did not use a gradient scaler
        if self.scaler is not None and self.scaler.is_enabled() and scaler_state:
            self.scaler.load_state_dict(scaler_state)
        if not loaded.local:  # saved by a different number of ranks
            return
        for name, part in self.local_parts.items():
            part.load_state_dict(loaded.local.get(name, {}))
        state_dicts.restore_rng_state(loaded.local["random"])

    # ---- elastic runs

    def load_peer_state(self, loaded: LoadedCheckpoint) -> None:
        """Load the state that `collect_local_state` returned on another rank.

        The other rank may be one step ahead of this rank.
        """
        self.load(loaded)

    def leave_group(self, *, together: bool) -> None:
        """Stop background communication in the process group, before this rank leaves the group.

        If `together` is True, all ranks must leave the group after the same step. If `together` is False, the caller
        must first close the connections of the group.
        """

    def enter_group(self, completed_steps: int) -> None:
        """Continue after `completed_steps` steps in the new default process group, whose ranks have changed."""
        for part in self.local_parts.values():
            part.enter_group()
