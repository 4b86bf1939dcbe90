"""The end of a run on rank 0: result.json, the trained model, and the table on the screen."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from typing import Any

from common.checkpoint.checkpointer import read_full_model
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint
from common.core import config
from common.core.errors import UserError, summarize_error
from common.core.text import format_count
from common.data.loader import get_statistics
from common.distributed.elastic.generations import describe_generation, read_earlier_generations
from common.measure import tables
from common.models import model_file
from common.runs.result import Facts, Report, Result
from common.training.run_context import RunContext


def write_final_report(run: RunContext, reports: Sequence[Report]) -> None:
    """Write result and model of a finished run, and print the table.

    Raises RunTaken where another attempt has the run, or the folder is gone.
    """
    reports = [*reports, *report_generations([*read_earlier_generations(run.folder), *run.generations])]
    run.saver.raise_if_lost(run.step)
    assert run.metrics is not None
    run.metrics.writer.flush()
    result = Result(
        state="finished",
        exit_status=0,
        data=run.prepared.name if run.cfg.trains else "",
        scores=run.scores,
        timings=measure_timings(run),
        memory=run.memory,
    )
    if run.cfg.trains:
        save_trained_model(run)
    run.saver.raise_if_lost(run.step)
    result.with_reports(report.result() for report in reports).write(run.folder)
    shown = format_run_rows(run)
    for report in reports:
        shown |= report.rows()
    run.log_message(tables.format_table(shown | format_folder_rows(run)))


def measure_timings(run: RunContext) -> dict[str, float]:
    """Return samples/s and seconds a step of this attempt; empty where it had too few steps left to measure.

    The steps of a run that trains nothing have no samples.
    """
    if not run.step_seconds():
        return {}
    if not run.cfg.trains:
        return {"step_seconds": run.step_seconds()}
    return {"samples_per_second": run.samples_per_second(), "step_seconds": run.step_seconds()}


def report_generations(changes: Sequence[dict[str, Any]]) -> list[Report]:
    """Report which ranks an elastic run has lost and got back, and what that cost; nothing where none was lost."""
    if not changes:
        return []
    lost = sum(change["seconds"] + change["discarded"] for change in changes)
    redone = sum(change["discarded"] > 0 for change in changes)
    shown = [*map(describe_generation, changes), f"{lost:.3f} s in all, {format_count(redone, 'step')} done again"]
    measured = {"generations": list(changes), "seconds_lost": lost, "steps_redone": redone}
    measured["ranks_lost"] = sum(len(change["lost"]) for change in changes)
    return [Facts({"ranks lost": "\n".join(shown)}, measured=measured)]


def format_run_rows(run: RunContext) -> dict[str, str]:
    """Return the first rows of the table: measurements of every run."""
    seconds, rate, world, scores = run.step_seconds(), run.samples_per_second(), run.world, run.scores
    speed = f"{rate:,.0f} samples/s  ({seconds * 1e3:.2f} ms a step, first steps and evaluation left out)"
    trained = format_count(run.step - run.resumed_after, "step")
    rows = {}
    if scores:
        rows = {
            "data": f"{run.prepared.name}, {scores['test_samples']} test samples",
            "test accuracy": f"{scores['test_accuracy']:.2%}",
            "test loss": f"{scores['test_loss']:.4f}",
            "throughput": speed if seconds else f"not measured: this attempt trained {trained}",
        }
    of = f"{world.size} with {format_count(world.threads, 'thread')} each on {world.device.type} of "
    return rows | {"ranks": of + ", ".join(sorted(set(world.hosts)))}


def format_folder_rows(run: RunContext) -> dict[str, str]:
    """Return the last rows of the table: the run's folder, its files of numbers, and the command that repeats it."""
    path = run.folder.path
    try:
        changed = config.read_changes_of_attempts(path)
        repeat = f"not by one command: it was resumed with {config.describe_changes(changed)}" if changed else ""
    except UserError as error:
        repeat = f"not by one command: {error}"
    return {
        "run folder": str(path),
        "metrics": str(run.folder.metrics_file),
        "result": str(path / "result.json"),
        "repeat": repeat or f"make rerun RUN={shlex.quote(run.folder.reference)}",
    }


def save_trained_model(run: RunContext) -> None:
    """Write the model of the last step beside the result, with the facts that build and evaluate it.

    Raises UserError where the disk does not take it.
    """
    state, cfg = run.state, run.cfg
    if state is None or run.saver.checkpointer.saved != run.step:
        run.log_message("WARNING: no model is kept: its last step was not saved", logging.WARNING)
        return
    mean, std = get_statistics(run.prepared)
    facts: dict[str, Any] = {
        "run": run.folder.path.name,
        "experiment": run.folder.experiment,
        "step": run.step,
        "device": run.device.type,
        "epoch_steps": state.loader.steps,
        "data": run.prepared.name,
        "classes": run.prepared.classes or run.classes,
        "shape": list(run.sample_shape),
        "mean": mean,
        "std": std,
        "dtype": cfg.dtype,
        "precision": getattr(cfg, "precision", "fp32"),
        "channels_last": getattr(cfg, "channels_last", False),
        "eval_batch": cfg.eval_batch,
        "shares": state.peers.size if state.peers else 1,
        "scores": run.scores,
    }
    try:
        model_file.write_model(run.folder, read_full_model(CheckpointPath(run.folder, run.step)), state.recipe, facts)
    except (OSError, InvalidCheckpoint) as error:
        raise UserError(
            f"the model after step {run.step} cannot be kept: {summarize_error(error)}; free space"
        ) from None
