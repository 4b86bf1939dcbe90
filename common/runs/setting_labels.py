"""The settings in which runs differ, and which of them best distinguish runs of an experiment. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Settings = Mapping[str, str]

IRRELEVANT_SETTINGS = ("runs", "data.cache", "data.root", "log.", "wandb.")  # they do not change what is computed
GENERAL_SETTINGS = ("optim.", "batch", "dtype", "data.", "launch.nodes", "epochs", "steps", "seed")
REPORT_SETTINGS = ("eval_batch", "plot", "compare", "export", "sweep", "repeats", "profile", "launch.", "checkpoint.")
MISSING = "-"  # text of a setting that a run does not have


def matches_setting(key: str, name: str) -> bool:
    """Return whether a setting has this name or belongs to this group.

    The name of a group ends with a dot.
    """
    return key == name or (name.endswith(".") and key.startswith(name))


def list_keys(runs: Sequence[Settings]) -> list[str]:
    """Return the keys of all settings of the runs, in order of first appearance."""
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run)
    return list(keys)


def list_differing_settings(runs: Sequence[Settings]) -> list[str]:
    """Return the settings whose values differ between the runs that have them."""
    differing = []
    for key in list_keys(runs):
        is_irrelevant = any(matches_setting(key, name) for name in IRRELEVANT_SETTINGS)
        texts = {run[key] for run in runs if key in run}
        if len(texts) > 1 and not is_irrelevant:
            differing.append(key)
    return differing


def compute_label_priority(key: str) -> int:
    """Return the position of a setting in labels: settings of one experiment first, then general, then of reports."""
    for position, name in enumerate((*GENERAL_SETTINGS, *REPORT_SETTINGS), 1):
        if matches_setting(key, name):
            return position
    return 0


def sort_differing_settings(runs: Sequence[Settings]) -> list[str]:
    """Return the settings in which runs differ, the most distinctive first."""
    return sorted(list_differing_settings(runs), key=compute_label_priority)


def choose_distinctive_settings(runs: Sequence[Settings], limit: int) -> list[str]:
    """Return at most `limit` settings that distinguish runs.

    Each one separates runs that the earlier ones do not.
    """
    selected: list[str] = []
    group_count = 1
    for key in sort_differing_settings(runs):
        keys = [*selected, key]
        groups = {tuple(map(run.get, keys)) for run in runs}
        if len(groups) > group_count:
            selected = keys
            group_count = len(groups)
    return selected[:limit]


def shorten_keys(keys: Sequence[str], runs: Sequence[Settings]) -> list[str]:
    """Return the last part of the name of each setting.

    Ambiguous settings keep the full name.
    """
    last_parts = [key.rpartition(".")[2] for key in list_keys(runs)]
    names = []
    for key in keys:
        last_part = key.rpartition(".")[2]
        is_ambiguous = last_part == "name" or last_parts.count(last_part) > 1
        names.append(key if is_ambiguous else last_part)
    return names
