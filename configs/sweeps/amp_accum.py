"""The sweep of amp_accum: what each precision costs, with one microbatch and with several."""

from __future__ import annotations

import math

from configs.amp_accum import Config
from configs.sweeps import Bars, Cell, Grid, Row, Summary, average_rows

BRIEF = 40  # steps of a run
BY = ("precision", "accumulate", "no_sync")
EXACT = ("fp32", 1, True)


def list_points(cfg: Config, gpus: int) -> list[Cell]:
    """Return every precision with one microbatch and with several, and these with and without no_sync.

    Unless `steps` says otherwise the runs are short: what is measured is what a step costs.
    """
    warmup, limit = min(cfg.optim.warmup, BRIEF // 8), cfg.data.test_limit or 1000
    brief = {} if cfg.steps else {"steps": BRIEF, "optim.warmup": warmup, "data.test_limit": limit}
    on_gpus = not cfg.launch.on_cpu and gpus >= cfg.processes  # with fewer the runs are on the CPU
    grid: list[Cell] = []
    for precision in ("fp32", "tf32", "bf16", "fp16") if on_gpus else ("fp32", "bf16", "fp16"):
        grid.append({"precision": precision, "accumulate": 1, "no_sync": True})
        if cfg.accumulate > 1:
            several = {"precision": precision, "accumulate": cfg.accumulate}
            grid += [several | {"no_sync": word} for word in ((True, False) if cfg.processes > 1 else (True,))]
    return [cell | brief for cell in grid]


def summarize_runs(cfg: Config, gpus: int, rows: list[Row]) -> Summary:
    """Report the cost of each point, and how far its result is from fp32's with one microbatch."""
    names = ("samples_per_second", "training_bytes", "bytes_sent", "steps_skipped", "final_loss", "test_accuracy")
    found = {name: average_rows(rows, BY, name) for name in names}
    exact = {name: found[name].get(EXACT, (math.nan,))[0] for name in names}
    lines = [
        "precision  microbatches  no_sync  samples/s  peak MB  sent MB  skipped  loss, less fp32  accuracy, less fp32"
    ]
    for cell, (rate, deviation, count) in found["samples_per_second"].items():
        spread = f"±{deviation:>3.0f}" if count > 1 else ""
        memory, sent, skipped, loss, score = (found[name][cell][0] for name in names[1:])
        lines.append(
            f"{cell[0]:<9}  {cell[1]:>12}  {str(cell[2]).lower():<7}  {rate:>5,.0f} {spread:<4}"
            f"  {memory / 1e6:>7.1f}  {sent / 1e6:>7.2f}  {skipped:>7.1f}"
            f"  {loss:.4f} {loss - exact['final_loss']:+.4f}  {score:>10.2%} {score - exact['test_accuracy']:+.2%}"
        )
    label = {cell: f"{cell[0]}\n{cell[1]}{'' if cell[2] else ' each'}" for cell in found["samples_per_second"]}
    title = f"{cfg.model}, batch {cfg.batch}, by number of microbatches; each: all-reduced after each"
    drawn = []
    for name, unit, scale in (
        ("samples_per_second", "samples/s", 1.0),
        ("training_bytes", "MB beyond the model", 1e-6),
    ):
        heights = {label[cell]: (mean * scale, off * scale) for cell, (mean, off, _) in found[name].items()}
        drawn.append(Bars(f"{name}.png", heights, unit, title))
    return Summary({"cells": "\n".join(lines)}, drawn)


GRID = Grid(list_points, summarize_runs)
