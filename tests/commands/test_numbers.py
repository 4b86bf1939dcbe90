"""Numbers in pages come from records, and benchmarks keep what they have measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.errors import UserError
from tests.benchmarks import __main__ as bench
from tests.benchmarks import figures, measure, records, tables
from tests.benchmarks.measure import Number, Pace, Samples, Task, interleave
from tests.benchmarks.parts import Part, discard_run, ignore_other_programs
from tests.benchmarks.records import Record, Row, Table, at_least, at_most
from tests.harness.repository import ROOT

PAGES = tables.list_pages()
NARRATIVE = [page for page in PAGES if page.parent in (ROOT, ROOT / "experiments") or ROOT / "common" in page.parents]
MEASURED = re.compile(
    r"\d\s*(?:±|\+-)\s*\d|\d \[[\d.,]+\.\.[\d.,]+\]|"
    r"\d[\d.,]*\s?(?:ms|us|samples/s|MB|MiB|kB|%|points|times as fast)(?!\w)"
)
CONSTANTS = {"5 %"}
"""Numbers with a unit that are no measurements."""
PAGE = ROOT / "README.md"
METHOD = "CONTRIBUTING.md#how-numbers-are-measured"


@pytest.fixture(autouse=True)
def constant_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is equally fast in all rounds, although other tests use it."""
    monkeypatch.setattr(measure, "time_calibration", lambda: 0.1)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def unmarked(text: str) -> str:
    """A page without what is generated, code, and links."""
    text = tables.MARKED.sub("", text)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_show_what_is_recorded(page: Path) -> None:
    text = page.read_text()
    assert tables.fill_page(text, records.recorded(), page) == text, "run make tables to update the page"
    assert len(re.findall(tables.MARKER, text)) == text.count("<!-- end -->") == len(tables.MARKED.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_line_of_a_paragraph_starts_with_a_value(page: Path) -> None:
    """In Markdown, a line that starts with a comment ends the paragraph before it."""
    assert not re.search(r"^ *<!-- value", page.read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_measured_tables_are_generated(page: Path) -> None:
    rows = [line for line in unmarked(page.read_text()).splitlines() if line.startswith("|")]
    typed = [row for row in rows if set(MEASURED.findall(row)) - CONSTANTS]
    assert not typed, "a table of measured numbers stands outside of <!-- measured ... --> markers"


@pytest.mark.parametrize("page", NARRATIVE, ids=name_of)
def test_no_measured_number_is_typed_by_hand(page: Path) -> None:
    typed = set(MEASURED.findall(unmarked(page.read_text()))) - CONSTANTS
    assert not typed, "take it from a record: <!-- value PART | ROW | COLUMN --><!-- end -->"


def test_every_table_has_at_least_five_undisturbed_rounds() -> None:
    parts = records.recorded()
    shown = {name for page in PAGES for _, name, *_ in tables.MARKED.findall(page.read_text())}
    weak = set()
    for name in shown & parts.keys():
        count = records.count_undisturbed_rounds(parts[name])
        if count is not None and count < measure.ENOUGH:
            weak.add(name)
    assert not weak, f"measure again: {sorted(weak)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_table_without_a_caption_is_recorded(page: Path) -> None:
    assert "Not recorded yet" not in page.read_text()


def make_part(*rows: Row) -> dict[str, Any]:
    """Return the recorded part of a benchmark with these rows."""
    table = {"columns": ["measured", "value"], "rows": [row.json() for row in rows]}
    about = {"date": "2026-01-01", "machine": {"cpu": "cpu", "cores": 2}, "versions": {"torch": "2.15"}}
    return about | {"table": table, "rounds": 3, "command": "make bench NAME=x/y"}


def test_a_changed_number_is_noticed() -> None:
    text = "<!-- value x/y | a / b | value -->9<!-- end -->\n<!-- measured x/y -->\n<!-- end -->"
    part = make_part(at_least("a / b", Number(1.5, 1, 2), 1.3))
    filled = tables.fill_page(text, {"x/y": part}, PAGE)
    assert "-->1.5<!-- end -->" in filled
    assert "| a / b | 1.5 [1..2] | >= 1.3, met |" in filled
    assert tables.fill_page(filled, {"x/y": part}, PAGE) == filled != text
    with pytest.raises(ValueError, match="no row 'a / b'"):
        tables.fill_page(text, {"x/y": make_part()}, PAGE)


def test_a_long_table_shows_twelve_rows_with_goals_first_and_folds_the_others() -> None:
    rows = [Row(f"row {number}", ["1"]) for number in range(13)] + [at_least("with goal", Number(3, 3, 3), 2)]
    part = make_part(*rows)

    shown, folded = tables.format_measured({"x/y": part}, "x/y", METHOD).split("\n\n<details>")
    shown_names = re.findall(r"^\| (\w+ \w+) \|", shown, re.MULTILINE)
    assert shown_names == ["with goal", *(f"row {number}" for number in range(11))]
    heading = "| measured | value | goal |\n| --- | --- | --- |"
    assert folded.startswith(f"<summary>2 more rows</summary>\n\n{heading}\n| row 11 ")
    assert f"| row 12 | 1 |  |\n\n</details>\n\n[Measured]({METHOD}) on 2026-01-01 with `make bench NAME=x/y`" in folded

    value = "<!-- value x/y | row 12 | value --><!-- end -->"
    assert tables.fill_page(value, {"x/y": part}, PAGE) == "<!-- value x/y | row 12 | value -->1<!-- end -->"


def test_a_table_with_a_caption_is_hidden_until_it_is_recorded() -> None:
    head = "<!-- measured x/y | Steps of two ranks -->"
    assert tables.fill_page(f"{head}<!-- end -->", {}, PAGE) == f"{head}\n\n<!-- end -->"
    part = make_part(Row("a", ["1"]))
    shown = tables.fill_page(f"{head}<!-- end -->", {"x/y": part}, PAGE)
    assert shown.startswith(f"{head}\n\nSteps of two ranks:\n\n| measured | value |\n")


def test_the_line_below_a_table_names_its_conditions() -> None:
    facts = {"threads": "1 in each of 2 processes", "batch": 16, "cable": "200mbit", "other programs": "not known"}
    machine = {"cpu": "cpu", "cores": 2, "memory_gb": 25}
    versions = {"python": "3.11.7", "numpy": "2.4.6", "torch": "2.15.0"}
    about = {"date": "2026-01-01", "machine": machine, "versions": versions}
    table = {"columns": ["side", "ms a step"], "rows": [Row("DDP", [Number(1, 1, 1)]).json()]}
    part = about | {"table": table, "rounds": 5, "command": "make bench NAME=x/y", "facts": facts}
    line = (
        f"[Measured]({METHOD}) on 2026-01-01 with `make bench NAME=x/y`: medians [lowest..highest] of 5 rounds; "
        "2 processes with 1 thread each; batch size 16; links limited to 200 Mbit/s; "
        "load from other programs not recorded; cpu, 2 cores, 25 GB of memory; Python 3.11.7, PyTorch 2.15.0."
    )
    assert tables.format_measured({"x/y": part}, "x/y", METHOD).endswith(f"| DDP | 1 |\n\n{line}")

    newer = part | {"facts": ["1 thread", "batch size 32"], "rounds": 1, "undisturbed": 0, "others": 0.5}
    shown = tables.format_measured({"x/y": newer}, "x/y", METHOD)
    assert "| side | ms per step |" in shown
    assert "`make bench NAME=x/y`: 1 round; 1 thread; batch size 32; cpu" in shown
    assert shown.endswith("disturbed, because other programs used up to 50 % of the CPU time.")


def test_a_table_of_twelve_rows_is_shown_in_its_order() -> None:
    rows = [["dense", ""], *([f"row {number}", ">= 1, met"] for number in range(11))]
    table = tables.fold_table(["measured", "goal"], rows)
    assert table.splitlines()[2] == "| dense |  |"
    assert "<details>" not in table


VERDICTS = [
    (at_least, 1.30, "met"),
    (at_least, 1.29, "missed"),
    (at_most, 1.30, "met"),
    (at_most, 1.31, "missed"),
]


@pytest.mark.parametrize("goal, value, verdict", VERDICTS)
def test_goals(goal: Callable[..., Row], value: float, verdict: str) -> None:
    assert records.verdict(goal("", Number(value, 1, 2), 1.3).json()) == verdict


def test_an_interrupted_benchmark_keeps_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(tmp_path)

    def keep(samples: Samples) -> None:
        ratio = samples.ratio("slow", "fast")
        record.put("topic/part", {"facts": {}}, samples, Table(("", ""), [Row("r", [ratio])]))

    def stopped(number: int) -> dict[str, float]:
        if number == 2:
            raise KeyboardInterrupt
        return {"seconds": 4.0 + number}

    sides = [Task("fast", lambda number: {"seconds": 2.0}), Task("slow", stopped)]
    with pytest.raises(KeyboardInterrupt):
        interleave(sides, Pace(5, 0, 60), keep)
    part = json.loads(Record(tmp_path).path.read_text())["parts"]["topic/part"]
    assert part["rounds"] == 2
    assert part["samples"]["slow"]["seconds"] == [4.0, 5.0]
    assert part["table"]["rows"][0]["cells"] == [{"value": 2.25, "low": 2.0, "high": 2.5}]


def write_record(file: Path, numbers: dict[str, int]) -> None:
    """Write a record of the day that the name of the file begins with. Each part contains a number."""
    parts = {name: {"number": number, "commit": "abc"} for name, number in numbers.items()}
    record = {"format": 1, "date": file.name[:10], "parts": parts}
    file.write_text(json.dumps(record))


def read_numbers(file: Path) -> dict[str, int]:
    """Return the numbers that `write_record` has written."""
    return {name: part["number"] for name, part in json.loads(file.read_text())["parts"].items()}


def test_publishing_adds_parts_to_those_of_the_same_day(tmp_path: Path) -> None:
    results = tmp_path / "2026-01-01-cpu.json"
    folder = tmp_path / "recorded"
    folder.mkdir()
    other, older = (folder / f"2026-01-0{day}-other.json" for day in (1, 0))
    for file in (other, older):
        write_record(file, {"a/c": 0, "a/e": 0})
    write_record(results, {"a/b": 1, "a/c": 2})
    tables.publish(results, [], folder)
    write_record(results, {"a/c": 3, "a/d": 4})
    tables.publish(results, ["a/c"], folder)
    assert read_numbers(folder / results.name) == {"a/b": 1, "a/c": 3}
    assert read_numbers(other) == {"a/e": 0}, "replaced by the newer one of the day"
    assert read_numbers(older) == {"a/c": 0, "a/e": 0}


@pytest.mark.parametrize("others, is_published", [([0.0] * 5, True), ([0.0] * 4, False), ([0.0] * 4 + [0.5], False)])
def test_a_table_with_few_undisturbed_rounds_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: list[float], is_published: bool
) -> None:
    outputs = {"rev-parse": "abc"}
    monkeypatch.setattr(provenance, "run_git", lambda *words: outputs.get(words[0], ""))
    samples = Samples({"side": {"seconds": [1.0] * len(others), "others": others}})
    record = Record(tmp_path)
    record.put("topic/part", {"command": "make bench"}, samples, Table(("", ""), []))
    folder = tmp_path / "recorded"
    folder.mkdir()
    if is_published:
        tables.publish(record.path, [], folder)
    else:
        with pytest.raises(UserError, match="topic/part has 4 undisturbed rounds, but a published table needs 5"):
            tables.publish(record.path, [], folder)
    assert bool(list(folder.iterdir())) == is_published


@pytest.mark.parametrize("outputs", [{"rev-parse": "abc", "status": " M file"}, {"rev-parse": None, "status": None}])
def test_measurements_of_unknown_code_are_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: dict[str, str | None]
) -> None:
    monkeypatch.setattr(provenance, "run_git", lambda *words: outputs[words[0]])
    samples = Samples({"side": {"seconds": [1.0] * 5, "others": [0.0] * 5}})
    record = Record(tmp_path)
    record.put("topic/part", {"command": "make bench"}, samples, Table(("", ""), []))
    with pytest.raises(UserError, match="commit all changes, and repeat `make bench`"):
        tables.publish(record.path, [], tmp_path)
    monkeypatch.setattr(provenance, "run_git", lambda *words: {"rev-parse": "abc"}.get(words[0], ""))
    assert Record(tmp_path).find_part("topic/part") == {}, "rounds of uncommitted code must not be continued"


def test_a_failing_part_and_an_interrupt_leave_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(number: int) -> dict[str, float]:
        raise RuntimeError("no such run")

    def interrupted(number: int) -> dict[str, float]:
        if number:
            raise KeyboardInterrupt
        return {"seconds": 1.5}

    def part(name: str, run: Callable[[int], dict[str, float]]) -> Part:
        return Part(name, "", lambda scratch: [Task("side", run)], lambda samples: Table(("", "s"), [row(samples)]))

    def row(samples: Samples) -> Row:
        return at_most("side", samples.number("side"), 1)

    parts = [part("x/failing", failing), part("x/interrupted", interrupted), part("x/never", failing)]
    monkeypatch.setattr(bench, "all_parts", lambda: parts)
    assert bench.main(["x"], 1, 0, tmp_path) == 130
    output = capsys.readouterr().out
    assert "x/interrupted  side      1.5    <= 1, missed" in output
    assert "x/failing: failed: no such run" in output
    (file,) = tmp_path.iterdir()
    assert list(json.loads(file.read_text())["parts"]) == ["x/interrupted"]


def test_no_round_begins_that_would_end_after_the_budget() -> None:
    pace = Pace(rounds=10, drop=1, seconds=60)
    samples = Samples()
    pace.last = 50
    assert pace.allows(0, samples)
    assert pace.allows(1, samples)
    assert pace.allows(2, samples)
    pace.last = 61
    assert pace.allows(1, samples)
    assert not pace.allows(2, samples)


def test_a_further_round_replaces_a_disturbed_one(capsys: pytest.CaptureFixture[str]) -> None:
    loads = [0.0, 2 * measure.NOISY, 0.0, 0.0]
    sides = [Task("side", lambda number: {"seconds": 1.0, "others": loads[number - 1]})]
    samples = interleave(sides, Pace(3, 1, 60, replaces_disturbed=True), lambda _: None)
    assert samples.values["side"]["others"] == loads
    assert "round 4 replaces a disturbed one: " in capsys.readouterr().out
    assert interleave(sides, Pace(3, 1, 60), lambda _: None).rounds == 3


def test_a_round_on_a_slower_machine_is_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is not slow if no table shows its times."""
    seconds = [0.11, 0.1, 0.12]
    calibration = iter(seconds)
    monkeypatch.setattr(measure, "time_calibration", lambda: next(calibration))
    side = Task("side", lambda number: {"seconds": 1.0, "others": 0.0})
    samples = interleave([side], Pace(3, 0, 60), lambda _: None)
    assert samples.calibration == seconds
    assert samples.clean() == [0, 1]

    record = Record(tmp_path)
    record.put("x/y", {"command": "make bench"}, samples, Table(("", ""), []))
    assert record.find_samples("x/y").clean() == [0, 1]
    part = record.content["parts"]["x/y"]
    reason = "1 of 3 rounds was disturbed, because {}the machine was slower, but was included"
    assert records.describe_disturbance(part) == reason.format("")
    load = "other programs used up to 50 % of the CPU time or "
    assert records.describe_disturbance(part | {"others": 0.5}) == reason.format(load)

    untimed = interleave([ignore_other_programs(side)], Pace(3, 0, 60), lambda _: None)
    assert untimed.calibration == []
    assert untimed.clean() == [0, 1, 2]


def test_a_repeated_command_adds_the_missing_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second call continues. The third one finds a complete part. Later calls cannot continue."""
    numbers: list[int] = []
    outputs = {"rev-parse": "abc"}

    def run(number: int) -> dict[str, float]:
        numbers.append(number)
        if numbers == [0, 1, 2]:
            raise KeyboardInterrupt
        return {"seconds": 1.0, "others": 0.0}

    part = Part("x/y", "", lambda scratch: [Task("side", run)], lambda samples: Table(("", "s"), []), rounds=4)
    monkeypatch.setattr(bench, "all_parts", lambda: [part])
    monkeypatch.setattr(provenance, "run_git", lambda *words: outputs.get(words[0], ""))

    assert bench.main([], 1, 0, tmp_path) == 130
    assert "1 part incomplete (about 1 minute left); to continue, repeat the command" in capsys.readouterr().out
    assert bench.main([], 1, 0, tmp_path) == 0
    assert numbers == [0, 1, 2, 2, 3]
    assert "incomplete" not in capsys.readouterr().out
    bench.main([], 1, 0, tmp_path)
    assert numbers[5:] == [0, 1, 2, 3]

    outputs["rev-parse"] = "def"
    bench.main([], 1, 6, tmp_path)
    assert numbers[9:] == [0, 1, 2, 3, 4, 5]
    outputs["status"] = " M file"
    bench.main([], 1, 7, tmp_path)
    assert numbers[15:] == [0, 1, 2, 3, 4, 5, 6]
    assert "incomplete" not in capsys.readouterr().out
    assert bench.main([], 1e-9, 8, tmp_path) == 0
    assert "the command continues only at a commit without uncommitted changes" in capsys.readouterr().out


def test_disturbed_rounds_are_left_out_where_enough_others_are_left() -> None:
    disturbance = measure.NOISY * 2
    samples = Samples({"a": {"seconds": [1, 1, 9, 1, 1, 1], "others": [0, 0, disturbance, 0, 0, 0]}})
    assert samples.number("a") == Number(1, 1, 1)
    samples.values["a"]["others"][0] = 1
    assert samples.number("a").high == 9


def test_figures_are_small_and_shown() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for figure in figures.FOLDER.iterdir():
        assert figure.stat().st_size < 60_000, figure
        assert f"figures/{figure.name})" in text, figure


def test_an_unknown_benchmark_is_refused() -> None:
    with pytest.raises(UserError, match="NAME=nonsense: no such benchmark; there are amp_accum, "):
        bench.choose_parts(["nonsense"])
    with pytest.raises(UserError, match=r"NAME=growth/run: no such benchmark; did you mean growth/runs\?"):
        bench.choose_parts(["growth/run"])


def test_only_the_source_code_of_a_measured_run_is_kept(tmp_path: Path) -> None:
    for name in ("code/common/a.py", "attempts/0001/metrics.jsonl", "result.json"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    discard_run(RunFolder(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["code"]
    assert (tmp_path / "code/common/a.py").exists()
