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
import torch

from common.measure import media
from common.runs.compare import compare_page, metric_curves
from common.runs.compare.compare_page import ComparedRun, TableCell
from common.runs.compare.metric_curves import Curve, RunCurves
from tests.harness.commands import in_process_calls
from tests.harness.commands.processes import wait_until
from tests.harness.pages.browser import open_browser, read_requested_urls, set_color_scheme, set_page_width
from tests.harness.runs.synthetic_runs import SyntheticRun, write_example_runs

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
OVERLAPS = """
const boxes = (what, of) => [...of.querySelectorAll(what)].map(e => [e, e.getBoundingClientRect()])
  .filter(([, b]) => b.width);
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
const found = [], among = list => list.forEach(([e, a], i) => list.slice(i + 1).forEach(([f, b]) => {
  if (meet(a, b)) found.push(`${e.textContent} / ${f.textContent}`); }));
document.querySelectorAll('.chart').forEach(chart => among(boxes('text', chart)));
among(boxes('figure, #legend, #controls, header, body > section', document));
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
END_SYMBOLS = {"finished": "", "failed": "cross", "running": "circle"}


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
        "test_accuracy": Curve(points, accuracy, accuracy, accuracy, accuracy[-1]),
        "once": Curve(points[:1], first, first, first, first[-1]),
    }
    step_curves = metric_curves.compute_speed_curves(table[:, [0, 1, 2, 4]])
    step_curves["loss"] = metric_curves.average_row_groups(table[:, :3], loss, np.ones(steps))
    return RunCurves(step_curves, metrics), accuracy[-1]


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
        f"{number:04x}",
        label,
        state,
        curves,
        columns,
        {"model.depth": depth, "optim.lr": rate, "batch": "64"},
        detail="the loss is nan in step 12" if state == "failed" else "",
        links={"folder": f"{number}", "settings": f"{number}", "log 0": f"{number}"},
        end_symbol=END_SYMBOLS[state],
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


def open_page(chrome: Any, page: Path) -> None:
    """Open the page, and wait until its charts are drawn. The browser draws them after the page is loaded."""
    chrome.get(page.as_uri())
    wait_for_charts(chrome)


def wait_for_charts(chrome: Any) -> None:
    wait_until(lambda: chrome.execute_script("return document.querySelector('.chart .line') !== null"), "the charts")


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
    open_page(chrome, page)
    check_browser_log(chrome)
    assert chrome.title == "6 runs compared"
    requested = [url for url in read_requested_urls(chrome) if not url.startswith(("data:", "blob:"))]
    assert requested == [page.as_uri()]
    titles = chrome.execute_script("return [...document.querySelectorAll('figure h3')].map(t => t.textContent)")
    last_part = HOSTILE.rpartition("/")[2]
    assert titles == ["training loss", "test accuracy (%)", "test loss", last_part, "samples/s", "step time (ms)"]
    headings = chrome.execute_script("return [...document.querySelectorAll('h2')].map(t => t.textContent)")
    assert headings == ["training", "evaluation", HOSTILE.rpartition("/")[0], "speed"]
    assert chrome.execute_script(LINES) == [5, 5, 5, 1, 5, 5]  # all but the run that never started
    links = re.findall(r'<a href="([^"]+)">', page.read_text())
    assert len(links) > 20
    assert "attempts/0003/logs/rank-1.log" in " ".join(links)
    for link in links:
        assert (page.parent / link).exists(), link


def test_nothing_overlaps_at_any_width_and_all_controls_work(tmp_path: Path, chrome: Any) -> None:
    page = tmp_path / "page.html"
    page.write_text(compare_page.render_page(make_runs(14, 20_000), ["model.depth", "optim.lr"], [], []))
    for width in (360, 700, 1300, 2560):
        set_page_width(chrome, width)
        open_page(chrome, page)
        for scheme in ("light", "dark"):
            set_color_scheme(chrome, scheme)
            widths = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            scroll_width, client_width = chrome.execute_script(widths)
            assert scroll_width <= client_width <= width, (width, scheme)
            overlaps = chrome.execute_script(OVERLAPS)
            assert not overlaps, (width, scheme, overlaps)
            background = chrome.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(255, 255, 255)") == (scheme == "light")
        check_legend_position(chrome, is_above=width < 900)
        check_columns(chrome, fit=width >= 700)
        chrome.execute_script("document.querySelector('[name=x][value=log]').click()")
        overlaps = chrome.execute_script(OVERLAPS)
        assert not overlaps, (width, "log", overlaps)
    check_browser_log(chrome)
    check_axes(chrome)
    check_legend(chrome)
    check_table(chrome)


def check_legend_position(chrome: Any, is_above: bool) -> None:
    """Check that the legend is above or beside the charts, and remains visible next to the last chart."""
    rectangles = "const [legend, charts] = [...document.querySelectorAll('#legend, #charts')]"
    rectangles += ".map(element => element.getBoundingClientRect());"
    assert chrome.execute_script(f"{rectangles} return legend.bottom <= charts.top") == is_above
    chrome.execute_script("[...document.querySelectorAll('.chart')].at(-1).scrollIntoView({block: 'end'})")
    top, bottom, height = chrome.execute_script(f"{rectangles} return [legend.top, legend.bottom, innerHeight]")
    assert 0 <= top < bottom <= height
    assert bottom < height / 2 or not is_above
    chrome.execute_script("scrollTo(0, 0)")


def check_columns(chrome: Any, fit: bool) -> None:
    """Check that no column of the table is cut, and that a button shows the columns that do not fit."""
    overflow = "return results.offsetWidth - results.parentNode.clientWidth"
    heads = "return [...document.querySelectorAll('#results thead th')].filter(h => !h.hidden).map(h => h.textContent)"
    columns = ["run", "state", "model.depth", "learning rate", "accuracy", "samples/s", "waiting", "files"]
    assert chrome.execute_script(overflow) <= 0
    shown = chrome.execute_script(heads)
    assert (shown == columns) == fit
    assert shown == [*columns[: len(shown) - 1], "files"]
    assert chrome.execute_script("return document.querySelector('#columns').hidden") == fit
    if not fit:
        for expected in (columns, shown):
            chrome.execute_script("document.querySelector('#columns').click()")
            assert chrome.execute_script(heads) == expected


def read_axes(chrome: Any, title: str) -> list[str]:
    """Return the texts at the axes of a chart."""
    figure = f"[...document.querySelectorAll('figure')].find(f => f.textContent.includes('{title}'))"
    return list(chrome.execute_script(f"return [...{figure}.querySelectorAll('text')].map(t => t.textContent)"))


def check_axes(chrome: Any) -> None:
    """Check that the chosen axes are shown, accuracy stays within 0 to 100 %, and only noisy curves are smoothed."""
    choose = "document.querySelector('[name=along][value=\"%s\"]').click()"
    chrome.execute_script("document.querySelector('[name=x][value=\"\"]').click()")
    assert "part of the run" in read_axes(chrome, "training loss"), "the runs have different numbers of steps"
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
    # A metric with one point per run has no chart.
    assert titles == ["training loss", "test accuracy (%)", "samples/s", "step time (ms)"]
    lines = "return [...document.querySelectorAll('.chart')].map(c => c.querySelector('.line').getAttribute('d'))"
    before = chrome.execute_script(lines)
    chrome.execute_script("smooth.value = 0.95; smooth.dispatchEvent(new Event('input'))")
    after = chrome.execute_script(lines)
    unchanged = [a == b for a, b in zip(before, after, strict=True)]
    assert unchanged == [False, True, False, False]
    assert read_heights(after[2]).std() < 0.7 * read_heights(before[2]).std()


def read_heights(path: str) -> np.ndarray:
    """Return the y coordinates of an SVG path, without the first 50 points."""
    return np.array(re.findall(r" ([\d.]+)", path)[50:], float)


def check_legend(chrome: Any) -> None:
    """Check that a click hides a run or an experiment, a double click the others, and the pointer describes a point."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    assert chrome.execute_script(LINES) == [14] * 4
    switches = chrome.find_elements(By.CSS_SELECTOR, "#legend .experiment:first-child input")
    for switch, line_count in ((switches[1], 13), (switches[0], 11), (switches[0], 14)):
        switch.click()
        assert chrome.execute_script(LINES) == [line_count] * 4
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


def find_head(name: str) -> str:
    """Return the JavaScript expression of the button in the head of a column."""
    return f"[...document.querySelectorAll('thead button')].find(b => b.textContent === '{name}')"


def check_table(chrome: Any) -> None:
    """Check that a click on a head sorts each experiment, and that the filter hides the other runs everywhere."""
    from selenium.webdriver.common.by import By

    for reverse in (False, True):
        chrome.execute_script(f"{find_head('samples/s')}.click()")
        column = read_column(chrome, "samples/s")
        assert [len(speeds) for speeds in column] == [3, 3, 2, 2, 2, 2]
        assert column == [sorted(speeds, key=int, reverse=reverse) for speeds in column]
    chrome.execute_script(f"{find_head('waiting')}.click()")
    assert read_column(chrome, "waiting")[1] == ["15%"] * 3
    chrome.find_element(By.ID, "filter").send_keys("DEPTH=3 failed")
    matching = ["000a depth=3 lr=0.0091 failed"]
    assert [column for column in read_column(chrome, "run") if column] == [[" 000a"]]
    assert chrome.execute_script(LINES) == [1] * 4
    legend = chrome.find_elements(By.CSS_SELECTOR, "#legend .run")
    assert [run.text for run in legend if run.is_displayed()] == matching
    assert chrome.find_element(By.ID, "count").text == "1 of 14 runs"


def test_fifty_long_runs_are_loaded(tmp_path: Path, chrome: Any) -> None:
    page = tmp_path / "page.html"
    page.write_text(compare_page.render_page(make_runs(50, 10_000), ["optim.lr"], [], []))
    set_page_width(chrome, 1300)
    chrome.get("about:blank")
    start = time.perf_counter()
    open_page(chrome, page)
    line_count = chrome.execute_script("return document.querySelectorAll('.chart .line').length")
    seconds = time.perf_counter() - start
    print(f"50 runs of 10,000 steps: {page.stat().st_size / 1e6:.1f} MB, drawn in {seconds:.2f} s")
    assert line_count == 200
    assert page.stat().st_size < 4e6
    check_styles(chrome)


def check_styles(chrome: Any) -> None:
    """Check that 50 runs differ in the color, dash pattern or marker that the legend, the table and the charts show."""
    style = "e => [getComputedStyle(e.querySelector('.line')).stroke, e.querySelector('.line').getAttribute("
    style += "'stroke-dasharray'), e.querySelector('.dot')?.getAttribute('d') ?? '']"
    samples = [f"[...document.querySelectorAll('{rows}')].map({style})" for rows in ("#legend .run", "#results .run")]
    legend, table = chrome.execute_script(f"return [{samples[0]}, {samples[1]}]")
    assert legend == table
    assert len({tuple(parts) for parts in legend}) == 50
    curves = "[...document.querySelector('.chart').querySelectorAll('.curve')]"
    curves += ".sort((a, b) => a.dataset.curve - b.dataset.curve)"
    assert chrome.execute_script(f"return {curves}.map({style})") == legend


def test_images_are_shown(tmp_path: Path, chrome: Any) -> None:
    folder = SyntheticRun("mnist_pipeline", 0, 20).write(tmp_path)
    pixels = torch.linspace(0, 1, 28 * 20).view(28, 20)
    for step in (5, 10):
        media.write_image(folder.list_attempts()[0], step, "digit", pixels)
    in_process_calls.call_verb("compare", f"--runs-folder={tmp_path}")
    open_page(chrome, tmp_path / "compare.html")
    images = "[...document.images].map(image => [image.naturalWidth, image.closest('a').textContent])"
    chrome.execute_script("document.querySelector('#images').scrollIntoView()")
    wait_until(lambda: all(chrome.execute_script("return [...document.images].map(i => i.complete)")), "the images")
    assert chrome.execute_script(f"return {images}") == [[20, "step 5"], [20, "step 10"]]
    chrome.execute_script("document.querySelector('#legend .run input').click()")
    assert chrome.execute_script("return document.images[0].checkVisibility()") is False
    check_browser_log(chrome)


def test_a_followed_page_reloads_itself_and_keeps_the_choices(tmp_path: Path, chrome: Any) -> None:
    page = tmp_path / "page.html"
    runs = make_runs(4, 100)
    page.write_text(compare_page.render_page(runs[:3], ["optim.lr"], [], [], reload_seconds=2))
    set_page_width(chrome, 1300)
    open_page(chrome, page)
    # One script, so that no reload begins between two choices.
    chrome.execute_script(
        "document.querySelector('[name=along][value=\"1\"]').click();"
        "filter.value = 'lr=0.'; filter.dispatchEvent(new Event('input'));"
        "document.querySelectorAll('#legend .run input')[1].click();"
        f"{find_head('accuracy')}.click()"
    )
    new_page = tmp_path / "new.html"
    new_page.write_text(compare_page.render_page(runs, ["optim.lr"], [], []))
    new_page.replace(page)
    wait_until(lambda: chrome.title == "4 runs compared", "the new page")
    wait_for_charts(chrome)
    assert "samples" in read_axes(chrome, "training loss")
    visible_runs = "return [...document.querySelector('.chart').querySelectorAll('.curve')].map(g => +g.dataset.curve)"
    assert chrome.execute_script(visible_runs) == [0, 2, 3]
    assert chrome.find_element("id", "count").text == "4 of 4 runs"
    sorted_head = "return document.querySelector('#results [aria-sort=ascending]').textContent"
    assert chrome.execute_script(sorted_head) == "accuracy"
    check_browser_log(chrome)
