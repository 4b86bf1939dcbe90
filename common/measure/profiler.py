"""Profiling of a few training steps.

The results are a Chrome trace, and a table of the ten operations that take the most CPU time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from common.system.text import format_count


def start_profiler(steps: int, trace: Path, log_message: Callable[[str], None]) -> torch.profiler.profile | None:
    """Start a profiler that skips four steps and records the next `steps` steps.

    Returns None if `steps` is 0. Call the method `step` of the profiler after each training step. After the last
    recorded step, the profiler writes a Chrome trace to the file `trace` and passes a table to `log_message`.
    """
    if not steps:
        return None

    def write_profile(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(trace))
        table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=10)
        log_message(f"profile of {format_count(steps, 'step')} written to {trace}\n{table}")

    schedule = torch.profiler.schedule(wait=2, warmup=2, active=steps, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write_profile, acc_events=True)
    profiler.start()
    return profiler
