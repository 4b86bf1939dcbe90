"""The settings in which runs differ, and which of them tell runs of one experiment apart best. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Settings = Mapping[str, str]

NO_MATTER = ("runs", "data.cache", "data.root", "log.", "wandb.")  # settings that do not change what is computed
GENERAL = ("optim.", "batch", "dtype", "data.", "launch.nodes", "epochs", "steps", "seed")
REPORTING = ("eval_batch", "plot", "compare", "export", "sweep", "repeats", "profile", "launch.", "checkpoint.")
MISSING = "-"  # where a run has no such setting


def matches_setting(key: str, name: str) -> bool:
    """Check that a setting has this name, or is in the group that a name with a dot at its end stands for."""
    return key == name or (name.endswith(".") and key.startswith(name))


def list_differing_settings(runs: Sequence[Settings]) -> list[str]:
    """List the settings whose values differ between the runs that have them."""
    found = []
    for key in dict.fromkeys(key for run in runs for key in run):
        if len({run[key] for run in runs if key in run}) > 1 and not any(
            matches_setting(key, name) for name in NO_MATTER
        ):
            found.append(key)
    return found


def compute_label_priority(key: str) -> int:
    """Return the order of settings in a label: what one experiment has, then what all have, then how it is reported."""
    return next((order for order, name in enumerate((*GENERAL, *REPORTING), 1) if matches_setting(key, name)), 0)


def sort_differing_settings(runs: Sequence[Settings]) -> list[str]:
    """The settings that differ, the most telling first."""
    return sorted(list_differing_settings(runs), key=compute_label_priority)


def choose_telling_settings(runs: Sequence[Settings], most: int) -> list[str]:
    """Choose settings that tell runs apart, `most` at most: each divides runs that those before it did not."""
    found: list[str] = []
    parts = 1
    for key in sort_differing_settings(runs):
        divided = len({tuple(run.get(one) for one in (*found, key)) for run in runs})
        if divided > parts:
            found, parts = [*found, key], divided
    return found[:most]


def shorten_keys(keys: Sequence[str], runs: Sequence[Settings]) -> list[str]:
    """The last parts of the names of settings; the full name where that would not be clear."""
    tails = [key.rpartition(".")[2] for key in {key for run in runs for key in run}]
    found = []
    for key in keys:
        tail = key.rpartition(".")[2]
        found.append(key if tail == "name" or tails.count(tail) > 1 else tail)
    return found
