"""Table of strategies: what is read from the runs, how runs are combined, and which answers follow."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import RunFolder, read_json, write_json
from slurm.reports import strategies
from slurm.reports.strategies import StrategyRun, answer_questions, summarize
from slurm.reports.strategy_formulas import RankFormulas
from tests.harness.runs.synthetic_runs import SyntheticRun, write_rows

MEASURED = {
    "rank_state_bytes": [5_000_000, 6_000_000],
    "rank_activation_bytes": [4_000_000, 1_000_000],
    "rank_sent_bytes": [100, 300],
    "rank_state_formula": [4_000_000, 1],
    "rank_activation_formula": [4_000_000, 1],
    "rank_sent_formula": [1, 300],
    "idle_share": [0.2, 0.4],
}


BASE_RUN = StrategyRun(
    repeat=0,
    ranks=2,
    threads=1,
    host_cores=2,
    step_seconds=[0.1, 0.2, 0.3],
    losses=[2.0, 1.0],
    samples_per_step=10.0,
    tokens_per_sample=0.0,
    state_bytes=3e6,
    activation_bytes=1e6,
    sent_bytes=2e6,
    idle_share=None,
)


def make_run(**changes: Any) -> StrategyRun:
    return dataclasses.replace(BASE_RUN, **changes)


def write_run(folder: Path, attempts: int = 1, **result: Any) -> RunFolder:
    """Write a finished run of twelve steps, whose first steps are slow, with two ranks on one core."""
    run = SyntheticRun(steps=12, attempts=attempts, result={"measured": MEASURED} | result).write(folder)
    attempt = run.list_attempts()[-1]
    rows = []
    for step in range(1, 13):
        row = {"global_step": step, "samples": 64 * step, "time": step, "loss": 1 / step}
        if step > 1:  # the first step is not timed
            row["step_time"] = 1.0 if step < 5 else 0.1 + 0.01 * step
        rows.append(row)
    rows.append({"global_step": 12, "samples": 768, "time": 20, "test_loss": 1.0})
    write_rows(attempt, rows)
    world = {"processes": 2, "hosts": ["vm"] * 2, "device": "cpu"}
    write_json(attempt.attempt_folder / "world.json", world)
    meta = read_json(run.path / "meta.json")
    meta["machine"] = {"host": "vm", "cores": 1}
    write_json(run.path / "meta.json", meta)
    return run


def test_the_measurements_of_a_run_are_read_from_its_files(tmp_path: Path) -> None:
    run = strategies.read_run(write_run(tmp_path), repeat=3)
    assert run is not None
    assert run.repeat == 3
    assert run.ranks == 2
    assert run.host_cores == 1
    assert run.is_oversubscribed
    assert run.step_seconds == pytest.approx([0.1 + 0.01 * step for step in range(5, 13)])
    assert run.losses == [1 / step for step in range(1, 13)]
    assert run.samples_per_step == 64
    assert run.memory_bytes == 9e6, "rank 0 needs most memory"
    assert run.activation_bytes == 4e6
    assert run.sent_bytes == 300, "rank 1 sends most"
    assert run.compute_memory_deviation(None) == 1 / 8, "rank 0 needs 9 MB, and 8 MB by the formulas"
    assert run.compute_sent_deviation() == 0
    assert run.idle_share == pytest.approx(0.3)


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_run_of_several_attempts_is_resumed(attempts: int, tmp_path: Path) -> None:
    run = strategies.read_run(write_run(tmp_path, attempts=attempts))
    assert run is not None
    assert run.is_resumed == (attempts == 2)


def test_an_unfinished_run_has_no_measurements(tmp_path: Path) -> None:
    assert strategies.read_run(write_run(tmp_path, state="failed")) is None


def test_a_run_on_other_hosts_is_not_oversubscribed(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    file = folder.list_attempts()[-1].attempt_folder / "world.json"
    world = read_json(file)
    world["hosts"] = ["node1", "node2"]
    write_json(file, world)
    run = strategies.read_run(folder)
    assert run is not None
    assert not run.is_oversubscribed


def test_losses_are_compared_with_one_process_in_the_same_round() -> None:
    first = make_run(losses=[2.0, 1.0])
    second = make_run(repeat=1, losses=[3.0, 2.0])
    runs = {"one process": [first, second]}
    divided = make_run(losses=[2.0, 1.25])
    divided_again = make_run(repeat=1, losses=[3.5, 2.0])
    runs["tensor=2"] = [divided, divided_again]
    runs["fsdp=2"] = [make_run(repeat=2)]
    rows = summarize(runs)
    assert [row.loss_difference for row in rows] == [0, 0.5, None]


def test_without_one_process_nothing_is_compared() -> None:
    runs = {"tensor=2": [make_run(losses=[2.0, 1.0])], "fsdp=2": [make_run(losses=[3.0, 1.0])]}
    assert [row.loss_difference for row in summarize(runs)] == [None, None]


def test_times_are_the_median_and_quartiles_over_all_rounds() -> None:
    first = make_run(step_seconds=[0.1, 0.2])
    second = make_run(repeat=1, step_seconds=[0.3, 0.4, 0.5])
    (row,) = summarize({"one process": [first, second]})
    heads = strategies.list_heads(row.runs[0])
    cells = dict(zip(heads, row.format_cells(), strict=True))
    assert cells["ms per step"] == "300 [200..400]"
    assert cells["samples/s"] == "33"


def list_deviations(*runs: StrategyRun) -> tuple[str, str]:
    """Return the cells of the difference from the formulas for memory and messages."""
    row = summarize({"one process": [make_run(activation_bytes=4e6)], "fsdp=2": runs})[1]
    heads = strategies.list_heads(row.runs[0])
    cells = dict(zip(heads, row.format_cells(), strict=True))
    return cells["memory vs.\nformula"], cells["sent vs.\nformula"]


def test_measurements_are_compared_with_formulas() -> None:
    formulas = RankFormulas(state_bytes=3e6, activation_bytes=2e6, sent_bytes=2.05e6)
    assert list_deviations(make_run(formulas=formulas)) == ("-20.0%", "-2.4%")
    equal = RankFormulas(state_bytes=3e6, activation_bytes=1e6, sent_bytes=2e6)
    assert list_deviations(make_run(formulas=equal)) == ("+0.0%", "+0.0%")
    assert list_deviations(make_run(formulas=equal), make_run(formulas=formulas)) == ("-20.0%", "-2.4%")


def test_activations_without_a_formula_are_compared_with_those_of_one_process() -> None:
    half = RankFormulas(state_bytes=3e6, sample_share=0.5)
    assert list_deviations(make_run(formulas=half)) == ("-20.0%", "-")
    assert list_deviations(make_run(repeat=1, formulas=half)) == ("-", "-"), "no run of one process in this round"


def test_without_formulas_nothing_is_compared() -> None:
    assert list_deviations(make_run()) == ("-", "-")
    assert list_deviations(make_run(formulas=RankFormulas(state_bytes=3e6, sent_bytes=0))) == ("-", "-")
    formulas = RankFormulas(state_bytes=3e6, activation_bytes=1e6)
    assert list_deviations(make_run(state_bytes=None, formulas=formulas)) == ("-", "-")


def make_runs() -> dict[str, list[StrategyRun]]:
    """Return a run of each of four strategies, of which each is the best one for another question."""
    runs = {"one process": [make_run(ranks=1, threads=2, state_bytes=8e6, sent_bytes=0)]}
    runs["tensor=2"] = [make_run(step_seconds=[0.1], sent_bytes=5e6)]
    runs["fsdp=2"] = [make_run(state_bytes=2e6, sent_bytes=9e6)]
    runs["replicas=2"] = [make_run(state_bytes=8e6, sent_bytes=1e6)]
    return runs


def test_the_answers_name_the_best_strategy_for_each_question() -> None:
    answers = answer_questions(summarize(make_runs()))
    assert answers == {
        "fastest": "2: tensor=2",
        "least memory per rank": "3: fsdp=2",
        "fewest bytes sent": "4: replicas=2",
    }


def test_of_strategies_with_similar_memory_the_faster_one_is_recommended() -> None:
    runs = make_runs()
    runs["fsdp=2 reshard=false"] = [make_run(state_bytes=2.01e6, step_seconds=[0.15])]
    answers = answer_questions(summarize(runs))
    assert answers["least memory per rank"] == "5: fsdp=2 reshard=false (within 1%: 3)"


def test_strategies_that_send_equally_many_bytes_are_listed() -> None:
    runs = make_runs()
    runs["replicas=2 zero1=true"] = [make_run(sent_bytes=1e6)]
    assert answer_questions(summarize(runs))["fewest bytes sent"] == "4: replicas=2 (within 1%: 5)"


def test_runs_of_one_process_send_nothing() -> None:
    runs = {"one process": [make_run(sent_bytes=0)], "one process recompute=blocks": [make_run(sent_bytes=0)]}
    assert "fewest bytes sent" not in answer_questions(summarize(runs))


def test_without_memory_only_the_fastest_strategy_is_known() -> None:
    runs = make_runs()
    runs["context=2"] = [make_run(step_seconds=[0.05], state_bytes=None)]
    assert answer_questions(summarize(runs)) == {"fastest": "5: context=2"}


@pytest.mark.parametrize("columns", ["60", "120", "200"])
def test_the_table_has_a_row_for_each_strategy_and_a_figure(
    columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    runs = make_runs()
    runs["tensor=4"] = [make_run(ranks=4, is_resumed=True)]
    strategies.print_report("gpt", runs, tmp_path, "model=gpt batch=32")
    out = capsys.readouterr().out
    for label in runs:
        assert label in out
    assert "4*" in out
    assert "* oversubscribed: 4 ranks share 2 cores" in out
    assert "threads per rank: 2 with 1 rank, 1 with 2 ranks, 1 with 4 ranks" in out
    assert "steps after the warm-up, in 1 round" in out
    assert "settings of all runs: model=gpt batch=32" in out
    assert "idle: share of time in which ranks wait" in out
    assert "resumed after an interruption, so their times are less accurate: tensor=4" in out
    figure = (tmp_path / "strategies.svg").read_text()
    assert "on 2 cores (oversubscribed)" in figure
