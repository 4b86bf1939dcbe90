"""State of a run on one rank: data, device, log, checkpoints, and measurements."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from common.checkpoint.local_part import LocalPart
from common.checkpoint.saver import Saver
from common.checkpoint.stop_request import StopRequest
from common.checkpoint.train_state import TrainState
from common.data.prepare import PreparedDataset
from common.measure import profiler
from common.measure.metrics_log import MEAN, MetricsLog, SharedMetricsLog
from common.measure.step_timing import StepDurations, StepTimer
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder, write_json
from common.runs.metrics_writer import MetricsWriter
from common.runs.progress import ProgressDisplay
from common.runs.run_progress import RunProgress
from common.system.errors import UserError
from common.training.failure_log import FailureLog
from common.training.hooks import RecoveryHook, StepHook
from common.training.run_data import RunData
from configs.dataparallel import get_enabled_elastic_settings
from configs.shared import Experiment

if TYPE_CHECKING:
    from common.training.gradient_norm import GradientNorm
    from common.training.step_meter import StepMeter

HEARTBEAT_SECONDS = 5.0
H = TypeVar("H", bound=StepHook)
Evaluate = Callable[[], dict[str, float]]


class RunContext(RunData):
    """State of a run on one rank.

    The subclass `Run` adds the methods that train the model and finish the run.
    """

    further_message_bytes: int = 0
    """Bytes that this rank sends in each step outside torch.distributed, such as through shared memory."""
    metered_modules: Sequence[nn.Module] | None = None
    """Modules whose memory is measured; None measures those that are registered."""

    def __init__(
        self,
        cfg: Experiment,
        folder: RunFolder,
        ranks: Ranks,
        prepared: PreparedDataset,
        stop: StopRequest | None = None,
    ) -> None:
        self.stop_request = stop or StopRequest(cfg.checkpoint.grace, sys.stderr)
        super().__init__(cfg, ranks, prepared, self.stop_request)
        self.folder = folder
        world = ranks.current
        self.screen = self._open_screen()
        self.logger = self._open_log()
        self.failures = FailureLog(folder, world.original_rank, self.logger)
        trace = folder.attempt_folder / f"trace-{world.original_rank}.json"
        self.profiler = profiler.start_profiler(cfg.profile, trace, self.log_message)
        self.progress = RunProgress()
        self.saver = Saver(cfg, folder, ranks, self.stop_request, self.log_message, self.progress)
        if world.backend == "nccl" and world.size > 1:
            self.saver.start_silence_watch(self.log_failure)
        self.pace = StepDurations()
        self.times: StepTimer | None = None
        """Timestamps within this rank's steps; None unless every rank trains the same model."""
        self.hooks: list[StepHook] = []
        self.local_parts: dict[str, LocalPart] = {}
        """State of techniques that differs between ranks, by name."""
        self.recovery: RecoveryHook | None = None
        """Hook that recovers from the loss of a rank; None unless the run is elastic."""
        self.gradient_norm: GradientNorm | None = None
        """Hook that computes the norm of the gradients; None unless log.gradient_norm=true."""
        self.metrics: MetricsLog | None = None
        self.state: TrainState | None = None
        """What is trained and saved; None before it is registered."""
        self.evaluate: Evaluate = dict
        """Evaluation after each epoch, which returns the scores. By default, there are no scores."""
        self.loss_rank = MEAN
        """Rank whose logged values are written to metrics.jsonl, or MEAN to write the mean over all ranks."""
        self.total = 0
        """Total number of steps in the run; 0 before the state is registered."""
        self.is_resumed = False
        """True once the newest checkpoint, if any, is loaded."""
        self.has_started_loop = False
        self.heartbeat_time = 0.0
        """Time of the last heartbeat, in seconds of time.perf_counter()."""
        self.scores: dict[str, float] = {}
        """Scores of the final evaluation; empty until training is complete."""
        self.complete = False
        """True once all steps are done and the final evaluation is recorded."""
        self.memory: dict[str, int] = {}
        """Peak memory of each rank in bytes, known on rank 0 only; empty until training is complete."""
        self.finished = False
        """True on rank 0 once it has started to write the result."""
        if world.is_main:
            write_json(folder.attempt_folder / "world.json", describe_world(world))

    @property
    def step(self) -> int:
        """Number of completed steps, including those of earlier attempts."""
        return self.progress.step

    @property
    def resumed_after(self) -> int:
        """Number of steps that earlier attempts completed."""
        return self.progress.resumed_after

    def can_stop_immediately(self) -> bool:
        """Return True if a stop without a checkpoint loses no work of this rank.

        This is the case before the first step of this attempt, and again after the last evaluation, until rank 0
        writes the result.
        """
        if self.complete:
            return not self.finished
        return self.step == self.resumed_after

    # ---- training

    def set_up_training(self, state: TrainState, evaluate: Evaluate, loss_rank: int) -> None:
        """Set what is trained, how it is evaluated, and the rank that knows the loss (or MEAN)."""
        if self.state is not None:
            raise RuntimeError(
                "a run trains one model or repeats one measurement; call either run.register(...) or run.repeat(...), "
                "and only once"
            )
        self.state = state
        self.evaluate = evaluate
        self.loss_rank = loss_rank
        self.total = self.cfg.compute_total_steps(state.loader.steps)
        if self.cfg.log.gradient_norm == "true":
            from common.training.gradient_norm import GradientNorm  # imported here because other runs do not need it

            self.gradient_norm = GradientNorm(state)
            self.add_hook(self.gradient_norm)
        if self.cfg.log.memory:
            self.add_step_meter()

    def start_loop(self) -> None:
        """Record the start of the loop over the steps. Raises RuntimeError if a loop was started before.

        A second loop would repeat the step in which the first one was left, although its update has been applied.
        """
        if self.has_started_loop:
            raise RuntimeError(
                f"the loop over the steps was started a second time, after step {self.step} of {self.total}; use one "
                "loop, and the setting steps=N to stop early"
            )
        self.has_started_loop = True

    def resume(self) -> int:
        """Load the newest checkpoint, if any, and return the number of completed steps.

        A call is only necessary for work between loading a checkpoint and the first step. Call `register` before. All
        ranks must call this method.
        """
        if self.state is None:
            raise RuntimeError("nothing to resume; call run.register(...) before run.resume() and run.steps()")
        self.is_resumed = True
        for hook in self.hooks:
            hook.before_load()
        parent = None
        rows = 0
        self.metrics = self._create_metrics_log(self.state)
        loaded = self.saver.load(self.state, self.metrics)
        if loaded is not None:
            parent = loaded.attempt
            rows = int(loaded.common["rows"])
            self.log_message(f"resumed from step {self.step} (attempt {parent})")
        if self.world.is_main:
            self.folder.record_parent_attempt(parent, self.step, rows, self.total)
        return self.step

    def add_hook(self, hook: StepHook) -> None:
        """Add work between the steps of this run. All ranks must add the same hooks in the same order."""
        self.hooks.append(hook)

    def add_recovery(self, recovery: RecoveryHook) -> None:
        """Add the hook that recovers from the loss of a rank."""
        self.recovery = recovery
        self.hooks.append(recovery)

    def set_up_step_meter(self, modules: Sequence[nn.Module] | None, further_message_bytes: int) -> None:
        """Set the modules whose memory is measured, and the bytes that are sent outside torch.distributed."""
        self.metered_modules = modules
        self.further_message_bytes = further_message_bytes

    def add_step_meter(self) -> StepMeter:
        """Measure the memory and the messages of this rank in one step of this attempt (`log.memory`, by default 1).

        If the attempt has fewer steps, its last step is measured. Call this method after `register`, on all ranks.
        Another call returns the same meter.
        """
        from common.training.step_meter import StepMeter  # imported here because most runs do not measure memory

        meter = self.find_hook(StepMeter)
        if meter is None:
            assert self.state is not None and self.state.optimizer is not None
            meter = StepMeter(
                self.metered_modules or self.state.parts,
                self.state.optimizer,
                step=max(1, self.cfg.log.memory),
                count_remaining=lambda: self.total - self.step,
                further_message_bytes=self.further_message_bytes,
                local_parts=self.local_parts,
            )
            self.add_hook(meter)
        return meter

    def find_hook(self, kind: type[H]) -> H | None:
        """Return the first hook of a class, or None if there is none."""
        for hook in self.hooks:
            if isinstance(hook, kind):
                return hook
        return None

    def add_local_part(self, name: str, part: LocalPart) -> None:
        """Add state that each rank saves and loads itself. Call this method before `register`."""
        if self.state is not None:
            raise RuntimeError(f"the state {name!r} would not be saved; add it before run.register(...)")
        self.local_parts[name] = part

    def _create_metrics_log(self, state: TrainState) -> MetricsLog:
        """Create the log that writes the values of training steps to metrics.jsonl."""
        log_class = SharedMetricsLog if get_enabled_elastic_settings(self.cfg) else MetricsLog
        loss = getattr(self.cfg, "loss", "")  # a pure measurement has no loss
        return log_class(
            self.ranks,
            MetricsWriter(self.folder.metrics_file, self._warn_of_unwritable_metrics),
            state.loader,
            source=self.loss_rank,
            seconds=self.cfg.log.seconds,
            custom_loss=loss.rpartition(":")[2] if ":" in loss else "",
            progress=self.progress,
            show=self._show_progress,
        )

    def _warn_of_unwritable_metrics(self, text: str) -> None:
        """Log a warning that metrics cannot be written, unless the cause is reported elsewhere.

        The saver reports a missing run folder. The checkpointer reports a failure to write a checkpoint; in this case,
        the warning is logged at level DEBUG.
        """
        if not self.saver.attempt_watch.has_folder():
            return
        level = logging.DEBUG if self.saver.checkpointer.problem else logging.WARNING
        self.log_message(text, level)

    def stop_if_requested(self) -> None:
        """Write the heartbeat, and stop the run if any rank has received a stop request.

        All ranks must call this method between two batches of an evaluation. Raises StopRequested once the state before
        the evaluation has been saved.
        """
        self.write_heartbeat(time.perf_counter())
        self.saver.stop_evaluation_if_requested(self.step)

    # ---- log, progress and measurements

    def _open_screen(self) -> ProgressDisplay:
        """Return a progress display, which is silent unless this rank is rank 0."""
        return ProgressDisplay(self.cfg.log, silent=not self.world.is_main)

    def reopen_screen(self) -> None:
        """Show the progress if this rank has become rank 0, and hide it if another rank has become rank 0."""
        self.screen.close()
        self.screen = self._open_screen()

    def _open_log(self) -> logging.Logger:
        logging.raiseExceptions = False  # a full disk is reported when metrics or checkpoints are written
        logger = logging.getLogger("run")
        logger.setLevel(logging.DEBUG)
        handler = logging.FileHandler(self.folder.log_file(self.world.original_rank))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        return logger

    def log_message(self, text: str, level: int = logging.INFO) -> None:
        """Write a message to this rank's log file.

        Rank 0 also prints the message to the terminal if its level is at least log.level.
        """
        self.logger.log(level, text)
        if level >= logging.getLevelName(self.cfg.log.level.upper()):
            self.screen.print_line(text)

    def log_failure(self, error: BaseException | str) -> None:
        """Log this rank's failure and the last completed step, and record the failure in the attempt's folder.

        A string names the ranks that did not respond.
        """
        self.failures.log_failure(self.step, error)

    def _show_progress(self, step: int, newest: dict[str, float]) -> None:
        columns = [f"{name} {value:.4g}" for name, value in newest.items()]
        speed = self.compute_samples_per_second()
        if speed and self.trains:
            columns.append(f"{speed:.0f} samples/s")
        self.screen.show_progress("step", step, self.total, "  ".join(columns))

    @property
    def local_samples_if_unequal(self) -> int | None:
        """Number of this rank's samples per full batch, or None if shards are equal."""
        return self.state.loader.local_samples_if_unequal if self.state else None

    def write_heartbeat(self, now: float) -> None:
        """Write this rank's heartbeat, at most once per HEARTBEAT_SECONDS.

        `now` is the current time in seconds of time.perf_counter().
        """
        if now - self.heartbeat_time <= HEARTBEAT_SECONDS:
            return
        self.heartbeat_time = now
        measured = {
            "before_backward": self.times.estimate_seconds_to_backward() if self.times else None,
            "samples": self.local_samples_if_unequal,
        }
        with contextlib.suppress(UserError, OSError):  # reported when metrics or checkpoints are written
            self.folder.write_heartbeat(self.world.original_rank, self.step, time.time(), **measured)

    def log_image(self, step: int, name: str, pixels: Tensor) -> None:
        """Log an image to the run folder and W&B.

        `pixels` has the shape [H, W] or [3, H, W] and contains uint8 values or floats from 0 to 1. Only rank 0 writes
        the image; a call on any other rank has no effect. Raises ValueError if the shape or the name is invalid.
        """
        if self.world.is_main:
            from common.measure import media  # imported here because few runs log images

            media.write_image(self.folder, step, name, pixels)

    def log_histogram(self, step: int, name: str, values: Tensor) -> None:
        """Log a histogram with 64 bins to the run folder and W&B.

        `values` is a tensor of any shape. Only rank 0 writes the histogram; a call on any other rank has no effect.
        """
        if self.world.is_main:
            from common.measure import media

            media.write_histogram(self.folder, step, name, values)

    def compute_step_seconds(self) -> float:
        """Return the mean step duration in seconds, or 0 if no step was timed.

        The first steps and the time spent in evaluations are excluded.
        """
        return self.pace.compute_mean_duration()

    def compute_samples_per_second(self) -> float:
        """Return the throughput in samples per second, excluding the first steps and evaluations."""
        steady = self.pace.list_steady_durations()
        if not steady or self.state is None:
            return 0.0
        count_samples = self.state.loader.count_samples
        return (count_samples(self.step) - count_samples(self.step - len(steady))) / sum(steady)

    def close(self) -> None:
        """Write the last heartbeat, and close the log, the profiler, and the progress display."""
        if self.total > 0:  # a failed rank also records its last step
            self.write_heartbeat(math.inf)
        self.saver.close()
        for handler in self.logger.handlers[:]:
            self.logger.removeHandler(handler)
            with contextlib.suppress(OSError):  # the disk may be full
                handler.close()
        if self.profiler is not None:
            self.profiler.stop()
        self.screen.close()


def describe_world(world: World) -> dict[str, Any]:
    """Return the ranks, hosts, and devices of an attempt, for world.json and meta.json."""
    cuda = world.device.type == "cuda"
    return {
        "processes": world.size,
        "nodes": world.nodes,
        "hosts": list(world.hosts),
        "launched_by": world.launcher,
        "backend": world.backend,
        "tls": world.transport is not None and world.transport.identity is not None,
        "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
        "cuda": torch.version.cuda if cuda else None,
        "threads": world.threads,
        "rendezvous_seconds": round(world.rendezvous_seconds, 3),
    }
