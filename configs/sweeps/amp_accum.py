"""Sweep of amp_accum: the cost of each precision with one microbatch and with several microbatches."""

from __future__ import annotations

import math

from configs.amp_accum import Config
from configs.sweeps import Bars, PointSettings, RunRow, Summary, SweepGrid, average_rows

DEFAULT_STEPS = 40  # number of steps per run
BY = ("precision", "accumulate", "no_sync")
REFERENCE = ("fp32", 1, True)


def list_points(cfg: Config, gpus: int) -> list[PointSettings]:
    """Return every precision with one microbatch and with several microbatches.

    With several ranks, points with several microbatches are repeated with no_sync=false. If `steps` is not set, runs
    are short, because the sweep measures only the cost of a step. Points that dtype=float64 or shards=auto refuses are
    omitted.
    """
    limits: PointSettings = {}
    if not cfg.steps:
        warmup = min(cfg.optim.warmup, DEFAULT_STEPS // 8)
        limits = {"steps": DEFAULT_STEPS, "optim.warmup": warmup, "data.test_limit": cfg.data.test_limit or 1000}
    on_gpus = not cfg.launch.excludes_gpus and gpus >= cfg.processes  # with fewer GPUs than ranks, runs use the CPU
    precisions = ["fp32", "tf32"] if on_gpus else ["fp32"]
    if cfg.dtype != "float64":
        precisions += ["bf16", "fp16"]
    no_sync_choices = (True, False) if cfg.processes > 1 and cfg.sharding.shards != ["auto"] else (True,)

    points: list[PointSettings] = []
    for precision in precisions:
        points.append({"precision": precision, "accumulate": 1, "no_sync": True, **limits})
        if cfg.accumulate > 1:
            for no_sync in no_sync_choices:
                points.append({"precision": precision, "accumulate": cfg.accumulate, "no_sync": no_sync, **limits})
    return points


def summarize_runs(cfg: Config, gpus: int, rows: list[RunRow]) -> Summary:
    """Report each point's cost, and compare loss and accuracy with fp32 and one microbatch."""
    rates = average_rows(rows, BY, "samples_per_second")
    memory = average_rows(rows, BY, "training_bytes")
    sent = average_rows(rows, BY, "bytes_sent")
    skipped = average_rows(rows, BY, "steps_skipped")
    losses = average_rows(rows, BY, "final_loss")
    accuracies = average_rows(rows, BY, "test_accuracy")
    reference_loss = losses[REFERENCE].mean if REFERENCE in losses else math.nan
    reference_accuracy = accuracies[REFERENCE].mean if REFERENCE in accuracies else math.nan

    lines = [
        "precision  microbatches  no_sync  samples/s  peak MB  sent MB  skipped  loss (vs. fp32)  accuracy (vs. fp32)"
    ]
    labels = {}
    for point, rate in rates.items():
        precision, microbatches, no_sync = point
        # label of the bars; "each" means an all-reduce after each microbatch
        labels[point] = f"{precision}\n{microbatches}{'' if no_sync else ' each'}"

        # one line of the table
        spread = f"±{rate.deviation:>3.0f}" if rate.runs > 1 else ""
        setting = f"{precision:<9}  {microbatches:>12}  {str(no_sync).lower():<7}"
        cost = f"{rate.mean:>5,.0f} {spread:<4}  {memory[point].mean / 1e6:>7.1f}  {sent[point].mean / 1e6:>7.2f}"
        loss = losses[point].mean
        accuracy = accuracies[point].mean
        scores = f"{loss:.4f} {loss - reference_loss:+.4f}  {accuracy:>10.2%} {accuracy - reference_accuracy:+.2%}"
        lines.append(f"{setting}  {cost}  {skipped[point].mean:>7.1f}  {scores}")

    title = f"{cfg.model}, batch {cfg.batch}, by number of microbatches; each: all-reduce after every microbatch"
    rate_bars = {labels[point]: (rate.mean, rate.deviation) for point, rate in rates.items()}
    memory_bars = {labels[point]: (peak.mean / 1e6, peak.deviation / 1e6) for point, peak in memory.items()}
    plots = [
        Bars("samples_per_second.png", rate_bars, "samples/s", title),
        Bars("training_bytes.png", memory_bars, "memory beyond the model, MB", title),
    ]
    return Summary({"cells": "\n".join(lines)}, plots)


GRID = SweepGrid(list_points, summarize_runs)
