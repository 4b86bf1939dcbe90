"""The choice of runs for a command: by id, newest, experiment, settings or sweep."""

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
from common.runs.folder import Folder, read_json
from common.runs.metrics_rows import parse_json
from slurm.arguments import parse_count, split_words, suggest_nearest

CONDITION = re.compile(r"([a-z][a-z0-9_.]*)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
NEWEST = 10  # runs that are taken where nothing is asked for


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice of runs as it was typed."""

    runs: str = ""
    name: str = ""
    last: str = ""
    where: str = ""
    sweep: str = ""


def find_run(name: str, runs: Path) -> Folder:
    """Find the run folder of an id, its last four characters, or a path. Raises UserError."""
    ends = [file.parent for file in runs.glob(f"*-{name}/config.yaml")] if re.fullmatch("[0-9a-f]{4}", name) else []
    if len(ends) > 1:
        raise UserError(f"{name} is the end of {' and '.join(sorted(path.name for path in ends))}; write one out")
    for path in (Path(name), runs / name, *ends):
        if name and os.path.isfile(path / "config.yaml"):  # noqa: PTH113 (is_file raises where a name is too long)
            return Folder(path.absolute())
    if not name:
        newest = sorted(runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)[:3]
        names = ", ".join(path.parent.name for path in newest) or "none"
        raise UserError(f"RUN is missing; write RUN=<id> (newest in {runs}: {names})")
    raise UserError(f"{name!r}: no such run folder in {runs}; make status lists them")


def list_runs(root: Path) -> list[Folder]:
    """List all run folders, the oldest first."""
    paths = [path.parent for path in root.glob("*/config.yaml")]
    paths.sort(key=lambda path: path.name.rsplit("-", 3)[1:])  # the time stands in the name
    return [Folder(path.absolute()) for path in paths]


def select_runs(asked: Choice, root: Path, newest: int = NEWEST) -> list[Folder]:
    """Select the runs that fit the whole choice, oldest first or in the order of their names. Raises UserError.

    Where nothing tells which or how many, the `newest` ones; 0 is all.
    """
    if asked.runs or asked.sweep:
        found = [find_run(name, root) for name in split_words("RUNS", asked.runs)]
        found += list_sweep_runs(asked.sweep, root) if asked.sweep else []
        found = list({folder.path: folder for folder in found}.values())
    else:
        found = list_runs(root)
    if not found:
        raise UserError(f"there is no run in {root} yet; make exp NAME={config.list_experiments()[0]} makes one")
    if asked.name:
        there = sorted({folder.experiment for folder in found})
        if asked.name not in there:
            raise UserError(f"NAME={asked.name!r}: no run of it; there are runs of {', '.join(there)}")
        found = [folder for folder in found if folder.experiment == asked.name]
    found = filter_runs(found, asked.where)
    if asked.last:
        return found[-parse_count("LAST", asked.last) :]
    return found if asked.runs or asked.sweep or asked.where else found[-newest:]


def read_sweep(file: Path) -> dict[str, Any]:
    """Read a sweep.json; empty where there is none.

    Raises UserError for a damaged one: nothing else tells which run belongs to which point.
    """
    try:
        found = parse_json(file.read_text(errors="replace"))
    except FileNotFoundError:
        return {}
    cells = found.get("cells") if isinstance(found, dict) else None
    if not isinstance(cells, list) or not all(map(is_sweep_point, cells)):
        raise UserError(
            f"{file} is damaged; bring it back, or delete it: the sweep then begins anew beside its old runs"
        )
    return found


def is_sweep_point(value: Any) -> bool:
    """Check for a point of a sweep: settings, number of the repeat, name of its run."""
    if not isinstance(value, dict) or not isinstance(value.get("values"), dict):
        return False
    earlier = value.get("earlier", [])
    if not isinstance(earlier, list) or not isinstance(value.get("repeat", 0), int):
        return False
    return all(isinstance(name, str) and Path(name).name == name for name in [value.get("run") or "none yet", *earlier])


def list_sweep_runs(sweep: str, root: Path) -> list[Folder]:
    """List the started runs of a sweep, in the order of its points. Raises UserError."""
    for path in (Path(sweep), root / "sweeps" / sweep):
        file = path / "sweep.json"
        if os.path.isfile(file):  # noqa: PTH113 (is_file raises where a name is too long)
            ids = [cell.get("run") or "" for cell in read_sweep(file).get("cells", [])]
            paths = [path.absolute().parent.parent / name for name in dict.fromkeys(ids) if name]
            found = [Folder(one) for one in paths if (one / "config.yaml").is_file()]
            if not found:
                raise UserError(f"SWEEP={sweep!r}: none of its runs has begun, or their folders are gone")
            return found
    raise UserError(f"SWEEP={sweep!r}: no such sweep in {root / 'sweeps'}")


def read_settings(folder: Folder) -> dict[str, str]:
    """Read the settings of a run's newest attempt as text, by dotted name; empty where they cannot be read."""
    try:
        found = {key: str(value) for key, value in config.read_config_file(folder.path / "config.yaml").items()}
    except UserError:
        return {}
    for start in folder.attempts()[-1:]:
        changed = read_json(start.attempt / "changed.json").items()
        found |= {key: str(pair[-1]) for key, pair in changed if isinstance(pair, list) and pair}
    return found


def filter_runs(folders: list[Folder], where: str) -> list[Folder]:
    """Return the runs whose settings fulfil all conditions, such as `strategy=ddp lr>0.1`. Raises UserError."""
    conditions = []
    for word in split_words("WHERE", where):
        match = CONDITION.fullmatch(word)
        if not match:
            raise UserError(f"WHERE={where!r}: {word!r} is no condition; write key=value, key!=value or key>number")
        conditions.append(match.groups())
    if not conditions:
        return folders
    settings = [read_settings(folder) | {"experiment": folder.experiment} for folder in folders]
    known = {key for values in settings for key in values}
    for key, _, _ in conditions:
        if not any(matches_short_name(key, one) for one in known):
            names = sorted(known | {one.split(".")[-1] for one in known})
            raise UserError(f"WHERE: no run has a setting {key}{suggest_nearest(key, names)}")
    pairs = zip(folders, settings, strict=True)
    found = [folder for folder, values in pairs if all(meets_condition(values, *one) for one in conditions)]
    if not found:
        raise UserError(f"WHERE={where!r}: none of {format_count(len(folders), 'run')} has such settings")
    return found


def matches_short_name(short: str, full: str) -> bool:
    """Check a short name of a setting, such as `lr`, against a full one."""
    return full == short or full.endswith(f".{short}")


def meets_condition(values: dict[str, str], key: str, sign: str, wanted: str) -> bool:
    """Check one condition on a run's settings; numbers are compared as numbers. Raises UserError."""
    own = values[key] if key in values else next((v for k, v in values.items() if matches_short_name(key, k)), None)
    if own is None:
        return False
    left, right = parse_float(own), parse_float(wanted)
    if sign in COMPARISONS:
        if right is None:
            raise UserError(f"WHERE: {key}{sign}{wanted}: {wanted!r} is no number")
        return left is not None and COMPARISONS[sign](left, right)
    same = left == right if left is not None and right is not None else own == wanted
    return same == (sign == "=")


def trains_model(settings: Mapping[str, str]) -> bool:
    """Tell from the settings of a run whether it trains; a run that only measures has no data."""
    return settings.get("data.name") != "none"


def read_step_timeout(folder: Folder) -> float:
    """Read a run's launch.step_timeout in seconds; 0 where its settings do not tell."""
    return parse_float(read_settings(folder).get("launch.step_timeout", "")) or 0.0


def parse_float(text: str) -> float | None:
    """Read a number; None for a text that is none."""
    return config_keys.parse_number(float, text)
