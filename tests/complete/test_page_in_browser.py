"""The page of `make compare` in a real browser: from disk, without a network, at all widths, with all controls."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.runs.compare import compare_page, metric_curves
from common.runs.compare.compare_page import ComparedRun, TableCell
from common.runs.compare.metric_curves import Curve, RunCurves
from tests.harness.commands import in_process_calls
from tests.harness.pages.browser import open_browser, read_requested_urls, set_color_scheme, set_page_width
from tests.harness.runs.synthetic_runs import write_example_runs

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
OVERLAPS = """
const boxes = (what, of) => [...of.querySelectorAll(what)].map(e => [e, e.getBoundingClientRect()])
  .filter(([, b]) => b.width);
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
const found = [], among = list => list.forEach(([e, a], i) => list.slice(i + 1).forEach(([f, b]) => {
  if (meet(a, b)) found.push(`${e.textContent} / ${f.textContent}`); }));
document.querySelectorAll('.chart').forEach(chart => among(boxes('text', chart)));
among(boxes('figure, #legend, #controls, header, section', document));
among(boxes('.experiment .run > span', document));
const parts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT, node =>
  node.parentNode.className === 'name' ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_SKIP);
for (const range = new Range(); parts.nextNode();) {
  range.selectNodeContents(parts.currentNode);
  if (range.getClientRects().length > 1) found.push(`${parts.currentNode.data} is broken`);
}
return found;"""
LINES = "return [...document.querySelectorAll('.chart')].map(c => c.querySelectorAll('.line').length)"


STATES = ("finished", "finished", "failed", "running")


def make_curves(source: np.random.Generator, steps: int) -> tuple[RunCurves, float]:
    """Return random curves of a run, and its last accuracy."""
    step = np.arange(1.0, steps + 1)
    loss = 2 * np.exp(-3 * step / steps) + source.normal(0, 0.05, steps)
    seconds = np.cumsum(source.gamma(4, 0.0025, steps))
    table = np.column_stack([step, 64 * step, seconds, loss, np.zeros(steps)])
    points = np.column_stack([step, 64 * step, seconds])[:: max(1, steps // 5)]
    accuracy = 1 - np.exp(-points[:, 0] / steps)
    first = accuracy[:1]
    metrics = {
        "test_accuracy": Curve(points, accuracy, accuracy, accuracy),
        "once": Curve(points[:1], first, first, first),
    }
    loss_curve = metric_curves.compute_loss_curve(table)
    speed_curve = metric_curves.compute_speed_curve(table)
    return RunCurves(loss_curve, speed_curve, metrics), accuracy[-1]


def make_run(source: np.random.Generator, number: int, steps: int) -> ComparedRun:
    """Return a random run of one of six experiments."""
    curves, accuracy = make_curves(source, steps)
    columns = {
        "accuracy": TableCell(f"{accuracy:.2%}", accuracy),
        "samples/s": TableCell(f"{number}", number),
        "waiting": TableCell("15%", 0.15) if number % 2 else TableCell("-"),
    }
    depth = f"{number % 7}"
    rate = f"{0.1 / (number + 1):.4f}"
    name = f"experiment_{number % 6}"
    label = f"{number:04x} depth={depth} lr={rate}"
    if number == 1:
        label += " gradient_as_bucket_view=true"
    state = STATES[number % len(STATES)]
    return ComparedRun(
        f"{name}-{number:04x}",
        name,
        label,
        state,
        curves,
        columns,
        {"model.depth": depth, "optim.lr": rate, "batch": "64"},
        detail="the loss is nan in step 12" if state == "failed" else "",
        links={"folder": f"{number}", "settings": f"{number}", "log 0": f"{number}"},
    )


def make_runs(count: int, steps: int) -> list[ComparedRun]:
    """Return random runs; up to twenty runs differ in length by a factor of up to a thousand."""
    source = np.random.default_rng(0)
    runs = []
    for number in range(count):
        length = steps if count > 20 else max(10, steps // 10 ** (number % 4))
        runs.append(make_run(source, number, length))
    return runs


def check_browser_log(chrome: Any) -> None:
    """Check that the browser reports no error."""
    log = chrome.get_log("browser")
    assert not log, log


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with open_browser() as started:
        yield started


def test_the_page_works_from_disk_without_a_network(tmp_path: Path, chrome: Any) -> None:
    runs = write_example_runs(tmp_path / "runs")
    config = next(runs.glob("*-0002")) / "config.yaml"
    config.write_text(config.read_text().replace("strategy: ddp", f"strategy: {json.dumps(HOSTILE)}"))
    metrics = next(runs.glob("*-0002")) / "attempts" / "0001" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"test_loss"', f'{json.dumps(HOSTILE)}: 2, "test_loss"'))
    in_process_calls.call_verb("compare", f"--runs-folder={runs}")
    page = runs / "compare.html"
    set_page_width(chrome, 1300)
    chrome.get(page.as_uri())
    check_browser_log(chrome)
    assert chrome.title == "6 runs compared"
    requested = [url for url in read_requested_urls(chrome) if not url.startswith(("data:", "blob:"))]
    assert requested == [page.as_uri()]
    titles = chrome.execute_script("return [...document.querySelectorAll('figure h3')].map(t => t.textContent)")
    assert titles == ["training loss", "test accuracy", "test loss", HOSTILE, "samples/s"]
    assert chrome.execute_script(LINES) == [5, 5, 5, 1, 5]  # all but the run that never started
    links = re.findall(r'<a href="([^"]+)">', page.read_text())
    assert len(links) > 20
    assert "attempts/0003/logs/rank-1.log" in " ".join(links)
    for link in links:
        assert (page.parent / link).exists(), link


def test_nothing_overlaps_at_any_width_and_all_controls_work(tmp_path: Path, chrome: Any) -> None:
    page = tmp_path / "page.html"
    page.write_text(compare_page.render_page(make_runs(14, 20_000), ["model.depth", "optim.lr"], []))
    for width in (360, 700, 1300, 2560):
        set_page_width(chrome, width)
        chrome.get(page.as_uri())
        for scheme in ("light", "dark"):
            set_color_scheme(chrome, scheme)
            widths = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            scroll_width, client_width = chrome.execute_script(widths)
            assert scroll_width <= client_width <= width, (width, scheme)
            overlaps = chrome.execute_script(OVERLAPS)
            assert not overlaps, (width, scheme, overlaps)
            background = chrome.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(255, 255, 255)") == (scheme == "light")
        legend_top = "document.querySelector('#legend').getBoundingClientRect().top"
        charts_bottom = "document.querySelector('#charts').getBoundingClientRect().bottom"
        legend_is_below = chrome.execute_script(f"return {legend_top} >= {charts_bottom}")
        assert legend_is_below == (width < 900)
        chrome.execute_script("document.querySelector('[name=x][value=log]').click()")
        overlaps = chrome.execute_script(OVERLAPS)
        assert not overlaps, (width, "log", overlaps)
    check_browser_log(chrome)
    check_axes(chrome)
    check_legend(chrome)
    check_table(chrome)


def read_axes(chrome: Any, title: str) -> list[str]:
    """Return the texts at the axes of a chart."""
    figure = f"[...document.querySelectorAll('figure')].find(f => f.textContent.includes('{title}'))"
    return list(chrome.execute_script(f"return [...{figure}.querySelectorAll('text')].map(t => t.textContent)"))


def check_axes(chrome: Any) -> None:
    """Check that the chosen axes are shown, accuracy stays within 0 to 100 %, and only noisy curves are smoothed."""
    choose = "document.querySelector('[name=along][value=\"%s\"]').click()"
    chrome.execute_script("document.querySelector('[name=x][value=\"\"]').click()")
    for value, name, last in (("1", "samples", "1M"), ("2", "seconds", "200"), ("3", "part of the run", "100%")):
        chrome.execute_script(choose % value)
        assert {name, last} <= set(read_axes(chrome, "training loss"))
    shares = [float(text[:-1]) for text in read_axes(chrome, "test accuracy") if text.endswith("%")]
    assert len(shares) > 6
    assert min(shares) >= 0
    assert max(shares) == 100
    chrome.execute_script("document.querySelector('[name=y][value=log]').click()")
    assert {"0.1", "1"} <= set(read_axes(chrome, "training loss"))
    assert "0.0" not in read_axes(chrome, "training loss")
    assert "100%" in read_axes(chrome, "test accuracy")
    titles = chrome.execute_script("return [...document.querySelectorAll('h3')].map(t => t.textContent)")
    assert titles == ["training loss", "test accuracy", "samples/s"]  # a metric with one point per run has no chart
    lines = "return [...document.querySelectorAll('.chart')].map(c => c.querySelector('.line').getAttribute('d'))"
    before = chrome.execute_script(lines)
    chrome.execute_script("smooth.value = 0.95; smooth.dispatchEvent(new Event('input'))")
    after = chrome.execute_script(lines)
    unchanged = [a == b for a, b in zip(before, after, strict=True)]
    assert unchanged == [False, True, False]
    assert read_heights(after[2]).std() < 0.7 * read_heights(before[2]).std()


def read_heights(path: str) -> np.ndarray:
    """Return the y coordinates of an SVG path, without the first 50 points."""
    return np.array(re.findall(r" ([\d.]+)", path)[50:], float)


def check_legend(chrome: Any) -> None:
    """Check that a click hides a run or an experiment, a double click the others, and the pointer describes a point."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    assert chrome.execute_script(LINES) == [14, 14, 14]
    switches = chrome.find_elements(By.CSS_SELECTOR, "#legend .experiment:first-child input")
    for switch, line_count in ((switches[1], 13), (switches[0], 11), (switches[0], 14)):
        switch.click()
        assert chrome.execute_script(LINES) == [line_count] * 3
    visible_runs = "return [...new Set([...document.querySelectorAll('.curve')].map(g => g.dataset.curve))]"
    all_runs = [str(number) for number in range(14)]
    for number, expected in ((4, ["4"]), (9, ["9"]), (9, all_runs)):
        name = chrome.find_element(By.CSS_SELECTOR, f"#legend [data-run='{number}'] .name")
        ActionChains(chrome, duration=0).double_click(name).perform()
        assert chrome.execute_script(visible_runs) == expected, number
    assert chrome.execute_script("return getSelection().toString()") == ""
    chart = chrome.find_elements(By.CSS_SELECTOR, ".chart")[0]
    ActionChains(chrome, duration=0).move_to_element(chart).perform()
    tooltip = chrome.find_element(By.ID, "tip").text
    assert re.fullmatch(r"experiment_\d \w{4} .*\ntraining loss [\d.]+\n(.* to .*\n)?step .* samples, .* s", tooltip)
    assert len(chrome.find_elements(By.CSS_SELECTOR, "tr.hot, #legend .hot")) == 2
    full_axes = read_axes(chrome, "training loss")
    ActionChains(chrome, duration=0).drag_and_drop_by_offset(chart, 60, 0).perform()
    assert read_axes(chrome, "training loss") != full_axes
    chrome.find_element(By.ID, "whole").click()
    assert read_axes(chrome, "training loss") == full_axes


def read_column(chrome: Any, name: str) -> list[list[str]]:
    """Return the texts of a column of the table, by experiment."""
    index = f"[...document.querySelectorAll('#results thead th')].findIndex(h => h.textContent === '{name}')"
    rows = f"[...b.querySelectorAll('.run:not([hidden])')].map(r => r.cells[{index}].textContent)"
    return list(chrome.execute_script(f"return [...results.tBodies].map(b => {rows})"))


def sort_by(chrome: Any, name: str) -> None:
    """Click on the head of a column."""
    button = f"[...document.querySelectorAll('thead button')].find(b => b.textContent === '{name}')"
    chrome.execute_script(f"{button}.click()")


def check_table(chrome: Any) -> None:
    """Check that a click on a head sorts each experiment, and that the filter hides the other runs everywhere."""
    from selenium.webdriver.common.by import By

    for reverse in (False, True):
        sort_by(chrome, "samples/s")
        column = read_column(chrome, "samples/s")
        assert [len(speeds) for speeds in column] == [3, 3, 2, 2, 2, 2]
        assert column == [sorted(speeds, key=int, reverse=reverse) for speeds in column]
    sort_by(chrome, "waiting")
    assert read_column(chrome, "waiting")[1] == ["15%"] * 3
    chrome.find_element(By.ID, "filter").send_keys("DEPTH=3 failed")
    matching = ["000a depth=3 lr=0.0091 failed"]
    assert read_column(chrome, "run") == [[], [], [], [], matching, []]
    assert chrome.execute_script(LINES) == [1, 1, 1]
    legend = chrome.find_elements(By.CSS_SELECTOR, "#legend .run")
    assert [run.text for run in legend if run.is_displayed()] == matching
    assert chrome.find_element(By.ID, "count").text == "1 of 14 runs"


def test_fifty_long_runs_are_loaded(tmp_path: Path, chrome: Any) -> None:
    page = tmp_path / "page.html"
    page.write_text(compare_page.render_page(make_runs(50, 10_000), ["optim.lr"], []))
    set_page_width(chrome, 1300)
    chrome.get("about:blank")
    start = time.perf_counter()
    chrome.get(page.as_uri())
    line_count = chrome.execute_script("return document.querySelectorAll('.chart .line').length")
    seconds = time.perf_counter() - start
    print(f"50 runs of 10,000 steps: {page.stat().st_size / 1e6:.1f} MB, drawn in {seconds:.2f} s")
    assert line_count == 150
    assert page.stat().st_size < 4e6
    check_colours(chrome)


def check_colours(chrome: Any) -> None:
    """Check that the colours of 50 runs differ, and those of neighbours in the legend even more."""
    lines = "[...document.querySelectorAll('.experiment .line')]"
    strokes = chrome.execute_script(f"return {lines}.map(l => getComputedStyle(l).stroke)")
    assert len(strokes) == 50
    coordinates = [re.findall(r"-?[\d.]+", stroke)[:3] for stroke in strokes]  # in oklab
    colours = np.array(coordinates, float)
    for i in range(50):
        for j in range(i):
            distance = np.linalg.norm(colours[i] - colours[j])
            minimum = 0.07 if i - j <= 6 else 0.01
            assert distance > minimum, (i, j, distance)
