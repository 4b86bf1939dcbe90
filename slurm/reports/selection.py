"""Selection of runs for a command: by id, experiment, settings or sweep, or the newest ones."""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.core import config, config_keys
from common.core.errors import UserError
from common.core.text import format_count
from common.runs.folder import RunFolder, read_json
from common.runs.metrics_rows import parse_json
from slurm.arguments import parse_count, split_words, suggest_nearest

CONDITION = re.compile(r"([a-z][a-z0-9_.]*)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
DEFAULT_RUN_COUNT = 10  # the newest runs, selected if nothing limits the selection


@dataclasses.dataclass(frozen=True)
class RunFilter:
    """The criteria of a selection, as typed on the command line."""

    runs: str = ""
    name: str = ""
    last: str = ""
    conditions: str = ""
    """Such as `strategy=ddp lr>0.1`."""
    sweep: str = ""


def find_run(name: str, runs: Path) -> RunFolder:
    """Find the run folder of an id, its last four characters, or a path. Raises UserError."""
    if not name:
        files = sorted(runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
        newest = ", ".join(file.parent.name for file in files[:3]) or "none"
        raise UserError(f"RUN is missing; write RUN=<id> (newest in {runs}: {newest})")
    paths = [Path(name), runs / name]
    if re.fullmatch("[0-9a-f]{4}", name):
        matches = [file.parent for file in runs.glob(f"*-{name}/config.yaml")]
        if len(matches) > 1:
            names = " and ".join(sorted(path.name for path in matches))
            raise UserError(f"{name} is ambiguous: {names}; write the full id")
        paths += matches
    for path in paths:
        if os.path.isfile(path / "config.yaml"):  # noqa: PTH113 (is_file raises where a name is too long)
            return RunFolder(path.absolute())
    raise UserError(f"{name!r}: no such run folder in {runs}; make status lists the runs")


def list_runs(root: Path) -> list[RunFolder]:
    """List all run folders, the oldest first."""
    paths = [file.parent for file in root.glob("*/config.yaml")]
    paths.sort(key=lambda path: path.name.rsplit("-", 3)[1:])  # a name contains the time of creation
    return [RunFolder(path.absolute()) for path in paths]


def select_runs(criteria: RunFilter, root: Path, newest: int = DEFAULT_RUN_COUNT) -> list[RunFolder]:
    """Select the runs that meet all criteria, oldest first or in the order of their names. Raises UserError.

    If neither RUNS, SWEEP, WHERE nor LAST limits the selection, only the `newest` runs are returned; 0 means all.
    """
    folders = list_named_runs(criteria, root) if criteria.runs or criteria.sweep else list_runs(root)
    if not folders:
        raise UserError(f"no runs in {root} yet; start one: make exp NAME={config.list_experiments()[0]}")
    if criteria.name:
        experiments = sorted({folder.experiment for folder in folders})
        if criteria.name not in experiments:
            raise UserError(f"NAME={criteria.name!r}: no such runs; there are runs of {', '.join(experiments)}")
        folders = [folder for folder in folders if folder.experiment == criteria.name]
    folders = filter_by_settings(folders, criteria.conditions)
    if criteria.last:
        return folders[-parse_count("LAST", criteria.last) :]
    is_limited = criteria.runs or criteria.sweep or criteria.conditions
    return folders if is_limited else folders[-newest:]


def list_named_runs(criteria: RunFilter, root: Path) -> list[RunFolder]:
    """List the runs of RUNS and SWEEP, each once. Raises UserError."""
    folders = [find_run(name, root) for name in split_words("RUNS", criteria.runs)]
    if criteria.sweep:
        folders += list_sweep_runs(criteria.sweep, root)
    return list({folder.path: folder for folder in folders}.values())


def read_sweep(file: Path) -> dict[str, Any]:
    """Read a sweep.json; return an empty dict if there is none.

    Raises UserError if it is damaged: no other file records which run belongs to which point.
    """
    try:
        sweep = parse_json(file.read_text(errors="replace"))
    except FileNotFoundError:
        return {}
    points = sweep.get("cells") if isinstance(sweep, dict) else None
    if not isinstance(points, list) or not all(map(is_sweep_point, points)):
        raise UserError(
            f"{file} is damaged; restore it, or delete it: the sweep then starts over, and its old runs are kept"
        )
    return sweep


def is_sweep_point(point: Any) -> bool:
    """Check for a valid sweep point: settings, index of the repeat, name of its run."""
    if not isinstance(point, dict) or not isinstance(point.get("values"), dict):
        return False
    earlier_runs = point.get("earlier", [])
    if not isinstance(earlier_runs, list) or not isinstance(point.get("repeat", 0), int):
        return False
    names = [point.get("run") or "none yet", *earlier_runs]
    return all(isinstance(name, str) and Path(name).name == name for name in names)


def list_sweep_runs(sweep: str, root: Path) -> list[RunFolder]:
    """List the started runs of a sweep, in the order of its points. Raises UserError."""
    for path in (Path(sweep), root / "sweeps" / sweep):
        file = path / "sweep.json"
        if not os.path.isfile(file):  # noqa: PTH113 (is_file raises where a name is too long)
            continue
        ids = dict.fromkeys(point.get("run") for point in read_sweep(file).get("cells", []))
        run_paths = [path.absolute().parent.parent / name for name in ids if name]
        folders = [RunFolder(run_path) for run_path in run_paths if (run_path / "config.yaml").is_file()]
        if not folders:
            raise UserError(f"SWEEP={sweep!r}: no run has started, or the run folders were deleted")
        return folders
    raise UserError(f"SWEEP={sweep!r}: no such sweep in {root / 'sweeps'}")


def read_settings(folder: RunFolder) -> dict[str, str]:
    """Read the settings of a run's newest attempt as text, by dotted name; empty if they cannot be read."""
    try:
        config_values = config.read_config_file(folder.path / "config.yaml")
    except UserError:
        return {}
    settings = {key: str(value) for key, value in config_values.items()}
    for attempt in folder.list_attempts()[-1:]:
        for key, change in read_json(attempt.attempt_folder / "changed.json").items():
            if isinstance(change, list) and change:
                settings[key] = str(change[-1])
    return settings


def parse_conditions(text: str) -> list[tuple[str, ...]]:
    """Parse WHERE into conditions: key, comparison and value. Raises UserError."""
    conditions = []
    for word in split_words("WHERE", text):
        match = CONDITION.fullmatch(word)
        if not match:
            raise UserError(f"WHERE={text!r}: {word!r} is not a condition; write key=value, key!=value or key>number")
        conditions.append(match.groups())
    return conditions


def filter_by_settings(folders: list[RunFolder], text: str) -> list[RunFolder]:
    """Return the runs whose settings meet all conditions of WHERE. Raises UserError."""
    conditions = parse_conditions(text)
    if not conditions:
        return folders
    settings = [read_settings(folder) | {"experiment": folder.experiment} for folder in folders]
    keys = set[str]().union(*settings)
    for short_key, _, _ in conditions:
        if not any(matches_short_name(short_key, key) for key in keys):
            hint = suggest_nearest(short_key, sorted(keys | {key.split(".")[-1] for key in keys}))
            raise UserError(f"WHERE: no run has a setting {short_key}{hint}")

    matches = []
    for folder, run_settings in zip(folders, settings, strict=True):
        if all(meets_condition(run_settings, *condition) for condition in conditions):
            matches.append(folder)
    if not matches:
        raise UserError(f"WHERE={text!r}: none of {format_count(len(folders), 'run')} has these settings")
    return matches


def matches_short_name(short: str, full: str) -> bool:
    """Check a short name of a setting, such as `lr`, against a full one."""
    return full == short or full.endswith(f".{short}")


def meets_condition(settings: Mapping[str, str], key: str, comparison: str, expected: str) -> bool:
    """Check one condition on a run's settings; numbers are compared as numbers. Raises UserError."""
    first_match = next((text for name, text in settings.items() if matches_short_name(key, name)), None)
    actual = settings.get(key, first_match)
    if actual is None:
        return False
    actual_number = parse_float(actual)
    expected_number = parse_float(expected)
    if comparison in COMPARISONS:
        if expected_number is None:
            raise UserError(f"WHERE: {key}{comparison}{expected}: {expected!r} is not a number")
        return actual_number is not None and COMPARISONS[comparison](actual_number, expected_number)
    is_equal = actual == expected
    if actual_number is not None and expected_number is not None:
        is_equal = actual_number == expected_number
    return is_equal == (comparison == "=")


def trains_model(settings: Mapping[str, str]) -> bool:
    """Return whether a run with these settings trains; a run that only measures has no data."""
    return settings.get("data.name") != "none"


def read_step_timeout(folder: RunFolder) -> float:
    """Read a run's launch.step_timeout in seconds; 0 if it is unknown."""
    return parse_float(read_settings(folder).get("launch.step_timeout", "")) or 0.0


def parse_float(text: str) -> float | None:
    """Parse a number; return None if the text is not one."""
    return config_keys.parse_number(float, text)
