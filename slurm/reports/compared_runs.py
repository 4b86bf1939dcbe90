"""Read the runs that `make compare` compares, group them by seed, and label them. This module does not import torch."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from typing import Any

from common.runs import provenance
from common.runs import result as results
from common.runs.compare import metric_curves, sampled_rows, setting_labels
from common.runs.compare.compare_table import shorten_text
from common.runs.folder import RunFolder, read_json
from slurm.reports import selection, status
from slurm.reports.selection import LEARNING_RATE
from slurm.reports.status import Status

MAX_LABEL_SETTINGS = 3  # maximum number of settings in the label of a run
SEED = "seed"  # name of the setting that may differ between the runs of a group


@dataclasses.dataclass
class RunFacts:
    """Data of one run for the terminal table and the HTML page."""

    folder: RunFolder
    status: Status
    settings: dict[str, str]
    result: results.Result
    world: dict[str, Any]
    curves: metric_curves.RunCurves

    @classmethod
    def from_folder(cls, folder: RunFolder) -> RunFacts:
        """Read the data of a run from the run folder."""
        attempts = folder.trace_attempts()  # the newest attempt comes first
        world = read_json(attempts[0][0].attempt_folder / "world.json") if attempts else {}
        last_steps = {step for _, step in attempts if step is not None}  # steps from which later attempts resumed
        return cls(
            folder,
            status.read_status(folder),
            selection.read_newest_settings(folder),
            results.parse_result(folder.result),
            world,
            metric_curves.read_curves(sampled_rows.read_rows_for_curves(folder), last_steps),
        )

    @property
    def short_id(self) -> str:
        """Last part of the run id, which commands accept instead of the full id."""
        return self.folder.path.name.rpartition("-")[2]

    @property
    def is_incomplete(self) -> bool:
        """Whether the run has not finished or has no readable result."""
        return self.status.state != "FINISHED" or bool(self.result.reason)

    def find_number(self, name: str) -> float | None:
        """Return a number from the run's result or, if missing, the newest finite value of the evaluations.

        Returns None if neither contains the number as a finite value.
        """
        number = self.result.find_number(name)
        return find_last_number(self.curves.tests.get(name)) if number is None else number

    @property
    def metrics(self) -> dict[str, metric_curves.Curve]:
        """Curves of the values that describe the result: of evaluations or, if the run has no loss, of all values."""
        return self.curves.tests if "loss" in self.curves.steps else self.curves.steps | self.curves.tests

    @functools.cached_property
    def table_row(self) -> dict[str, Any]:
        """The run's values for the table and the JSON output. Missing values are None."""
        columns = {
            "run": self.status.run,
            "experiment": self.folder.experiment,
            "state": self.status.state.lower(),
            "detail": self.status.detail,
            "restarts": self.status.restarts,
            "processes": self.world.get("processes"),
            "step": self.status.step,
            "loss": self.status.loss,
            "test_loss": self.find_number("test_loss"),
            "test_accuracy": self.find_number("test_accuracy"),
            "samples_per_second": self.status.samples_per_second or None,
            "start": read_start_time(self.folder),
            "duration": find_duration(self.curves),
            "learning_rate": selection.parse_float(self.settings.get(LEARNING_RATE, "")),
            "efficiency": self.find_number("efficiency"),
            "waiting": self.result.compute_waiting_share(),
            "memory_mb": self.result.find_peak_mb(),
            "split_at": self.result.format_partition(),
            "shards": self.result.format_shards(),
        }
        columns |= {"name": self.status.name, "notes": self.status.notes}
        for name in ("ranks_lost", "seconds_lost", "steps_redone"):
            columns[name] = self.find_number(name)
        return columns

    def hide_curves(self) -> None:
        """Remove the curves. The row of the table keeps the values that were read from the curves."""
        table_row = self.table_row
        self.curves = metric_curves.RunCurves()
        self.table_row = table_row


@dataclasses.dataclass
class RunGroup:
    """Runs that share a row of the table and a curve: a single run, or runs that differ only in their seed."""

    runs: list[RunFacts]
    label_settings: list[str] = dataclasses.field(default_factory=list)
    """Keys of up to MAX_LABEL_SETTINGS settings that distinguish the runs from other runs of the same experiment."""
    label: str = ""
    """Short id of the first run, the name of the runs, and the settings in `label_settings`: `3f2a wide lr=0.1`."""

    @property
    def experiment(self) -> str:
        return self.runs[0].folder.experiment

    @property
    def short_id(self) -> str:
        """Short id of the first run, and the number of other runs."""
        return self.runs[0].short_id + self._count_other_runs()

    @property
    def long_id(self) -> str:
        """Id of the first run, and the number of other runs."""
        return self.runs[0].status.run + self._count_other_runs()

    def _count_other_runs(self) -> str:
        return f" +{len(self.runs) - 1}" if len(self.runs) > 1 else ""

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """Settings of the runs. The value of a setting that differs between the runs lists all values."""
        merged: dict[str, str] = {}
        for key in setting_labels.list_keys([run.settings for run in self.runs]):
            texts = dict.fromkeys(run.settings[key] for run in self.runs if key in run.settings)
            merged[key] = ",".join(texts)
        return merged

    @property
    def state(self) -> str:
        """State of the runs, such as `finished`, or `2 finished, 1 failed` if the states differ."""
        states = [run.status.state.lower() for run in self.runs]
        counts = {state: states.count(state) for state in states}
        if len(counts) == 1:
            return states[0]
        return ", ".join(f"{count} {state}" for state, count in counts.items())

    @property
    def end_symbol(self) -> str:
        """Symbol at the end of the curves: `circle` if a run may be active, `cross` if a run failed, or empty."""
        if not all(run.status.has_ended for run in self.runs):
            return "circle"
        is_finished = all(run.status.state == "FINISHED" for run in self.runs)
        return "" if is_finished else "cross"

    @property
    def curves(self) -> metric_curves.RunCurves:
        """Curves of the run, or their mean and range over the runs."""
        if len(self.runs) == 1:
            return self.runs[0].curves
        return metric_curves.average_runs([run.curves for run in self.runs])

    def list_values(self, column: str) -> list[Any]:
        """Return the values of the runs in a column of the table, without missing values."""
        values = [run.table_row[column] for run in self.runs]
        return [value for value in values if value is not None]

    def list_metric_values(self, name: str) -> list[float]:
        """Return the newest finite value of a metric for each run that has one."""
        values = [find_last_number(run.metrics.get(name)) for run in self.runs]
        return [value for value in values if value is not None]

    def list_metrics(self) -> list[str]:
        """Return the names of the metrics that describe the results of the runs."""
        names: dict[str, None] = {}
        for run in self.runs:
            names |= dict.fromkeys(run.metrics)
        return list(names)

    def format_setting(self, key: str) -> str:
        """Return the value of a setting, shortened to fit a table cell."""
        return shorten_text(self.settings.get(key, setting_labels.MISSING))


def find_last_number(curve: metric_curves.Curve | None) -> float | None:
    """Return the newest finite value of a curve, or None if the curve is missing or has no finite value."""
    return None if curve is None else curve.newest_value


def find_duration(curves: metric_curves.RunCurves) -> float | None:
    """Return the seconds from the start of the first step to the last row of the metrics, or None without rows.

    The time between two attempts does not count.
    """
    seconds = [float(curve.positions[-1, 2]) for curve in (*curves.steps.values(), *curves.tests.values())]
    return max(seconds, default=None)


def read_start_time(folder: RunFolder) -> str | None:
    """Return when the first attempt started, such as `2026-01-31 12:00`, in local time.

    If meta.json does not contain the time, the creation time in the name of the folder is used. Returns None if the
    name does not contain a time.
    """
    history = provenance.read_metadata(folder).get("history") or [{}]
    try:
        start = datetime.datetime.fromisoformat(str(history[0].get("start")))
    except ValueError:
        try:
            start = datetime.datetime.strptime("".join(folder.path.name.split("-")[-3:-1]), "%Y%m%d%H%M%S")
        except ValueError:
            return None
    return start.astimezone().strftime("%Y-%m-%d %H:%M")


def read_groups(folders: list[RunFolder], by_seed: bool) -> list[RunGroup]:
    """Read and label runs. With `by_seed`, runs of an experiment that differ only in their seed form a group."""
    groups: dict[str, RunGroup] = {}
    for folder in folders:
        run = RunFacts.from_folder(folder)
        key = make_seed_group_key(run) if by_seed else str(folder.path)
        groups.setdefault(key, RunGroup([])).runs.append(run)
    label_groups(list(groups.values()))
    return list(groups.values())


def make_seed_group_key(run: RunFacts) -> str:
    """Return a text that is equal for runs that differ only in their seed."""
    settings = {key: text for key, text in run.settings.items() if not setting_labels.is_irrelevant(key)}
    settings.pop(SEED, None)
    return json.dumps([run.folder.experiment, settings], sort_keys=True)


def list_all_settings(groups: list[RunGroup]) -> list[dict[str, str]]:
    """Return the settings of each group of runs. The seed of a group of several runs is omitted."""
    settings = []
    for group in groups:
        seeds = {SEED} if len(group.runs) > 1 else set()
        settings.append({key: text for key, text in group.settings.items() if key not in seeds})
    return settings


def group_by_experiment(groups: list[RunGroup]) -> dict[str, list[RunGroup]]:
    """Return the groups of runs of each experiment, by the name of the experiment."""
    experiments: dict[str, list[RunGroup]] = {}
    for group in groups:
        experiments.setdefault(group.experiment, []).append(group)
    return experiments


def label_groups(groups: list[RunGroup]) -> None:
    """Set the label of each group of runs.

    A label consists of the short id of the first run, of the name that all runs have in common, of the settings that
    distinguish the group from other groups of the same experiment, and of the number of runs if there are several.
    """
    for members in group_by_experiment(groups).values():
        settings = list_all_settings(members)
        keys = setting_labels.choose_distinctive_settings(settings, MAX_LABEL_SETTINGS)
        short_keys = setting_labels.shorten_keys(keys, settings)
        for group in members:
            group.label_settings = keys
            names = {run.status.name for run in group.runs}
            name = names.pop() if len(names) == 1 else ""
            group.label = f"{group.runs[0].short_id} {name}".rstrip()
            for key, short_key in zip(keys, short_keys, strict=True):
                group.label += f" {short_key}={group.format_setting(key)}"
            if len(group.runs) > 1:
                group.label += f" ({len(group.runs)} seeds)"


def list_differences_within_experiments(groups: list[RunGroup]) -> list[str]:
    """Return the keys of the settings that differ between runs of the same experiment.

    The keys of settings in labels come first.
    """
    experiments = list(group_by_experiment(groups).values())

    # First take the first label setting of every experiment, then the second label setting of every experiment, etc.
    in_labels: list[str] = []
    for position in range(MAX_LABEL_SETTINGS):
        for members in experiments:
            in_labels += members[0].label_settings[position : position + 1]

    differing: list[str] = []
    for members in experiments:
        differing += setting_labels.list_differing_settings(list_all_settings(members))
    differing.sort(key=setting_labels.compute_label_priority)

    return list(dict.fromkeys(in_labels + differing))  # removes duplicates and keeps the order


def list_shown_settings(groups: list[RunGroup]) -> list[str]:
    """Return the keys of the settings that get a column: those that differ, and the learning rate."""
    keys = list_differences_within_experiments(groups)
    has_learning_rate = any(LEARNING_RATE in group.settings for group in groups)
    return keys if LEARNING_RATE in keys or not has_learning_rate else [*keys, LEARNING_RATE]


def count_label_settings(groups: list[RunGroup]) -> int:
    """Return how many settings occur in the labels. These settings are the first of `list_shown_settings`."""
    return len(set[str]().union(*(group.label_settings for group in groups)))
