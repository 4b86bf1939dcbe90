"""Recovery of a rank of an elastic run: it discards a failed step, and continues with the remaining ranks.

A rank whose collective fails signs in with the coordinator. Once all living ranks have signed in, they form a
generation with its own process group. A step may have been completed by some ranks only. A generation therefore starts
from the state of a rank that completed the most steps; the others are at most one step behind. The batches of the
steps stay the same, and so do the losses.
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

from common.checkpoint.train_state import TrainState
from common.data.loader import DataWorkerError
from common.data.rounds import Rounds
from common.measure.metrics_log import SharedMetricsLog, Values
from common.ranks import objects
from common.ranks.rank_info import COORDINATOR_KEY_VARIABLE
from common.runs.folder import write_json
from common.runs.progress import ProgressDisplay
from common.system.errors import UserError, is_timeout
from common.techniques.elastic import group, peer_copy
from common.techniques.elastic.generations import GENERATIONS_FILE, describe_rank_change
from common.techniques.elastic.member import Generation, GenerationEnded, Member
from common.techniques.elastic.shared_values import SharedValues
from common.training.run_context import RunContext
from configs.batch_plan import divide_batch
from configs.elastic import Elastic

MAX_EMPTY_GENERATIONS = 3  # in a row: no rank lost or joined, no step completed


@dataclasses.dataclass
class RankChange:
    """Change of the ranks since the last recorded generation."""

    lost: list[int] = dataclasses.field(default_factory=list)
    joined: list[int] = dataclasses.field(default_factory=list)
    discarded: float = 0.0
    """Seconds of the failed step; 0 if the source rank of the new generation completed it."""


class Recovery:
    """Recovery of this rank in an elastic run, from the first step to the end of the last evaluation."""

    def __init__(self, run: RunContext, state: TrainState, settings: Elastic) -> None:
        """Raises UserError if the run cannot continue without a rank."""
        world = run.world
        if world.backend != "gloo":
            raise UserError("elastic=true: ranks on GPUs cannot continue without each other; add launch.device=cpu")
        if not world.coordinator:
            raise UserError(
                f"elastic=true: {world.launcher} stops all ranks when one is lost; use make exp, or start the "
                "experiment's script directly, or omit elastic"
            )
        assert isinstance(run.metrics, SharedMetricsLog)
        self.run = run
        self.state = state
        self.metrics = run.metrics
        run.exit_if_others_can_continue = self.exit_if_others_can_continue
        group.update_world_fields(world, started_as_rank=world.original_rank)
        self.joining = world.is_joining
        self.writes_metrics = world.is_main
        """True on rank 0 of the newest completely formed generation."""
        self.join_agreed = False
        """True if all ranks know that another rank waits to join."""
        self.leaving = False
        """True if all ranks leave the generation between two steps."""
        os.register_at_fork(after_in_child=gc.freeze)  # freeing process groups would terminate a data worker
        self.empty_generations = 0
        self.step_start = time.perf_counter()
        """Time at which the newest step started."""
        self.discarded = 0.0
        """Seconds of the last failed step."""
        self.shared = SharedValues()
        self.buffers = [buffer for _, buffer in state.buffers]
        self.buffers_before = [torch.empty_like(buffer) for buffer in self.buffers]
        """Buffers at the start of the current step."""
        self.random_before = torch.empty(0)
        """torch's random state at the start of the current step."""
        self.member = Member(
            world.coordinator,
            world.original_rank,
            settings.timeout,
            os.environ.get(COORDINATOR_KEY_VARIABLE, ""),
            joins=world.is_joining,
            irreplaceable=state.irreplaceable,
        )
        self._watch_connections()
        if world.is_joining:
            self.join_generation()

    # ---- steps

    def begin_step(self) -> None:
        """Save what a step changes before its update, so that a failed step can be repeated."""
        self.step_start = time.perf_counter()
        self.shared = SharedValues()
        copy_tensors(self.buffers, self.buffers_before)
        self.random_before = torch.get_rng_state()

    def start_averaging(self, values: Values) -> None:
        """Start to average values of a step over the ranks, and to agree whether a rank waits to join."""
        self.shared.start(values, self.member.has_waiting_rank)

    def commit(self) -> dict[str, float]:
        """Return the means of the values logged in a step, before its update. All ranks call it.

        Raises RuntimeError if a rank is lost.
        """
        if not self.shared.started:
            self.start_averaging({})
        means, self.join_agreed = self.shared.finish(self.run.world.size)
        self.empty_generations = 0
        return means

    def leave_if_rank_joins(self) -> None:
        """Leave the generation between two steps if a rank waits to join. All ranks leave; raises GenerationEnded."""
        if self.join_agreed:
            self.leaving = True
            raise GenerationEnded("a rank joins")

    @torch.no_grad()
    def discard_step(self) -> None:
        """Restore batch position, buffers and random state of the start of the failed step."""
        self.discarded = time.perf_counter() - self.step_start
        copy_tensors(self.buffers_before, self.buffers)
        torch.set_rng_state(self.random_before)
        loader = self.state.loader
        done = self.run.step
        epoch = done // loader.steps
        position = loader.count_samples(done) - loader.count_samples(epoch * loader.steps)
        loader.load_state_dict({"epoch": epoch, "position": position})

    def may_come_from_rank_change(self, error: object) -> bool:
        """Return whether an error may be caused by the loss of another rank, or by one that joins."""
        if not isinstance(error, RuntimeError) or isinstance(error, DataWorkerError):
            return False
        if isinstance(error, GenerationEnded) or self.member.generation_ended:
            return True
        return "gloo" in str(error).lower() or is_timeout(error)

    def exit_if_others_can_continue(self, reason: str) -> None:
        """Exit this process as a lost rank, which can be started again, if the others can continue without it."""
        if self.run.world.size > 1 and not self.state.irreplaceable:
            self.member.leave_as_lost(reason)

    def finish(self) -> bool:
        """Return True once all ranks are done; join the next generation and return False if some are not."""
        generation = self.member.sign_in(self._measure_progress(), done=True)
        if not generation.done:
            self.join_generation(generation)
            return False
        self.close()
        return True

    def close(self) -> None:
        """Disconnect from the coordinator."""
        self.member.close()

    # ---- generations

    def join_generation(self, generation: Generation | None = None) -> None:
        """Continue as a member of `generation`, which has just been formed, or of the next one.

        Raises RuntimeError if communication fails repeatedly although no rank is lost.
        """
        failure_time = time.perf_counter()
        change = RankChange()
        while True:
            self._give_up_step()
            generation = generation or self.member.sign_in(self._measure_progress(), together=self.leaving)
            self.join_agreed = False
            self.leaving = False
            change.lost += generation.lost
            change.joined += generation.joined
            self.empty_generations = 0 if generation.lost or generation.joined else self.empty_generations + 1
            if self.empty_generations > MAX_EMPTY_GENERATIONS:
                raise RuntimeError("the ranks fail to communicate although none is lost; see their logs")
            try:
                change = self._form_generation(generation, change)
                self._record_change(generation, time.perf_counter() - failure_time, change)
                return
            except RuntimeError as error:
                if not self.may_come_from_rank_change(error):
                    raise
                generation = None

    @torch.no_grad()
    def _give_up_step(self) -> None:
        if not self.leaving:  # when leaving, the others may still have to finish their last collective
            group.shut_down_connections(self.connections)
        self.state.leave_group(together=self.leaving)
        for _, parameter in self.state.parameters:
            parameter.grad = None
        if self.state.buffer_copies is not None:  # an evaluation has started and may have averaged buffers
            copy_tensors(self.state.buffer_copies, self.buffers)
            self.state.drop_buffer_snapshot()
        self.run.saver.restart_watchdogs()

    def _measure_progress(self) -> list[int]:
        if self.joining:
            return [-1, 0, 0]
        epoch = self.state.loader.state_dict()["epoch"]
        return [self.run.step, epoch, not self.run.saver.unevaluated]

    def _watch_connections(self) -> None:
        """Let the member's thread cut the connections of the process group when the generation is over."""
        connections = group.list_connections(self.member.socket)
        self.connections = connections
        self.member.on_generation_end = lambda: group.shut_down_connections(connections)
        if self.member.generation_ended:
            group.shut_down_connections(connections)

    def _form_generation(self, generation: Generation, change: RankChange) -> RankChange:
        """Form the process group of a generation and make its ranks equal; return the change known to its source.

        `change` is the change known to this rank. Raises RuntimeError.
        """
        run = self.run
        world = run.world
        self.connections = []
        group.form_process_group(self.member, world.timeout, world.original_rank)
        self._watch_connections()
        self._update_ranks(generation)

        # Copy the state of the source.
        facts = self._collect_facts(change) if dist.get_rank() == generation.source else None
        facts = objects.broadcast_json(facts, generation.source, world.device)
        if generation.copies:
            loads = self._measure_progress() != facts["progress"]
            peer_copy.broadcast_state(self.state, generation.source, world, facts["step"], loads=loads)
        self._apply_facts(facts)  # at once: the copied state is that of this step even if the group fails below
        self.joining = False
        self.state.enter_group(facts["step"])
        group.free_left_process_groups()
        self._divide_batches(generation.members)

        # Move metrics and progress display to the new rank 0.
        if world.is_main != self.writes_metrics:
            run.screen = ProgressDisplay(run.cfg.log, silent=not world.is_main)
        if world.is_main and not self.writes_metrics:
            self.metrics.take_over_file()
        self.writes_metrics = world.is_main
        self.metrics.write_rows(self.metrics.unwritten_rows)
        return RankChange(**facts["change"])

    def _update_ranks(self, generation: Generation) -> None:
        """Update ranks and hosts of the world to those of the new process group."""
        world = self.run.world
        rank = dist.get_rank()
        group.update_world_fields(world, rank=rank, size=len(generation.members), is_joining=False, store=None)
        hosts = world.all_gather(socket.gethostname())
        host = hosts[rank]
        local_rank = hosts[:rank].count(host)
        group.update_world_fields(world, hosts=tuple(hosts), local_rank=local_rank, local_size=hosts.count(host))

    def _divide_batches(self, members: Sequence[int]) -> None:
        """Divide the batches among the members, in proportion to their `shards`, or equally."""
        loader = self.state.loader
        plan = self.run.cfg.batch_plan
        assert not isinstance(loader, Rounds)
        weights = [plan.weights[member] for member in members] if plan.weights else []
        if not any(weights):
            weights = [1] * len(members)
        loader.set_shards(dist.get_rank(), divide_batch(plan.batch // plan.microbatches, weights))

    def _collect_facts(self, change: RankChange) -> dict[str, Any]:
        """Return the facts that the other ranks need of the source, and the change of ranks."""
        run = self.run
        saver = run.saver
        change = dataclasses.replace(change, discarded=self.discarded)
        return {
            "progress": self._measure_progress(),
            "step": run.step,
            "resumed_after": run.resumed_after,
            "seconds": time.perf_counter() - saver.start_time,
            "unevaluated": saver.unevaluated,
            "best": saver.best_score,
            "saved": [saver.checkpointer.saved_step, saver.checkpointer.best_step],
            "rows": self.metrics.collect_unwritten_rows(),
            "generations": run.generations,
            "change": dataclasses.asdict(change),
        }

    def _apply_facts(self, facts: dict[str, Any]) -> None:
        """Apply the facts of the source to this rank."""
        run = self.run
        saver = run.saver
        metrics = self.metrics
        if self.joining:
            saver.start_time = time.perf_counter() - facts["seconds"]
            metrics.start_time = saver.start_time
            run.resumed_after = facts["resumed_after"]
        run.step = facts["step"]
        run.generations = facts["generations"]
        saver.unevaluated = facts["unevaluated"]
        saver.best_score = facts["best"]
        saver.checkpointer.saved_step, saver.checkpointer.best_step = facts["saved"]
        saver.vote.restart_votes_after(run.step)
        metrics.rows = []
        metrics.unwritten_rows = facts["rows"]
        metrics.next_flush = run.step + 1

    def _record_change(self, generation: Generation, seconds: float, change: RankChange) -> None:
        """Record a change of ranks, which took `seconds`, in the log and the run folder."""
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
        run.log_message(describe_rank_change(changed))
        run.pace.exclude_pause()
        if generation.stops and not run.saver.stop_request.signal_number:
            run.log_message(
                "fewer ranks than elastic.min remain; saving a checkpoint so that the run can be resumed with all ranks"
            )
            run.saver.stop_request.signal_number = signal.SIGUSR2
        if run.world.is_main:
            with contextlib.suppress(UserError):  # a full disk is reported when metrics or checkpoints are written
                write_json(run.folder.attempt_folder / GENERATIONS_FILE, run.generations)


def copy_tensors(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes, in one call."""
    if source:  # _foreach_copy_ rejects an empty list
        torch._foreach_copy_(target, source)
