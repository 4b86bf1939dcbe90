"""Recovery of a rank of an elastic run: it discards a step that failed, and goes on with the ranks that are left.

A rank whose collective fails signs in with the coordinator. Once all that live have done so they are a generation, with
a process group of its own. A step can have been completed by some ranks only, so the state of a generation is that of
any rank which has completed most; at most one step lies between them. The batches of the steps stay the same, and so do
the losses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from common.checkpoint import peer_copy
from common.checkpoint.train_state import TrainState
from common.core.errors import UserError, is_timeout
from common.data.loader import DataWorkerError
from common.data.rounds import Rounds
from common.distributed import objects
from common.distributed.elastic import group
from common.distributed.elastic.generations import FILE, describe_generation
from common.distributed.elastic.member import Generation, GenerationOver, Member
from common.distributed.rank_info import KEY
from common.measure.metrics_log import SharedMetricsLog, Values
from common.runs.folder import write_json
from common.runs.progress import Screen
from common.training.elastic.shared_values import SharedValues
from common.training.run_context import RunContext
from configs.batch_plan import cut_batch
from configs.elastic import Elastic

IN_VAIN = 3  # generations in a row without a loss and without a step


@dataclasses.dataclass
class Change:
    """Change of the ranks since the last generation that was recorded."""

    lost: list[int] = dataclasses.field(default_factory=list)
    joined: list[int] = dataclasses.field(default_factory=list)
    discarded: float = 0.0
    """Seconds of the step that failed; 0 where the rank whose state counts has completed it."""


class Recovery:
    """This rank's part in an elastic run, from its first step to the end of the last evaluation."""

    def __init__(self, run: RunContext, state: TrainState, settings: Elastic) -> None:
        """Raises UserError where the run cannot go on without a rank."""
        world = run.world
        if world.backend != "gloo":
            raise UserError("elastic=true: ranks on GPUs cannot go on without each other; add launch.device=cpu")
        if not world.coordinator:
            raise UserError(
                f"elastic=true: {world.launcher} ends all ranks when one is lost; use make exp, or start the "
                "experiment's script itself, or leave elastic out"
            )
        assert isinstance(run.metrics, SharedMetricsLog)
        self.run, self.state, self.metrics = run, state, run.metrics
        run.leave_if_possible = self.leave_if_possible
        group.update_world(world, launched_as=world.number)
        self.joining = world.joins
        self.writes = world.is_main
        """True where this rank writes the metrics: on rank 0 of the newest generation that was formed completely."""
        self.join_agreed = False
        """True where all ranks know that another one waits for them to leave their generation."""
        self.leaving = False
        """True where all leave it between two steps."""
        os.register_at_fork(after_in_child=gc.freeze)  # process groups that a data worker frees would end it
        self.in_vain = 0
        self.began = time.perf_counter()
        """When the newest step began."""
        self.discarded = 0.0
        """Seconds of the step that failed last."""
        self.shared = SharedValues()
        self.buffers = [value for _, value in state.buffers]
        self.buffers_before = [torch.empty_like(value) for value in self.buffers]
        """The buffers at the beginning of the step that is taken."""
        self.random_before = torch.empty(0)
        """torch's random state there."""
        key = os.environ.get(KEY, "")
        self.member = Member(
            world.coordinator,
            world.number,
            settings.timeout,
            key,
            joins=world.joins,
            irreplaceable=state.irreplaceable,
        )
        self._watch_connections()
        if world.joins:
            self.join_generation()

    # ---- steps

    def begin_step(self) -> None:
        """Keep what a step changes before its update, to do it again if it fails."""
        self.began = time.perf_counter()
        self.shared = SharedValues()
        copy_tensors(self.buffers, self.buffers_before)
        self.random_before = torch.get_rng_state()

    def share(self, values: Values) -> None:
        """Start to average values of a step over the ranks, and to tell them whether a rank waits to join."""
        self.shared.start(values, self.member.join_waits)

    def commit(self) -> dict[str, float]:
        """Return the means of what a step has logged, before its update: each rank then knows them.

        Raises RuntimeError where a rank is lost.
        """
        if not self.shared.started:
            self.share({})
        means, self.join_agreed = self.shared.finish(self.run.world.size)
        self.in_vain = 0
        return means

    def leave_if_rank_joins(self) -> None:
        """Leave the generation between two steps, where a rank waits to join: all do. Raises GenerationOver then."""
        if self.join_agreed:
            self.leaving = True
            raise GenerationOver("a rank joins")

    @torch.no_grad()
    def discard_step(self) -> None:
        """Go back to the beginning of the step that failed: batch, buffers, random state."""
        self.discarded = time.perf_counter() - self.began
        copy_tensors(self.buffers_before, self.buffers)
        torch.set_rng_state(self.random_before)
        loader, done = self.state.loader, self.run.step
        epoch = done // loader.steps
        position = loader.count_samples(done) - loader.count_samples(epoch * loader.steps)
        loader.load_state_dict({"epoch": epoch, "position": position})

    def is_loss(self, error: object) -> bool:
        """Return whether an error may come from the loss of another rank, or from one that joins."""
        if not isinstance(error, RuntimeError) or isinstance(error, DataWorkerError):
            return False
        known = isinstance(error, GenerationOver) or self.member.over
        return known or "gloo" in str(error).lower() or is_timeout(error)

    def leave_if_possible(self, reason: str) -> None:
        """End this process as a lost rank, which can be started again, where others can continue without it."""
        if self.run.world.size > 1 and not self.state.irreplaceable:
            self.member.leave_as_lost(reason)

    def finish(self) -> bool:
        """Return True once all ranks have nothing left to do; False where they go on as another generation."""
        generation = self.member.sign_in(self._measure_progress(), done=True)
        if not generation.done:
            self.join_generation(generation)
            return False
        self.close()
        return True

    def close(self) -> None:
        """Leave the coordinator."""
        self.member.close()

    # ---- generations

    def join_generation(self, generation: Generation | None = None) -> None:
        """Go on as a member of the next generation, or of one that has just been formed.

        Raises RuntimeError where ranks fail again and again though none is lost.
        """
        failed = time.perf_counter()
        change = Change()
        while True:
            self._give_up_step()
            generation = generation or self.member.sign_in(self._measure_progress(), together=self.leaving)
            self.join_agreed = self.leaving = False
            change.lost += generation.lost
            change.joined += generation.joined
            self.in_vain = 0 if generation.lost or generation.joined else self.in_vain + 1
            if self.in_vain > IN_VAIN:
                raise RuntimeError("the ranks fail to communicate, and none is lost; see their logs")
            try:
                change = self._form(generation, change)
                self._record(generation, time.perf_counter() - failed, change)
                return
            except RuntimeError as error:
                if not self.is_loss(error):
                    raise
                generation = None

    @torch.no_grad()
    def _give_up_step(self) -> None:
        if not self.leaving:  # else the others may be about to end their last collective
            group.cut_connections(self.connections)
        self.state.leave_group(together=self.leaving)
        for _, parameter in self.state.parameters:
            parameter.grad = None
        if self.state.held is not None:  # an evaluation has begun, and may have averaged buffers
            copy_tensors(self.state.held, self.buffers)
            self.state.drop_buffer_snapshot()
        self.run.saver.restart_watchdogs()

    def _measure_progress(self) -> list[int]:
        epoch = self.state.loader.state_dict()["epoch"]
        return [-1, 0, 0] if self.joining else [self.run.step, epoch, not self.run.saver.unevaluated]

    def _watch_connections(self) -> None:
        """Let the member's thread cut the connections of the process group when the generation is over."""
        self.connections = connections = group.list_connections(self.member.socket)
        self.member.on_end = lambda: group.cut_connections(connections)
        if self.member.over:
            group.cut_connections(connections)

    def _form(self, generation: Generation, change: Change) -> Change:
        """Form the process group of a generation, and make its ranks equal; return the change that its source knows.

        `change` is what this rank knows of it. Raises RuntimeError.
        """
        run, world = self.run, self.run.world
        self.connections = []
        group.form_group(self.member, world.timeout, world.number)
        self._watch_connections()
        rank, members = dist.get_rank(), tuple(generation.members)
        group.update_world(world, rank=rank, size=len(members), joins=False, store=None)
        hosts = world.all_gather(socket.gethostname())
        here = hosts[rank]
        group.update_world(world, hosts=tuple(hosts), local_rank=hosts[:rank].count(here), local_size=hosts.count(here))
        facts = objects.broadcast_json(
            self._collect_facts(change) if rank == generation.source else None, generation.source, world.device
        )
        if generation.copies:
            loads = self._measure_progress() != facts["progress"]
            peer_copy.copy_state(self.state, generation.source, world, facts["step"], loads=loads)
        self._adopt(facts)  # at once: the state is that of this step, also if the group fails from here on
        self.joining = False
        self.state.enter_group(facts["step"])
        group.free_left_groups()
        self._cut_batches(rank, members)
        if world.is_main != self.writes:
            run.screen = Screen(run.cfg.log, silent=not world.is_main)
        if world.is_main and not self.writes:
            self.metrics.take_over_file()
        self.writes = world.is_main
        self.metrics.write_rows(self.metrics.kept)
        return Change(**facts["change"])

    def _cut_batches(self, rank: int, members: Sequence[int]) -> None:
        """Divide the batches among the members, in proportion to what `shards` gives them, or equally."""
        loader, plan = self.state.loader, self.run.cfg.batch_plan
        assert not isinstance(loader, Rounds)
        weights = [plan.weights[member] for member in members] if plan.weights else []
        size = plan.batch // plan.microbatches
        loader.set_shards(rank, cut_batch(size, weights if any(weights) else [1] * len(members)))

    def _collect_facts(self, change: Change) -> dict[str, Any]:
        """Return what the others need to know of this rank, whose state counts, and of a change of ranks."""
        run, saver = self.run, self.run.saver
        return {
            "progress": self._measure_progress(),
            "step": run.step,
            "resumed_after": run.resumed_after,
            "seconds": time.perf_counter() - saver.began,
            "unevaluated": saver.unevaluated,
            "best": saver.best,
            "saved": [saver.checkpointer.saved, saver.checkpointer.best],
            "rows": self.metrics.collect(),
            "generations": run.generations,
            "change": dataclasses.asdict(dataclasses.replace(change, discarded=self.discarded)),
        }

    def _adopt(self, facts: dict[str, Any]) -> None:
        run, saver, metrics = self.run, self.run.saver, self.metrics
        if self.joining:
            saver.began = metrics.began = time.perf_counter() - facts["seconds"]
            run.resumed_after = facts["resumed_after"]
        run.step, run.generations = facts["step"], facts["generations"]
        saver.unevaluated, saver.best = facts["unevaluated"], facts["best"]
        saver.checkpointer.saved, saver.checkpointer.best = facts["saved"]
        saver.vote.restart_after(run.step)
        metrics.rows, metrics.kept, metrics.next_flush = [], facts["rows"], run.step + 1

    def _record(self, generation: Generation, seconds: float, change: Change) -> None:
        """Note a change of ranks, in the run folder, too; it took so many seconds."""
        run = self.run
        changed = {
            "number": generation.number,
            "step": run.step,
            "ranks": list(generation.members),
            "lost": change.lost,
            "joined": change.joined,
            "seconds": round(seconds, 6),
            "discarded": round(change.discarded, 6),
        }
        self.discarded = 0.0
        run.generations = [*run.generations, changed]
        run.log_message(describe_generation(changed))
        run.pace.interrupt()
        if generation.stops and not run.saver.stop.number:
            run.log_message("fewer ranks are left than elastic.min: saving, to be resumed with all of them")
            run.saver.stop.number = signal.SIGUSR2
        if run.world.is_main:
            with contextlib.suppress(UserError):  # a full disk is reported by the files that matter more
                write_json(run.folder.attempt / FILE, run.generations)


def copy_tensors(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes, by one call for all."""
    if source:  # it takes no empty list
        torch._foreach_copy_(target, source)
