"""Final report of a run, written by rank 0: result.json, trained model, and printed table."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from typing import Any

from common.checkpoint.rank_file import read_full_model
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint
from common.config import changed_settings
from common.data.preprocessing import describe_preprocessing, list_class_names
from common.measure import tables
from common.models import model_file
from common.runs.result import Report, Result
from common.runs.run_progress import GENERATIONS_FILE
from common.system import foreign_text
from common.system.disk_problems import DISK_PROBLEMS
from common.system.errors import UserError, summarize_error
from common.system.text import format_count
from common.training.run_context import RunContext


def write_final_report(run: RunContext, reports: Sequence[Report]) -> None:
    """Write the result and the model of a finished run, and print the final table.

    Raises RunTakenError if another attempt has taken over the run or the run folder is missing.
    """
    if run.progress.generations or any(run.folder.path.glob(f"attempts/*/{GENERATIONS_FILE}")):
        from common.runs import rank_changes  # imported here because only elastic runs need it

        changes = [*rank_changes.read_earlier_rank_changes(run.folder), *run.progress.generations]
        reports = [*reports, *rank_changes.report_rank_changes(changes)]
    run.saver.raise_if_run_taken(run.step)
    assert run.metrics is not None
    try:
        run.metrics.writer.write_buffered_rows()
    except OSError as error:
        raise UserError(f"cannot write {run.folder.metrics_file}: {error.strerror}; check the disk") from error
    result = Result(
        state="finished",
        exit_status=0,
        data=run.prepared.name if run.trains else "",
        scores=run.scores,
        timings=measure_timings(run),
        memory=run.memory,
    )
    if run.trains:
        save_trained_model(run)
    run.saver.raise_if_run_taken(run.step)
    result.with_reports(report.result() for report in reports).write(run.folder)

    rows = format_score_rows(run)
    for report in reports:
        rows |= report.rows()
    run.log_message(tables.format_table(rows | format_folder_rows(run)))


def measure_timings(run: RunContext) -> dict[str, float]:
    """Return the throughput in samples/s and the seconds per step of this attempt.

    The returned dict is empty if this attempt had too few steps to measure. For a run that does not train a model, the
    dict does not contain the throughput.
    """
    timings: dict[str, float] = {}
    if not run.compute_step_seconds():
        return timings
    if run.trains:
        timings["samples_per_second"] = run.compute_samples_per_second()
    timings["step_seconds"] = run.compute_step_seconds()
    return timings


def format_score_rows(run: RunContext) -> dict[str, str]:
    """Return the first rows of the final table: scores, throughput, and ranks."""
    world = run.world
    scores = run.scores
    rows = {}
    if scores:
        throughput = f"not measured: this attempt trained {format_count(run.step - run.resumed_after, 'step')}"
        seconds = run.compute_step_seconds()
        if seconds:
            step_time = f"{seconds * 1e3:.2f} ms per step, excluding the first steps and evaluation"
            throughput = f"{run.compute_samples_per_second():,.0f} samples/s  ({step_time})"
        rows["data"] = f"{run.prepared.name}, {scores['test_samples']} test samples"
        if "test_accuracy" in scores:
            rows["test accuracy"] = f"{scores['test_accuracy']:.2%}"
        rows |= {"test loss": f"{scores['test_loss']:.4f}", "throughput": throughput}
    hosts = ", ".join(sorted(set(world.hosts)))
    threads = format_count(world.threads, "thread")
    rows["ranks"] = f"{world.size} on {hosts} (device {world.device.type}, {threads} per rank)"
    return rows


def format_folder_rows(run: RunContext) -> dict[str, str]:
    """Return the last table rows: result paths, and the command that repeats the run."""
    path = run.folder.path
    command = f"make rerun RUN={shlex.quote(run.folder.reference)}"
    try:
        changed = changed_settings.read_changes_of_attempts(path)
        if changed:
            changes = changed_settings.describe_changes(changed)
            command = f"not available: the run was resumed with different settings ({changes})"
    except UserError as error:
        command = f"not available: {error}"
    return {
        "run folder": str(path),
        "metrics": str(run.folder.metrics_file),
        "result": str(path / "result.json"),
        "repeat": command,
    }


def save_trained_model(run: RunContext) -> None:
    """Write the trained model and the metadata needed to rebuild and evaluate the model.

    Raises UserError if the model cannot be written.
    """
    state = run.state
    cfg = run.training_cfg
    if state is None or run.progress.saved_step != run.step:
        problem = "the trained model was not written, because the state after the last step was not saved"
        run.log_message(f"WARNING: {problem}", logging.WARNING)
        return
    shape = list(run.sample_shape)
    facts: dict[str, Any] = {
        "run": run.folder.path.name,
        "experiment": run.folder.experiment,
        "step": run.step,
        "device": run.device.type,
        "epoch_steps": state.loader.steps,
        "data": run.prepared.name,
        "class_names": list_class_names(run.prepared, run.outputs) if run.train_set.has_labels else None,
        "shape": shape,
        "preprocessing": describe_preprocessing(run.prepared, shape),
        "dtype": cfg.dtype,
        "precision": getattr(cfg, "precision", "fp32"),
        "channels_last": getattr(cfg, "channels_last", False),
        "eval_batch": cfg.eval_batch,
        "shares": state.peers.current.size if state.peers else 1,
        "scores": run.scores,
    }
    try:
        model = read_full_model(CheckpointPath(run.folder, run.step))
        model_file.write_model(run.folder, model, state.recipe, facts)
    except InvalidCheckpoint as error:
        raise UserError(f"cannot write the model of step {run.step}: {error}; resume the run") from None
    except OSError as error:
        cause = foreign_text.classify_error(error)
        problem = DISK_PROBLEMS.get(cause, f"{summarize_error(error)}; check the disk, then resume the run")
        raise UserError(f"cannot write the model of step {run.step}: {problem}", cause=cause) from None
