"""Timing of steps: durations, timestamps within data-parallel steps, and typical times of each rank.

The all-reduce makes the steps of all ranks equally long, so the step time cannot identify a slow rank. Instead, ranks
are compared by the time from the start of a step to the start of backward. Before backward, ranks do not wait for each
other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from common.measure.device_clock import DeviceClock, Stamp
from common.measure.steady_steps import WARM_UP, select_steady_steps
from common.ranks.rendezvous import World

T = TypeVar("T")
queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # for the end of a backward pass
HISTORY = 1000
"""Maximum number of steps whose timestamps are stored. Older timestamps are discarded."""
NEWEST_STEPS = 50
"""Number of newest steps that determine the current speed of a rank."""
MIN_STEPS = 10
"""Minimum number of measured steps before a rank can be reported as a straggler."""


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank in a typical step, in seconds."""

    data: float
    """Mean time spent waiting for a batch."""
    before_backward: float
    """Time from the start of a step to the start of backward, excluding the time spent waiting for other ranks."""
    step: float
    """Mean duration of the entire step."""
    steps: int
    """Number of measured steps."""
    rank: int = 0
    exposed: Sequence[float] = ()
    """Time of communication in each step between the last gradient and the end of backward."""
    samples: float | None = None
    """Mean number of this rank's samples per batch if the shards are unequal; None if the shards are equal."""


class StepDurations:
    """Durations of the steps of this attempt, measured with the clock of the host.

    Time that is not spent on training, such as an evaluation between two steps, is excluded.
    """

    def __init__(self) -> None:
        self.durations: list[float] = []  # in seconds
        self.mark: float | None = None  # value of time.perf_counter() from which the next step is measured

    def record_step_end(self, now: float) -> float | None:
        """Record the end of a step, and return its duration in seconds, or None for the first step.

        `now` is the current value of time.perf_counter().
        """
        seconds = None if self.mark is None else now - self.mark
        if seconds is not None:
            self.durations.append(seconds)
        self.mark = now
        return seconds

    def exclude_pause(self) -> None:
        """Exclude the time since the last step from the duration of the next step."""
        self.mark = time.perf_counter()

    def is_next_step_first_steady(self, left: int) -> bool:
        """Return whether the next step is the first step that counts toward the mean duration.

        `left` is the number of steps that remain in the run. The mean duration does not include the first WARM_UP
        steps. In a short run, only the first third of the steps is excluded.
        """
        done = len(self.durations) + (self.mark is not None)  # the first step only sets the mark
        return done == min(WARM_UP, (done + left) // 3)

    def list_steady_durations(self) -> list[float]:
        """Return the durations in seconds of all steps after the first WARM_UP steps.

        In a short run, only the first third of the steps is excluded.
        """
        return list(select_steady_steps(self.durations))

    def compute_mean_duration(self) -> float:
        """Return the mean step duration in seconds, without the first steps.

        The method `list_steady_durations` excludes the first steps. The result is 0 if there are no other steps.
        """
        return fmean(self.list_steady_durations() or [0.0])


class StepTimestamps(NamedTuple):
    """Timestamps of one step."""

    marks: dict[str, Stamp]
    """Timestamps by name, such as "start" and "backward"."""
    layer_spans: list[tuple[Stamp, Stamp]]
    """Start and end of the forward pass of each sharded layer in the first microbatch."""
    waited: float
    """Seconds of the measured forward time that synchronized BatchNorm waited for other ranks."""


class StepTimer:
    """A recorder of timestamps within the steps of one rank."""

    def __init__(self, model: nn.Module, device: torch.device, sharded: Iterable[nn.Module] = ()) -> None:
        """Install hooks in the model that record timestamps.

        `sharded` contains the layers that gather their parameters in the forward pass. If there are such layers, the
        forward time is the sum of their computing times, without the time spent waiting for parameters.
        """
        sharded_layers = list(sharded)
        self.measured_modules = sharded_layers or [model]
        self.clock = DeviceClock(device)
        self.layer_starts: list[Stamp] = []
        self.layer_spans: list[tuple[Stamp, Stamp]] = []
        # The hooks of fully_shard gather the parameters before these hooks record the start, and free the parameters
        # after these hooks have recorded the end.
        for layer in sharded_layers:
            layer.register_forward_pre_hook(lambda *_: self.layer_starts.append(self.clock.stamp()))
            layer.register_forward_hook(self._record_layer_span, prepend=True)
        self.history: deque[StepTimestamps] = deque(maxlen=HISTORY)
        self.marks: dict[str, Stamp] = {}
        self.waited = 0.0
        self.steps_to_skip = WARM_UP

        # Backward computes the gradient of the first trainable parameter last.
        first_trainable = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        first_trainable.register_hook(lambda _: self.record_mark("last gradient"))

    def _record_layer_span(self, *_: object) -> None:
        """Store the start and the end of the forward pass of a sharded layer, unless backward has started before."""
        start = self.layer_starts.pop()
        if "backward" not in self.marks:  # later microbatches do not count
            self.layer_spans.append((start, self.clock.stamp()))

    def record_mark(self, name: str) -> None:
        """Record the current time under a name."""
        self.marks[name] = self.clock.stamp()

    def record_backward_start(self) -> None:
        """Record the mark "backward", and the time that the layers have waited for other ranks until then.

        Layers may also wait later, if backward repeats their forward pass (recomputation) or in later microbatches.
        """
        self.record_mark("backward")
        self.waited = self._pop_waiting_seconds()

    def _pop_waiting_seconds(self) -> float:
        """Return and reset the seconds that the measured modules have waited for other ranks."""
        return sum(map(pop_total_waiting_seconds, self.measured_modules))

    def watch_backward(self, loss: Tensor) -> None:
        """Record the marks "backward" and "end of backward" in the backward pass of a loss.

        Only the first backward pass of a step is recorded.
        """

        def record_start(_: Tensor) -> None:
            if "backward" not in self.marks:
                self.record_backward_start()
                queue_callback(queue_end)

        def queue_end() -> None:
            # DDP and FSDP have queued callbacks during backward, which wait for their communication. A callback that is
            # queued now runs after them.
            queue_callback(lambda: self.record_mark("end of backward"))

        loss.register_hook(record_start)

    def iterate_batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader, and record the timestamps of each step.

        A step lasts from the request for a batch until the request for the next batch.
        """
        source = iter(loader)
        while True:
            self.clock.refresh_reference_event()
            self.marks = {"start": self.clock.stamp()}
            self.layer_starts = []
            self.layer_spans = []
            self.waited = 0.0
            self._pop_waiting_seconds()  # of the previous step, after the start of backward
            batch = next(source, None)
            if batch is None:
                return
            self.record_mark("data")
            yield batch
            self.record_mark("end")
            self._store_step()

    def _store_step(self) -> None:
        """Store the timestamps of the finished step, except for the first WARM_UP steps."""
        if "backward" not in self.marks:  # the experiment does not mark the start of backward
            return
        if self.steps_to_skip:
            self.steps_to_skip -= 1
        else:
            self.history.append(StepTimestamps(self.marks, self.layer_spans, self.waited))

    def _measure_step(self, step: StepTimestamps) -> dict[str, float]:
        """Return the durations of the parts of a step in seconds, by name.

        The duration of the forward pass does not include the time spent waiting for other ranks.
        """
        to_seconds = self.clock.to_seconds
        times = {name: to_seconds(stamp) for name, stamp in step.marks.items()}
        if step.layer_spans:
            forward = sum(to_seconds(end) - to_seconds(start) for start, end in step.layer_spans)
        else:
            forward = times["backward"] - times["data"]
        seconds = {
            "data": times["data"] - times["start"],
            "forward": forward - step.waited,
            "step": times["end"] - times["start"],
        }
        if "last gradient" in times:
            seconds["to last gradient"] = times["last gradient"] - times["start"]
            if "end of backward" in times:
                seconds["exposed"] = times["end of backward"] - times["last gradient"]
        return seconds

    def measure_seconds_to_last_gradient(self, steps: int) -> float | None:
        """Return the median time in seconds from step start to last gradient.

        A rank does not wait for other ranks before the last gradient, except in synchronized BatchNorm. The median is
        computed over the newest `steps` steps. Returns None if fewer steps are stored. On a GPU, this method waits
        until the GPU has finished the newest steps.
        """
        newest = [self._measure_step(step) for step in list(self.history)[-steps:]]
        return median(step["to last gradient"] for step in newest) if len(newest) == steps else None

    def estimate_seconds_to_backward(self) -> float | None:
        """Return the median time in seconds from step start to backward.

        The median is computed over the NEWEST_STEPS newest steps. Returns None if fewer than MIN_STEPS steps have been
        measured. On a GPU, only finished steps are used, so that this method never waits for the GPU.
        """
        finished = [step for step in self.history if self.clock.has_reached_stamp(step.marks["end"])]
        if len(finished) < MIN_STEPS:
            return None
        newest = [self._measure_step(step) for step in finished[-NEWEST_STEPS:]]
        return median(step["data"] + step["forward"] for step in newest)

    def summarize_steps(self) -> RankTimes | None:
        """Return typical times over all stored steps; None if no steps are stored."""
        if not self.history:
            return None
        steps = [self._measure_step(step) for step in self.history]
        data = fmean(step["data"] for step in steps)  # not a median, because the loader prepares several steps at once
        forward = median(step["forward"] for step in steps)
        duration = fmean(step["step"] for step in steps)
        exposed = [step["exposed"] for step in steps if "exposed" in step]
        return RankTimes(data, data + forward, duration, len(steps), exposed=exposed)


def gather_step_times(world: World, times: StepTimer | None, samples: float | None = None) -> list[RankTimes]:
    """Gather the step times of all ranks on rank 0.

    All ranks must call this function. On ranks other than 0, the function returns an empty list. Ranks that have
    recorded no step times are omitted. `samples` is the mean number of this rank's samples per batch if the shards are
    unequal, otherwise None.
    """
    summary = times.summarize_steps() if times else None
    gathered = world.gather(asdict(summary) | {"samples": samples} if summary else None)
    return [RankTimes(**fields | {"rank": rank}) for rank, fields in enumerate(gathered) if fields]


def pop_total_waiting_seconds(model: nn.Module) -> float:
    """Return and reset the total seconds that layers have waited for other ranks.

    Layers that wait for other ranks in the forward pass, such as synchronized BatchNorm, have a
    method `pop_waiting_seconds`.
    """
    seconds = 0.0
    for module in model.modules():
        pop_waiting_seconds = getattr(module, "pop_waiting_seconds", None)
        if pop_waiting_seconds is not None:
            seconds += pop_waiting_seconds()
    return seconds
