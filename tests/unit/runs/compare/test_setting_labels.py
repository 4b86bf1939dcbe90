"""The settings that distinguish runs, and their short names."""

from __future__ import annotations

from common.runs.compare import setting_labels


def make_runs() -> list[dict[str, str]]:
    """Return the settings of four runs: two learning rates with two strategies each."""
    runs = []
    for number in range(4):
        learning_rate = f"{number // 2}"
        run = {
            "seed": f"{number}",
            "optim.lr": learning_rate,
            "optim.base_batch": learning_rate,
            "strategy": f"{number % 2}",
            "checkpoint.every_seconds": f"{number}",
            "log.level": f"{number}",
            "runs": f"{number}",
        }
        runs.append(run)
    return runs


def test_settings_of_the_method_come_first() -> None:
    differing = setting_labels.sort_differing_settings(make_runs())
    assert differing == ["strategy", "optim.lr", "optim.base_batch", "seed", "checkpoint.every_seconds"]


def test_as_few_settings_as_possible_distinguish_the_runs() -> None:
    runs = make_runs()
    assert setting_labels.choose_distinctive_settings(runs, 3) == ["strategy", "optim.lr"]
    assert setting_labels.choose_distinctive_settings(runs, 1) == ["strategy"]
    assert setting_labels.choose_distinctive_settings(runs[:1], 3) == []


def test_the_settings_that_separate_most_runs_come_first() -> None:
    rates = ("0.1", "0.2", "0.3", "0.4")
    runs = [{"strategy": f"{number // 3}", "optim.lr": rate, "seed": f"{number}"} for number, rate in enumerate(rates)]
    assert setting_labels.choose_distinctive_settings(runs, 3) == ["optim.lr"]
    repeated = [*runs, runs[0] | {"seed": "9"}]
    assert setting_labels.choose_distinctive_settings(repeated, 3) == ["optim.lr", "seed"]


def test_keys_are_shortened_if_they_stay_unique() -> None:
    runs = [{"optim.lr": "1", "optim.name": "sgd", "steps": "3", "profile.steps": "4"}]
    assert setting_labels.shorten_keys(list(runs[0]), runs) == ["lr", "optim.name", "steps", "profile.steps"]
