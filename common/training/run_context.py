"""State of a run on one rank: data, devices, log, checkpoints, measurements."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from common.checkpoint.saver import Saver
from common.checkpoint.stop_request import StopRequest
from common.checkpoint.train_state import TrainState
from common.core.errors import MachineError, UserError
from common.data.loader import Images, Loader, draw_order
from common.data.prepare import Prepared
from common.data.rounds import Rounds
from common.data.shards import AutoShards
from common.distributed.rendezvous import World
from common.measure import media, profiler
from common.measure.metrics_log import MetricsLog, SharedMetricsLog
from common.measure.step_timing import Pace, StepTimes
from common.runs.folder import Folder, write_json
from common.runs.metrics_writer import MetricsWriter
from common.runs.progress import Screen
from configs.elastic import find_elastic
from configs.shared import Experiment

HEARTBEAT = 5.0  # seconds


class RunContext:
    """State of a run on one rank. `Run` adds the methods that train and end it."""

    def __init__(
        self, cfg: Experiment, folder: Folder, world: World, prepared: Prepared, stop: StopRequest | None = None
    ) -> None:
        self.cfg, self.folder, self.world, self.prepared = cfg, folder, world, prepared
        self.screen = Screen(cfg.log, silent=not world.is_main)
        self.logger = self._open_log()
        trace = folder.attempt / f"trace-{world.number}.json"
        self.profiler = profiler.start_profiler(cfg.profile, trace, self.log_message)
        self.saver = Saver(cfg, folder, world, stop, self.log_message)
        if world.backend == "nccl" and world.size > 1:
            self.saver.start_silence_watch(self.log_failure)
        self.pace = Pace()
        self.times: StepTimes | None = None
        """Time stamps of this rank's steps, where every rank trains the same model."""
        self.shards: AutoShards | None = None
        """With shards=auto, what chooses the shards."""
        self.metrics: MetricsLog | None = None
        self.state: TrainState | None = None
        self.step = 0
        """Number of the newest step that is done."""
        self.resumed_after = 0
        """Number of the newest step that an earlier attempt has done."""
        self.total = 0
        """Steps of the whole run; 0 before `resume`."""
        self.beat = 0.0
        self.scores: dict[str, float] = {}
        """Scores of the last evaluation, once training is over."""
        self.complete = False
        """True once all steps are done and the last evaluation is recorded."""
        self.memory: dict[str, int] = {}
        """On rank 0, the peak bytes of each rank, once training is over."""
        self.finished = False
        self.generations: list[dict[str, Any]] = []
        """Of an elastic run, each change of its ranks (see training/elastic/recovery)."""
        self.leave_if_possible: Callable[[str], None] = lambda reason: None
        """In an elastic run, ends this process as a lost rank where others can continue without it."""
        if world.is_main:
            write_json(folder.attempt / "world.json", describe_world(world))

    # ---- data and devices

    @cached_property
    def train_set(self) -> Images:
        return Images(self.prepared, "train", self.cfg.data.train_limit)

    @cached_property
    def test_set(self) -> Images:
        return Images(self.prepared, "test", self.cfg.data.test_limit)

    @property
    def sample_shape(self) -> torch.Size:
        """Shape of one input, as [C, H, W]."""
        return self.train_set.shape

    @property
    def classes(self) -> int:
        return self.train_set.classes

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters and arithmetic."""
        dtype: torch.dtype = getattr(torch, self.cfg.dtype)
        return dtype

    @property
    def shard(self) -> tuple[int, int]:
        """Index and number of the shards of a batch, for ranks that all train the same model."""
        return self.world.rank, self.world.size

    def batches(
        self,
        *,
        shard: tuple[int, int] = (0, 1),
        inputs: bool = True,
        targets: bool = True,
        keep_partial: bool = False,
    ) -> Loader:
        """Return the batches of the training set for this rank, one for each optimizer step.

        `shard` (r, n) takes the r-th of n shards of each batch: those of `cfg.batch_plan` if it is this rank's, else
        equal ones. A pipeline's first rank needs only inputs, its last one only targets. With `keep_partial` an epoch's
        last batch may be smaller. Raises UserError where the training set has too few samples.
        """
        parts = {"inputs": inputs, "targets": targets, "drop_last": not keep_partial}
        return self._make_loader(shard, **parts)

    def microbatches(self, count: int, *, shard: tuple[int, int] = (0, 1)) -> Loader:
        """Return the batches in `count` microbatches each, whose gradients one optimizer step adds up.

        Their sizes are those of `cfg.batch_plan`. A pipeline takes `batches`, which its engine splits.
        """
        return self._make_loader(shard, batch=self.cfg.batch // count, microbatches=count)

    def _make_loader(self, shard: tuple[int, int], **options: Any) -> Loader:
        weights = self.cfg.batch_plan.weights if shard == self.shard else ()
        options |= {"shard": shard, "weights": weights, "stop_requested": lambda: bool(self.saver.stop.number)}
        return Loader.from_config(self.train_set, self.cfg, self.device, **options)

    def load_example(self, samples: int) -> Tensor:
        """Return the first inputs [samples, ...] of the training set, on the device."""
        return self.train_set.load_inputs(slice(0, samples), self.device, self.dtype)

    def draw_batches(self, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard (inputs, targets) of at most `count` full batches in a random order given by `seed`.

        They are apart from the order of training, and not augmented.
        """
        size, (rank, ranks) = self.cfg.batch, self.shard
        order = torch.from_numpy(draw_order(len(self.train_set), seed, 0))
        for batch in order[: len(order) // size * size].view(-1, size)[:count]:
            own = batch.view(ranks, -1)[rank]
            yield (
                self.train_set.load_inputs(own, self.device, self.dtype),
                self.train_set.load_targets(own, self.device),
            )

    # ---- training

    def resume(self, state: TrainState) -> int:
        """Load the newest checkpoint of the run, if there is one; return the steps done. All ranks call it."""
        self.state, self.total = state, self.cfg.total_steps(state.loader.steps)
        loaded = self.saver.load(state)
        parent, rows = None, 0
        if loaded is not None:
            self.step, parent, rows = loaded.step, loaded.attempt, int(loaded.common["rows"])
            self.resumed_after = loaded.step
            self.log_message(f"goes on after step {self.step}, saved by attempt {parent}")
        if self.world.is_main:
            self.folder.write_parent(parent, self.step, rows)
        return self.step

    def open_metrics(self, state: TrainState, source: int) -> None:
        """Begin to log the steps of `state`; `source` is the rank that knows their values, or MEAN."""
        writer = MetricsWriter(self.folder.metrics_file, self._warn_of_disk)
        seconds, began, show = self.cfg.log.seconds, self.saver.began, self._show_progress
        kind = SharedMetricsLog if find_elastic(self.cfg) else MetricsLog
        self.metrics = kind(self.world, writer, state.loader, source=source, seconds=seconds, began=began, show=show)
        self.saver.metrics = self.metrics

    def _warn_of_disk(self, text: str) -> None:
        """Log a warning that metrics cannot be written.

        The saver reports a folder that is gone, and the checkpointer a disk that has already refused a checkpoint.
        """
        if not self.saver.watch.is_there():
            return
        level = logging.DEBUG if self.saver.checkpointer.problem else logging.WARNING
        self.log_message(text, level)

    def stop_if_requested(self) -> None:
        """Between two batches of an evaluation, write the heartbeat, and stop if any rank has a stop request."""
        self.write_heartbeat(time.perf_counter())
        self.saver.stop_in_evaluation(self.step)

    # ---- words and numbers

    def _open_log(self) -> logging.Logger:
        logging.raiseExceptions = False  # a full disk is reported by the files that matter more
        logger = logging.getLogger("run")
        logger.setLevel(logging.DEBUG)
        handler = logging.FileHandler(self.folder.log_file(self.world.number))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        return logger

    def log_message(self, text: str, level: int = logging.INFO) -> None:
        """Write to this rank's log file and, on rank 0 from log.level up, to the screen."""
        self.logger.log(level, text)
        if level >= logging.getLevelName(self.cfg.log.level.upper()):
            self.screen.print_line(text)

    def log_failure(self, error: BaseException | str) -> None:
        """Write why this rank failed, and after which step, into its log."""
        plain = isinstance(error, str | UserError | MachineError)
        words = str(error) if plain else f"{type(error).__name__}: {error}"
        self.logger.error("after step %d: %s", self.step, words, exc_info=None if plain else error)  # type: ignore[arg-type]

    def _show_progress(self, step: int, newest: dict[str, float]) -> None:
        shown, speed = [f"{name} {value:.4g}" for name, value in newest.items()], self.samples_per_second()
        if speed and self.cfg.trains:
            shown.append(f"{speed:.0f} samples/s")
        self.screen.show_progress("step", step, self.total, "  ".join(shown))

    @property
    def own_unequal_samples(self) -> int | None:
        """This rank's samples of a full batch, where the settings give ranks unequal shards; else None."""
        if self.shards is not None:
            return self.shards.own_samples
        loader = self.state.loader if self.state else None
        if loader is None or isinstance(loader, Rounds) or not self.cfg.batch_plan.weights:
            return None
        return loader.own_samples

    def write_heartbeat(self, now: float) -> None:
        """Write this rank's heartbeat, at most every HEARTBEAT seconds; `now` by time.perf_counter()."""
        if now - self.beat > HEARTBEAT:
            self.beat = now
            measured = {
                "before_backward": self.times.estimate_seconds_to_backward() if self.times else None,
                "samples": self.own_unequal_samples,
            }
            with contextlib.suppress(UserError):  # a full disk is reported by the files that matter more
                self.folder.write_heartbeat(self.world.number, self.step, time.time(), **measured)

    def log_image(self, step: int, name: str, pixels: Tensor) -> None:
        """Log an image [H, W] or [3, H, W], uint8 or floats from 0 to 1, to the run folder and W&B.

        Rank 0's counts; the other ranks need not call it. Raises ValueError for another shape or an invalid name.
        """
        if self.world.is_main:
            media.write_image(self.folder, step, name, pixels)

    def log_histogram(self, step: int, name: str, values: Tensor) -> None:
        """Log how often values of a tensor of any shape fall into 64 bins; otherwise as `log_image`."""
        if self.world.is_main:
            media.write_histogram(self.folder, step, name, values)

    def step_seconds(self) -> float:
        """Return the mean seconds of a step, evaluations and the first steps left out; 0 before there is one."""
        return self.pace.compute_mean()

    def samples_per_second(self) -> float:
        """Return the samples per second over the same steps."""
        steady = self.pace.list_steady()
        if not steady or self.state is None:
            return 0.0
        samples = self.state.loader.count_samples
        return (samples(self.step) - samples(self.step - len(steady))) / sum(steady)

    def close(self) -> None:
        if self.total > 0:  # also of a rank that failed, the last heartbeat is of its last step
            self.write_heartbeat(math.inf)
        self.saver.close()
        for handler in self.logger.handlers[:]:
            self.logger.removeHandler(handler)
            with contextlib.suppress(OSError):  # a full disk
                handler.close()
        if self.profiler is not None:
            self.profiler.stop()
        self.screen.close()


def describe_world(world: World) -> dict[str, Any]:
    """Return the ranks, hosts and devices of an attempt, for world.json and meta.json."""
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
