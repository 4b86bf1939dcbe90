"""Select the runs on which a command acts, by id, experiment, settings or sweep. By default, select the newest runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import operator
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.config import config, config_keys
from common.runs.description import is_archived
from common.runs.folder import RunFolder, read_json
from common.runs.metrics_rows import parse_json
from common.runs.result import parse_result
from common.runs.result_columns import list_columns
from common.system.errors import UserError
from common.system.text import format_count
from configs.shared import TrainingExperiment
from slurm.arguments import EXPERIMENT_NAME, parse_count, parse_zero_or_one, split_words, suggest_nearest

CONDITION = re.compile(r"([a-z][a-z0-9_.]*)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)  # key, comparison and value in WHERE
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
LEARNING_RATE = "optim.lr"
DEFAULT_RUN_COUNT = 10  # number of newest runs that are selected if no criterion selects specific runs


@dataclasses.dataclass(frozen=True)
class RunFilter:
    """Criteria for selecting runs, as text from the command line. An empty criterion is ignored."""

    runs: str = ""
    """Ids or paths of runs (RUNS), separated by spaces."""
    name: str = ""
    """Name of an experiment (NAME)."""
    last: str = ""
    """Number of newest runs to select (LAST)."""
    conditions: str = ""
    """Conditions on settings and results (WHERE), such as `strategy=ddp lr>0.1 test_accuracy>=0.98`."""
    sweep: str = ""
    """Name or folder of a sweep (SWEEP)."""
    omits_archived: bool = False
    """Whether archived runs are left out unless RUNS names them."""

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> RunFilter:
        """Return the criteria in the arguments of a command. A command with the setting ALL omits archived runs."""
        omits_archived = "all" in args and not parse_zero_or_one("ALL", args.all)
        return cls(args.runs, args.name, args.last, args.where, getattr(args, "sweep", ""), omits_archived)


def find_run(name: str, runs: Path) -> RunFolder:
    """Find a run folder by id, by the end of the id, or by path.

    The end of an id consists of the last four characters. Raises UserError if no run or more than one run matches.
    """
    if not name:
        files = sorted(runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
        newest = ", ".join(file.parent.name for file in files[:3]) or "none"
        raise UserError(f"RUN is missing; set RUN=<id> (newest runs in {runs}: {newest})")
    paths = [Path(name), runs / name]
    if re.fullmatch("[0-9a-f]{4}", name):
        matches = [file.parent for file in runs.glob(f"*-{name}/config.yaml")]
        if len(matches) > 1:
            names = " and ".join(sorted(path.name for path in matches))
            raise UserError(f"run {name} is ambiguous: the ids {names} end with {name}; write the full id")
        paths += matches
    for path in paths:
        if os.path.isfile(path / "config.yaml"):
            return RunFolder(path.absolute())
    remedies = "to list the runs: make status; for a run in another folder, pass its path"
    raise UserError(f"{name!r}: no such run folder in {runs}; {remedies}")


def find_run_of_experiment(name: str, runs: Path) -> RunFolder:
    """Find a run folder as `find_run` does, and check that its name contains the experiment. Raises UserError."""
    folder = find_run(name, runs)
    if not re.fullmatch(rf"{EXPERIMENT_NAME.pattern}-\d{{8}}-\d{{6}}-[0-9a-f]{{4}}", folder.path.name):
        form = "<experiment>-<date>-<time>-<id>"
        raise UserError(f"{folder.path} was renamed, so its experiment is unknown; restore its name, {form}")
    return folder


def list_entries(folder: Path) -> list[str]:
    """Return the names of the entries of a folder, or an empty list if it cannot be read."""
    try:
        return os.listdir(folder)  # noqa: PTH208 (Path.glob takes four times as long for thousands of runs)
    except OSError:
        return []


def list_all_runs(root: Path) -> list[RunFolder]:
    """Return all run folders in `root`, oldest first."""
    folder = root.absolute()
    names = [name for name in list_entries(folder) if os.path.exists(f"{folder}/{name}/config.yaml")]
    names.sort(key=get_creation_key)
    return [RunFolder(folder / name) for name in names]


def get_creation_key(name: str) -> list[str]:
    """Return the parts of a run folder's name that order runs by their creation time: date, time and id."""
    return name.rsplit("-", 3)[1:]


def select_newest_runs(folders: list[RunFolder], count: int) -> list[RunFolder]:
    """Return the `count` newest runs in the given order."""
    by_creation = sorted(folders, key=lambda folder: get_creation_key(folder.path.name))
    newest_paths = {folder.path for folder in by_creation[-count:]}
    return [folder for folder in folders if folder.path in newest_paths]


def select_runs(criteria: RunFilter, root: Path, newest: int = DEFAULT_RUN_COUNT) -> list[RunFolder]:
    """Return the runs that meet all criteria. Raises UserError if no run matches.

    If RUNS or SWEEP is set, the runs have the order of RUNS and SWEEP. Otherwise, the oldest run comes first. If RUNS,
    SWEEP, WHERE and LAST are all empty, only the newest `newest` runs are returned, or all runs if `newest` is 0.
    """
    folders = list_named_runs(criteria, root) if criteria.runs or criteria.sweep else list_all_runs(root)
    if not folders:
        raise UserError(f"no runs in {root} yet; start one: make exp NAME={config.list_experiments()[0]}")
    if criteria.omits_archived and not criteria.runs:
        folders = [folder for folder in folders if not is_archived(folder)]
        if not folders:
            raise UserError("all of these runs are archived; to select archived runs, add ALL=1")
    if criteria.name:
        experiments = sorted({folder.experiment for folder in folders})
        if criteria.name not in experiments:
            raise UserError(f"NAME={criteria.name!r}: no matching run; found runs of {', '.join(experiments)}")
        folders = [folder for folder in folders if folder.experiment == criteria.name]
    folders = filter_runs(folders, criteria.conditions)

    if criteria.last:
        return select_newest_runs(folders, parse_count("LAST", criteria.last))
    is_limited = criteria.runs or criteria.sweep or criteria.conditions
    return folders if is_limited else folders[-newest:]  # folders[-0:] contains all runs


def list_named_runs(criteria: RunFilter, root: Path) -> list[RunFolder]:
    """Return the runs that RUNS and SWEEP name, without duplicates.

    Raises UserError if a run or the sweep does not exist.
    """
    folders = [find_run(name, root) for name in split_words("RUNS", criteria.runs)]
    if criteria.sweep:
        folders += list_sweep_runs(criteria.sweep, root)
    return list({folder.path: folder for folder in folders}.values())


def read_sweep(file: Path) -> dict[str, Any]:
    """Return the content of a sweep.json file, or an empty dict if missing.

    Raises UserError if the file is damaged, because no other file records which run belongs to which sweep point.
    """
    try:
        sweep = parse_json(file.read_text(errors="replace"))
    except FileNotFoundError:
        return {}
    points = sweep.get("cells") if isinstance(sweep, dict) else None
    if not isinstance(points, list) or not all(map(is_sweep_point, points)):
        raise UserError(
            f"{file} is damaged; restore it, or delete it to start the sweep from scratch (existing runs are kept)"
        )
    return sweep


def is_sweep_point(point: Any) -> bool:
    """Return whether `point` is a valid point of a sweep.json file.

    A valid point is a dict that contains settings and may contain a repeat index and run names.
    """
    if not isinstance(point, dict) or not isinstance(point.get("values"), dict):
        return False
    earlier_runs = point.get("earlier", [])
    if not isinstance(earlier_runs, list) or not isinstance(point.get("repeat", 0), int):
        return False
    # A run name must be a file name, not a path. A point that has not started has no run name.
    names = [point.get("run") or "none yet", *earlier_runs]
    return all(isinstance(name, str) and Path(name).name == name for name in names)


def list_sweep_runs(sweep: str, root: Path) -> list[RunFolder]:
    """Return the started runs of a sweep, in the order of the sweep's points.

    Raises UserError if the sweep does not exist or has no started runs.
    """
    for path in (Path(sweep), root / "sweeps" / sweep):
        file = path / "sweep.json"
        if not os.path.isfile(file):
            continue
        # A sweep folder is runs/sweeps/<name>, and the runs of the sweep are in runs/.
        ids = dict.fromkeys(point.get("run") for point in read_sweep(file).get("cells", []))
        run_paths = [path.absolute().parent.parent / name for name in ids if name]
        folders = [RunFolder(run_path) for run_path in run_paths if (run_path / "config.yaml").is_file()]
        if not folders:
            raise UserError(f"SWEEP={sweep!r}: no run of this sweep has started, or the run folders were deleted")
        return folders
    raise UserError(f"SWEEP={sweep!r}: no such sweep in {root / 'sweeps'}")


def read_newest_settings(folder: RunFolder) -> dict[str, str]:
    """Return the settings of a run's newest attempt as text, by dotted name.

    Returns an empty dict if the settings of the run cannot be read.
    """
    try:
        config_values = config.read_settings(folder.path)
    except UserError:
        return {}
    settings = {key: config_keys.format_value(value) for key, value in config_values.items()}
    # changed.json contains the old and the new value of each setting that differs from the settings of the run.
    for attempt in folder.list_attempts()[-1:]:
        for key, change in read_json(attempt.attempt_folder / "changed.json").items():
            if isinstance(change, list) and change:
                settings[key] = config_keys.format_value(change[-1])
    return settings


def parse_conditions(text: str) -> list[tuple[str, ...]]:
    """Parse the text of WHERE into conditions (key, comparison, value).

    Raises UserError if a word is not a condition.
    """
    conditions = []
    for word in split_words("WHERE", text):
        match = CONDITION.fullmatch(word)
        if not match:
            remedy = "write key=value, key!=value or key>number, without spaces"
            raise UserError(f"WHERE={text!r}: {word!r} is not a condition; {remedy}")
        comparison, value = match.group(2, 3)
        if comparison in ("=", "!=") and value.startswith(("=", "<", ">")):
            raise UserError(f"WHERE={text!r}: {comparison + value[:1]} is not a comparison; use =, !=, <, <=, > or >=")
        conditions.append(match.groups())
    return conditions


def filter_runs(folders: list[RunFolder], text: str) -> list[RunFolder]:
    """Return the runs whose settings and results meet all conditions in the text of WHERE.

    Results are read only if a condition names no setting, or compares a setting without numbers with a number. Raises
    UserError if the text is invalid, if no run has a setting or result of that name, or if no run meets the conditions.
    """
    conditions = parse_conditions(text)
    if not conditions:
        return folders

    values = [read_newest_settings(folder) | {"experiment": folder.experiment} for folder in folders]
    for run_values in values:
        if LEARNING_RATE in run_values:  # not that of the newest step
            run_values["learning_rate"] = run_values[LEARNING_RATE]
    results: list[dict[str, str]] = [{} for _ in folders]
    if find_unknown_names(conditions, values) or find_hidden_metrics(conditions, values):
        results = list(map(read_results, folders))
        for run_values, run_results in zip(values, results, strict=True):
            run_values.update({name: text for name, text in run_results.items() if name not in run_values})
    for name in find_unknown_names(conditions, values):
        keys = set[str]().union(*values)
        hint = suggest_nearest(name, sorted(keys | {key.split(".")[-1] for key in keys}))
        raise UserError(f"WHERE: no run has a setting or result named {name}{hint}")

    matches = []
    for folder, run_values, run_results in zip(folders, values, results, strict=True):
        if all(meets_condition(run_values, run_results, *condition) for condition in conditions):
            matches.append(folder)
    if not matches:
        raise UserError(f"WHERE={text!r}: no matching run ({format_count(len(folders), 'run')} checked)")
    return matches


def find_unknown_names(conditions: list[tuple[str, ...]], values: list[dict[str, str]]) -> list[str]:
    """Return the names in conditions that are not the name or short name of a value of any run."""
    keys = set[str]().union(*values)
    return [name for name, *_ in conditions if not any(matches_short_name(name, key) for key in keys)]


def find_hidden_metrics(conditions: list[tuple[str, ...]], values: list[dict[str, str]]) -> list[str]:
    """Return the names that a condition compares with a number although no run has a setting with a number there.

    An example is `loss<0.5`, because the setting `loss` is the name of a loss function.
    """
    names = [name for name, comparison, _ in conditions if comparison in COMPARISONS]
    return [name for name in names if all(parse_float(find_value(run, name) or "") is None for run in values)]


def find_value(values: Mapping[str, str], name: str) -> str | None:
    """Return the value with this name or short name, or None."""
    first_match = next((text for full_name, text in values.items() if matches_short_name(name, full_name)), None)
    return values.get(name, first_match)


def read_results(folder: RunFolder) -> dict[str, str]:
    """Return the results of a run as text: the values in result.json, and the newest values of other metrics.

    `step` is the last step, and `duration` the time of training in seconds.
    """
    newest: dict[str, Any] = {}
    for row in folder.read_rows():
        newest |= row
    newest |= {"step": newest.get("global_step"), "duration": newest.get("time")}
    newest |= list_columns(parse_result(folder.result))
    return {name: str(value) for name, value in newest.items() if value is not None}


def matches_short_name(short: str, full: str) -> bool:
    """Return whether `short`, such as `lr`, matches the setting `full`, such as `optim.lr`."""
    return full == short or full.endswith(f".{short}")


def meets_condition(
    settings: Mapping[str, str], results: Mapping[str, str], key: str, comparison: str, expected: str
) -> bool:
    """Return whether a run's settings meet one condition of WHERE.

    The actual and the expected value are compared as numbers if both are numbers, and as lists if the setting is a
    list, such as `[a,b]`. If `comparison` requires a number and the setting is not a number, the result of the same
    name is used instead. A run that lacks the setting does not meet the condition. Raises UserError if `comparison`
    requires a number and `expected` is not a number.
    """
    actual = find_value(settings, key)
    if actual is None:
        return False
    actual_number = parse_float(actual)
    expected_number = parse_float(expected)
    if comparison in COMPARISONS:
        if actual_number is None:
            actual_number = parse_float(results.get(key, ""))
        if expected_number is None:
            raise UserError(f"WHERE: {key}{comparison}{expected}: {expected!r} is not a number")
        return actual_number is not None and COMPARISONS[comparison](actual_number, expected_number)
    is_equal = actual == expected
    if actual_number is not None and expected_number is not None:
        is_equal = actual_number == expected_number
    elif actual.startswith("["):
        is_equal = config_keys.parse_list(actual) == config_keys.parse_list(expected)
    return is_equal == (comparison == "=")


def trains_model(experiment: str, settings: Mapping[str, str]) -> bool:
    """Return whether a run of an experiment with these settings trains a model.

    The settings decide only for an experiment that no longer exists or whose config class is invalid. Older versions
    stored settings for training in the config.yaml of a run that only measures.
    """
    if experiment in config.list_experiments():
        with contextlib.suppress(UserError):
            return issubclass(config.import_schema(experiment), TrainingExperiment)
    return settings.get("data.name", "none") != "none"


def read_step_timeout(folder: RunFolder) -> float:
    """Return a run's launch.step_timeout in seconds, or 0 if the setting is unknown."""
    return parse_float(read_newest_settings(folder).get("launch.step_timeout", "")) or 0.0


def parse_float(text: str) -> float | None:
    """Return the number in `text`, or None if `text` is not a number."""
    return config_keys.parse_number(float, text)
