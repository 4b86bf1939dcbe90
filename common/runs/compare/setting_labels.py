"""Find the settings that best distinguish the runs of an experiment. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Settings = Mapping[str, str]

# settings that do not affect the computation
IRRELEVANT_SETTINGS = ("runs", "data.cache", "data.root", "log.", "run.", "wandb.")
GENERAL_SETTINGS = ("optim.", "batch", "dtype", "data.", "launch.nodes", "epochs", "steps", "seed")
REPORT_SETTINGS = ("eval_batch", "plot", "compare", "export", "sweep", "repeats", "profile", "launch.", "checkpoint.")
SETTING_HEADS = {"optim.lr": "learning rate"}
"""Headings of the columns of settings, by key. The heading of any other column is the key."""
MISSING = "-"  # text shown if a run does not have a setting


def matches_setting(key: str, name: str) -> bool:
    """Return whether the setting `key` has the name `name` or belongs to the group `name`.

    The name of a group ends with a dot.
    """
    return key == name or (name.endswith(".") and key.startswith(name))


def list_keys(runs: Sequence[Settings]) -> list[str]:
    """Return the keys of the settings of all runs, in order of first appearance."""
    keys: dict[str, None] = {}
    for run in runs:
        keys |= dict.fromkeys(run)
    return list(keys)


def format_setting_head(key: str) -> str:
    """Return the heading of the table column of a setting."""
    return SETTING_HEADS.get(key, key)


def is_irrelevant(key: str) -> bool:
    """Return whether a setting does not affect the computation."""
    return any(matches_setting(key, name) for name in IRRELEVANT_SETTINGS)


def list_differing_settings(runs: Sequence[Settings]) -> list[str]:
    """Return the keys of the settings whose values differ between the runs that have the setting."""
    differing = []
    for key in list_keys(runs):
        texts = {run[key] for run in runs if key in run}
        if len(texts) > 1 and not is_irrelevant(key):
            differing.append(key)
    return differing


def compute_label_priority(key: str) -> int:
    """Return the priority of a setting in labels. Settings with smaller numbers come first.

    Settings of specific experiments come first, then general settings, and then settings for reports.
    """
    for position, name in enumerate((*GENERAL_SETTINGS, *REPORT_SETTINGS), 1):
        if matches_setting(key, name):
            return position
    return 0


def sort_differing_settings(runs: Sequence[Settings]) -> list[str]:
    """Return the settings that differ between runs, with the most distinctive setting first."""
    return sorted(list_differing_settings(runs), key=compute_label_priority)


def choose_distinctive_settings(runs: Sequence[Settings], limit: int) -> list[str]:
    """Return at most `limit` settings that distinguish the runs, with the setting that separates most runs first.

    Each setting separates runs that the other settings do not separate. The seed and the settings for reports are used
    only if no other setting separates more runs.
    """
    keys = sort_differing_settings(runs)
    last_resorts = [key for key in keys if is_last_resort(key)]
    selected: list[str] = []
    for candidates in ([key for key in keys if key not in last_resorts], last_resorts):
        while candidates and len(selected) < limit:
            best = max(candidates, key=lambda key: count_groups(runs, [*selected, key]))  # the first one if several do
            if count_groups(runs, [*selected, best]) == count_groups(runs, selected):
                break
            selected.append(best)
    return selected


def is_last_resort(key: str) -> bool:
    """Return whether a setting is the seed or a setting for reports."""
    return compute_label_priority(key) >= len(GENERAL_SETTINGS)  # the seed is the last of the general settings


def count_groups(runs: Sequence[Settings], keys: Sequence[str]) -> int:
    """Return the number of different combinations of values of the settings `keys`."""
    return len({tuple(map(run.get, keys)) for run in runs})


def shorten_keys(keys: Sequence[str], runs: Sequence[Settings]) -> list[str]:
    """Shorten the name of each setting to its last part. Names whose last part is ambiguous are not shortened."""
    last_parts = [key.rpartition(".")[2] for key in list_keys(runs)]
    names = []
    for key in keys:
        last_part = key.rpartition(".")[2]
        is_ambiguous = last_part == "name" or last_parts.count(last_part) > 1
        names.append(key if is_ambiguous else last_part)
    return names
