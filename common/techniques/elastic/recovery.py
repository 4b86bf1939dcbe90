"""Recovery in elastic runs, in which the remaining ranks discard a failed step and continue training.

A rank whose collective fails signs in with the coordinator. When all living ranks have signed in, they form a new
generation with a new process group. Some ranks may have completed the step in which the failure occurred. A generation
therefore starts from the state of the source rank, which has completed the most steps; all other ranks are at most one
step behind. Every step is trained on the same batch as without the failure, so the losses do not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from common.checkpoint.train_state import TrainState
from common.data.loader import DataWorkerError, Loader
from common.measure.metrics_log import SharedMetricsLog, Values
from common.ranks import objects
from common.ranks.rank_info import COORDINATOR_KEY_VARIABLE
from common.runs.folder import write_json
from common.runs.rank_changes import describe_rank_change
from common.runs.run_progress import GENERATIONS_FILE
from common.system import foreign_text
from common.system.causes import PEER_CAUSES
from common.system.errors import MachineError, UserError
from common.techniques.elastic import group, peer_copy
from common.techniques.elastic.member import Generation, GenerationEnded, Member
from common.techniques.elastic.shared_values import AveragedValues
from common.training.hooks import RecoveryHook
from common.training.run_context import RunContext
from configs.batch_plan import divide_batch
from configs.dataparallel import Elastic

MAX_EMPTY_GENERATIONS = 3  # consecutive generations in which no rank is lost or joins and no step is completed


@dataclasses.dataclass
class RankChange:
    """Ranks that were lost or have joined since the last recorded generation."""

    lost: list[int] = dataclasses.field(default_factory=list)
    joined: list[int] = dataclasses.field(default_factory=list)
    discarded: float = 0.0
    """Duration of the failed step in seconds; 0 if the source rank of the new generation completed the step."""


class ElasticRecovery(RecoveryHook):
    """One rank's part in the recovery of an elastic run, from the first step to the end of the last evaluation."""

    def __init__(self, run: RunContext, state: TrainState, settings: Elastic) -> None:
        """Connect to the coordinator. Raises UserError if the run cannot continue after the loss of a rank."""
        world = run.world
        if world.backend != "gloo":
            raise UserError("elastic=true: ranks on GPUs cannot continue after a rank is lost; set launch.device=cpu")
        if not world.coordinator:
            raise UserError(
                f"elastic=true: {world.launcher} stops all ranks when one rank is lost; use make exp, start the "
                "experiment's script directly, or omit elastic=true"
            )
        assert isinstance(run.metrics, SharedMetricsLog)
        self.run = run
        self.state = state
        self.metrics = run.metrics
        self.joining = world.is_joining
        self.writes_metrics = world.is_main
        """True if this rank writes the metrics as rank 0 of the newest generation that was formed successfully."""
        self.join_agreed = False
        """True if all ranks have agreed that another rank is waiting to join."""
        self.leaving = False
        """True while all ranks leave the generation together between two steps."""
        # A data worker must not free the process groups that it has inherited: this would terminate the worker.
        os.register_at_fork(after_in_child=gc.freeze)
        self.empty_generations = 0
        self.step_start = time.perf_counter()
        """Start of the newest step, in seconds of time.perf_counter()."""
        self.discarded = 0.0
        """Duration of the last failed step in seconds."""
        self.shared = AveragedValues()
        self.buffers = [buffer for _, buffer in state.buffers]
        self.buffers_before = [torch.empty_like(buffer) for buffer in self.buffers]
        """Copies of the model's buffers from the start of the current step."""
        self.random_before = torch.empty(0)
        """State of torch's random number generator at the start of the current step."""
        self.member = Member(
            world.coordinator,
            world.original_rank,
            settings.timeout,
            os.environ.get(COORDINATOR_KEY_VARIABLE, ""),
            joins=world.is_joining,
            irreplaceable=state.irreplaceable,
        )
        self._cut_connections_on_generation_end()
        if world.is_joining:
            self.join_generation()

    # ---- steps

    def before_step(self) -> None:
        """Copy the buffers and the random state, so that the step can be repeated if it fails."""
        self.step_start = time.perf_counter()
        self.shared = AveragedValues()
        copy_tensors(self.buffers, self.buffers_before)
        self.random_before = torch.get_rng_state()

    def start_averaging(self, values: Values) -> None:
        """Start an asynchronous all-reduce that averages logged values of a step over the ranks.

        The all-reduce also determines whether a rank is waiting to join.
        """
        self.shared.start_averaging(values, self.member.has_waiting_rank)

    def commit(self) -> dict[str, float]:
        """Return the values that have been logged in this step, averaged over all ranks.

        All ranks must call this method before the update. Raises RuntimeError if a rank is lost.
        """
        if not self.shared.started:
            self.start_averaging({})
        means, self.join_agreed = self.shared.finish_averaging(self.run.world.size)
        self.empty_generations = 0
        return means

    def between_steps(self, number: int) -> None:
        """Let waiting ranks join. After the last step of an epoch, the evaluation comes first."""
        if number % self.state.loader.steps:
            self.let_ranks_join()

    def let_ranks_join(self) -> None:
        """Raise GenerationEnded on all ranks if a rank is waiting to join and steps remain."""
        if self.join_agreed and self.run.step < self.run.total:
            self.leaving = True
            raise GenerationEnded("a rank is waiting to join")

    @torch.no_grad()
    def discard_step(self) -> None:
        """Reset the data loader, the buffers, and the random state to their states at the start of the failed step."""
        self.discarded = time.perf_counter() - self.step_start
        copy_tensors(self.buffers_before, self.buffers)
        torch.set_rng_state(self.random_before)
        loader = self.state.loader
        done = self.run.step
        epoch = done // loader.steps
        position = loader.count_samples(done) - loader.count_samples(epoch * loader.steps)
        loader.load_state_dict({"epoch": epoch, "position": position})

    def may_come_from_rank_change(self, error: object) -> bool:
        """Return True if an error may have been caused by a lost rank or by a rank that is joining."""
        if not isinstance(error, RuntimeError) or isinstance(error, DataWorkerError):
            return False
        if isinstance(error, GenerationEnded) or self.member.generation_ended:
            return True
        return foreign_text.is_gloo_error(error) or foreign_text.classify_error(error) in PEER_CAUSES

    def exit_if_others_can_continue(self, reason: str) -> None:
        """Exit as a lost rank, which can be restarted, if the other ranks can continue without this rank."""
        if self.run.world.size > 1 and not self.state.irreplaceable:
            self.member.leave_as_lost(reason)

    def finish_run(self) -> bool:
        """Return True if all ranks have finished the run. Otherwise, join the next generation and return False."""
        generation = self.member.sign_in(self._measure_progress(), done=True)
        if not generation.done:
            self.join_generation(generation)
            return False
        self.on_end()
        return True

    def on_end(self) -> None:
        """Disconnect from the coordinator."""
        self.member.close()

    # ---- generations

    def join_generation(self, generation: Generation | None = None) -> None:
        """Form the process group of `generation` (default: the next generation) so that training can continue.

        Raises MachineError if communication fails repeatedly although no rank is lost.
        """
        failure_time = time.perf_counter()
        change = RankChange()
        while True:
            self._abandon_step()
            generation = generation or self.member.sign_in(self._measure_progress(), together=self.leaving)
            self.join_agreed = False
            self.leaving = False
            change.lost += generation.lost
            change.joined += generation.joined
            self.empty_generations = 0 if generation.lost or generation.joined else self.empty_generations + 1
            if self.empty_generations > MAX_EMPTY_GENERATIONS:
                problem = "communication between ranks failed repeatedly although no rank was lost"
                raise MachineError(f"{problem}; see the logs of the ranks")
            try:
                change = self._form_generation(generation, change)
                self._record_change(generation, time.perf_counter() - failure_time, change)
                return
            except RuntimeError as error:
                if not self.may_come_from_rank_change(error):
                    raise
                generation = None

    @torch.no_grad()
    def _abandon_step(self) -> None:
        if not self.leaving:  # ranks that leave together may still need the connections for their last collective
            group.shut_down_connections(self.connections)
        self.state.leave_group(together=self.leaving)
        for _, parameter in self.state.parameters:
            parameter.grad = None
        self.state.restore_buffers()  # an evaluation may have averaged the buffers
        self.run.saver.restart_watchdogs()

    def _measure_progress(self) -> list[int]:
        if self.joining:
            return [-1, 0, 0]
        epoch = self.state.loader.state_dict()["epoch"]
        return [self.run.step, epoch, not self.run.progress.unevaluated]

    def _cut_connections_on_generation_end(self) -> None:
        """Make the member's thread cut the connections of the process group when the generation ends."""
        connections = group.list_connections(self.member.socket)
        self.connections = connections
        self.member.on_generation_end = lambda: group.shut_down_connections(connections)
        if self.member.generation_ended:
            group.shut_down_connections(connections)

    def _form_generation(self, generation: Generation, change: RankChange) -> RankChange:
        """Form the process group of a generation, and copy the source rank's state to the other ranks.

        `change` contains the lost and joined ranks known to this rank. Returns the change that is known to the source
        rank. Raises RuntimeError if communication fails.
        """
        run = self.run
        self.connections = []
        group.form_process_group(self.member, run.world.timeout, run.world.original_rank)
        self._cut_connections_on_generation_end()
        self._update_ranks()
        world = run.world

        # Copy the state of the source rank.
        facts = self._collect_run_facts(change) if dist.get_rank() == generation.source else None
        facts = objects.broadcast_json(facts, generation.source, world.device)
        if generation.copies:
            loads = self._measure_progress() != facts["progress"]
            peer_copy.broadcast_state(self.state, generation.source, world, facts["run"]["step"], loads=loads)
        self._apply_run_facts(facts)  # now, to match the copied state even if communication fails below
        self.joining = False
        self.state.enter_group(facts["run"]["step"])
        group.free_left_process_groups()
        self._divide_batches(generation.members)

        # Move the metrics and the progress display to the new rank 0.
        if world.is_main != self.writes_metrics:
            run.reopen_screen()
        if world.is_main and not self.writes_metrics:
            self.metrics.take_over_metrics_file()
        self.writes_metrics = world.is_main
        self.metrics.write_rows(self.metrics.unwritten_rows)
        return RankChange(**facts["change"])

    def _update_ranks(self) -> None:
        """Set the ranks and hosts of the run to those of the new process group."""
        hosts = self.run.world.all_gather(socket.gethostname())
        self.run.ranks.renumber(dist.get_rank(), hosts)

    def _divide_batches(self, members: Sequence[int]) -> None:
        """Divide each batch among the members in proportion to the `shards` setting, or equally if it is not set."""
        loader = self.state.loader
        plan = self.run.training_cfg.batch_plan
        assert isinstance(loader, Loader)
        weights = [plan.weights[member] for member in members] if plan.weights else []
        if not any(weights):
            weights = [1] * len(members)
        loader.set_shards(dist.get_rank(), divide_batch(plan.batch // plan.microbatches, weights))

    def _collect_run_facts(self, change: RankChange) -> dict[str, Any]:
        """Return the progress, counters, and unwritten metrics that the source rank sends to all other ranks."""
        change = dataclasses.replace(change, discarded=self.discarded)
        return {
            "progress": self._measure_progress(),
            "run": self.run.progress.to_peer_facts(),
            "rows": self.metrics.collect_unwritten_rows(),
            "change": dataclasses.asdict(change),
        }

    def _apply_run_facts(self, facts: dict[str, Any]) -> None:
        """Set this rank's progress and unwritten metrics to those received from the source rank."""
        run = self.run
        run.progress.copy_from_peer(facts["run"], joins=self.joining)
        run.saver.vote.restart_votes_after(run.step)
        self.metrics.replace_unwritten_rows(facts["rows"], run.step)

    def _record_change(self, generation: Generation, seconds: float, change: RankChange) -> None:
        """Record a change in the set of ranks in the log and the run folder.

        `seconds` is the time from the failure until the new generation was formed.
        """
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
        run.progress.add_generation(changed)
        run.log_message(describe_rank_change(changed))
        run.pace.exclude_pause()
        if generation.stops and not run.stop_request.signal_number:
            run.log_message(
                "fewer ranks than elastic.min remain; saving a checkpoint so that the run can be resumed with all ranks"
            )
            run.stop_request.request_stop()
        if run.world.is_main:
            with contextlib.suppress(UserError, OSError):  # reported when metrics or checkpoints are written
                write_json(run.folder.attempt_folder / GENERATIONS_FILE, run.progress.generations)


def copy_tensors(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    """Copy each source tensor to the target tensor of the same shape, all in one call."""
    if source:  # _foreach_copy_ rejects an empty list
        torch._foreach_copy_(target, source)
