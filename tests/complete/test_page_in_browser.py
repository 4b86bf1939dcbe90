"""The page of make compare in a real browser: from disk, without a network, at all widths, and what it can do."""

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
from tests.harness import inside
from tests.harness.browser import browser, requests, set_scheme, set_width
from tests.harness.made_runs import write_six

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


def make_many(count: int, steps: int) -> list[ComparedRun]:
    """Runs of six experiments that differ in length by up to a thousand, as they are before the page is made."""
    source = np.random.default_rng(0)
    found = []
    for number in range(count):
        own = steps if count > 20 else max(10, steps // 10 ** (number % 4))
        step = np.arange(1.0, own + 1)
        loss = 2 * np.exp(-3 * step / own) + source.normal(0, 0.05, own)
        speed = np.cumsum(source.gamma(4, 0.0025, own))
        table = np.column_stack([step, 64 * step, speed, loss, np.zeros(own)])
        points = np.column_stack([step, 64 * step, speed])[:: max(1, own // 5)]
        accuracy = 1 - np.exp(-points[:, 0] / own)
        curves = RunCurves(
            metric_curves.compute_loss_curve(table),
            metric_curves.compute_speed_curve(table),
            {
                "test_accuracy": Curve(points, accuracy, accuracy, accuracy),
                "once": Curve(points[:1], *[accuracy[:1]] * 3),
            },
        )
        columns = {
            "accuracy": TableCell(f"{accuracy[-1]:.2%}", accuracy[-1]),
            "samples/s": TableCell(f"{number}", number),
        }
        columns["waiting"] = TableCell("15%", 0.15) if number % 2 else TableCell("-")
        settings = {"model.depth": f"{number % 7}", "optim.lr": f"{0.1 / (number + 1):.4f}", "batch": "64"}
        name = f"experiment_{number % 6}"
        label = f"{number:04x} depth={number % 7} lr={0.1 / (number + 1):.4f}"
        label += " gradient_as_bucket_view=true" if number == 1 else ""
        state = ["finished", "finished", "failed", "running"][number % 4]
        links = {"folder": f"{number}", "settings": f"{number}", "log 0": f"{number}"}
        more: dict[str, Any] = {"detail": "the loss is nan in step 12" if state == "failed" else "", "links": links}
        found.append(ComparedRun(f"{name}-{number:04x}", name, label, state, curves, columns, settings, **more))
    return found


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    with browser() as started:
        yield started


def test_the_page_works_from_disk_without_a_network(tmp_path: Path, chrome: Any) -> None:
    runs = write_six(tmp_path / "runs")
    config = next(runs.glob("*-0002")) / "config.yaml"
    config.write_text(config.read_text().replace("strategy: ddp", f"strategy: {json.dumps(HOSTILE)}"))
    metrics = next(runs.glob("*-0002")) / "attempts" / "0001" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"test_loss"', f'{json.dumps(HOSTILE)}: 2, "test_loss"'))
    completed = inside.run_verb("compare", f"--runs-folder={runs}")
    assert completed.returncode == 0, completed.stderr
    page = runs / "compare.html"
    set_width(chrome, 1300)
    chrome.get(page.as_uri())
    assert not (said := chrome.get_log("browser")), said
    assert chrome.title == "6 runs compared"
    assert [url for url in requests(chrome) if not url.startswith(("data:", "blob:"))] == [page.as_uri()]
    titles = chrome.execute_script("return [...document.querySelectorAll('figure h3')].map(t => t.textContent)")
    assert titles == ["training loss", "test accuracy", "test loss", HOSTILE, "samples/s"]
    assert chrome.execute_script(LINES) == [5, 5, 5, 1, 5]  # all but the run that never began
    links = re.findall(r'<a href="([^"]+)">', page.read_text())
    assert len(links) > 20
    assert "attempts/0003/logs/rank-1.log" in " ".join(links)
    assert all((page.parent / link).exists() for link in links)


def test_nothing_overlaps_at_any_width_and_all_can_be_used(tmp_path: Path, chrome: Any) -> None:
    page = tmp_path / "page.html"
    page.write_text(compare_page.render_page(make_many(14, 20_000), ["model.depth", "optim.lr"], []))
    for width in (360, 700, 1300, 2560):
        set_width(chrome, width)
        chrome.get(page.as_uri())
        for scheme in ("light", "dark"):
            set_scheme(chrome, scheme)
            across = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            scrolled, shown = chrome.execute_script(across)
            assert scrolled <= shown <= width, (width, scheme)
            assert not (found := chrome.execute_script(OVERLAPS)), (width, scheme, found)
            colours = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
            assert (chrome.execute_script(colours)[0] == "rgb(255, 255, 255)") == (scheme == "light")
        top = "document.querySelector('#legend').getBoundingClientRect().top"
        below = f"return {top} >= document.querySelector('#charts').getBoundingClientRect().bottom"
        assert chrome.execute_script(below) == (width < 900)
        chrome.execute_script("document.querySelector('[name=x][value=log]').click()")
        assert not (found := chrome.execute_script(OVERLAPS)), (width, "log", found)
    assert not (said := chrome.get_log("browser")), said
    check_axes(chrome)
    check_legend(chrome)
    check_table(chrome)


def read_axes(chrome: Any, title: str) -> list[str]:
    """The numbers at the axes of a chart."""
    one = f"[...document.querySelectorAll('figure')].find(f => f.textContent.includes('{title}'))"
    return list(chrome.execute_script(f"return [...{one}.querySelectorAll('text')].map(t => t.textContent)"))


def check_axes(chrome: Any) -> None:
    """The axes are those that were chosen, accuracy stays within 0 to 100 %, and only what is noisy is smoothed."""
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
    assert titles == ["training loss", "test accuracy", "samples/s"]  # not what has one point in each run
    lines = "return [...document.querySelectorAll('.chart')].map(c => c.querySelector('.line').getAttribute('d'))"
    before = chrome.execute_script(lines)
    chrome.execute_script("smooth.value = 0.95; smooth.dispatchEvent(new Event('input'))")
    after = chrome.execute_script(lines)
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, False]
    heights = [np.array(re.findall(r" ([\d.]+)", path[2])[50:], float) for path in (before, after)]
    assert heights[1].std() < 0.7 * heights[0].std()


def check_legend(chrome: Any) -> None:
    """A click hides a run or an experiment in all charts, a double click the others; the pointer tells of a point."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    assert chrome.execute_script(LINES) == [14, 14, 14]
    switches = chrome.find_elements(By.CSS_SELECTOR, "#legend .experiment:first-child input")
    for switch, left in ((switches[1], 13), (switches[0], 11), (switches[0], 14)):
        switch.click()
        assert chrome.execute_script(LINES) == [left] * 3
    alone = "return [...new Set([...document.querySelectorAll('.curve')].map(g => g.dataset.curve))]"
    for number, shown in ((4, ["4"]), (9, ["9"]), (9, [str(i) for i in range(14)])):
        name = chrome.find_element(By.CSS_SELECTOR, f"#legend [data-run='{number}'] .name")
        ActionChains(chrome, duration=0).double_click(name).perform()
        assert chrome.execute_script(alone) == shown, number
    assert chrome.execute_script("return getSelection().toString()") == ""
    chart = chrome.find_elements(By.CSS_SELECTOR, ".chart")[0]
    ActionChains(chrome, duration=0).move_to_element(chart).perform()
    told = chrome.find_element(By.ID, "tip").text
    assert re.fullmatch(r"experiment_\d \w{4} .*\ntraining loss [\d.]+\n(.* to .*\n)?step .* samples, .* s", told)
    assert len(chrome.find_elements(By.CSS_SELECTOR, "tr.hot, #legend .hot")) == 2
    last = read_axes(chrome, "training loss")
    ActionChains(chrome, duration=0).drag_and_drop_by_offset(chart, 60, 0).perform()
    assert read_axes(chrome, "training loss") != last
    chrome.find_element(By.ID, "whole").click()
    assert read_axes(chrome, "training loss") == last


def check_table(chrome: Any) -> None:
    """A click on a head sorts within each experiment; words in the filter leave the other runs out everywhere."""
    from selenium.webdriver.common.by import By

    def column(name: str) -> list[list[str]]:
        place = f"[...document.querySelectorAll('#results thead th')].findIndex(h => h.textContent === '{name}')"
        rows = f"[...b.querySelectorAll('.run:not([hidden])')].map(r => r.cells[{place}].textContent)"
        return list(chrome.execute_script(f"return [...results.tBodies].map(b => {rows})"))

    for reverse in (False, True):
        chrome.execute_script(
            "[...document.querySelectorAll('thead button')].find(b => b.textContent === 'samples/s').click()"
        )
        found = column("samples/s")
        assert [len(own) for own in found] == [3, 3, 2, 2, 2, 2]
        assert found == [sorted(own, key=int, reverse=reverse) for own in found]
    chrome.execute_script(
        "[...document.querySelectorAll('thead button')].find(b => b.textContent === 'waiting').click()"
    )
    assert column("waiting")[1] == ["15%"] * 3
    chrome.find_element(By.ID, "filter").send_keys("DEPTH=3 failed")
    left = ["000a depth=3 lr=0.0091 failed"]
    assert column("run") == [[], [], [], [], left, []]
    assert chrome.execute_script(LINES) == [1, 1, 1]
    entries = chrome.find_elements(By.CSS_SELECTOR, "#legend .run")
    assert [entry.text for entry in entries if entry.is_displayed()] == left
    assert chrome.find_element(By.ID, "count").text == "1 of 14 runs"


def test_fifty_long_runs_are_loaded(tmp_path: Path, chrome: Any) -> None:
    page = tmp_path / "page.html"
    page.write_text(compare_page.render_page(make_many(50, 10_000), ["optim.lr"], []))
    set_width(chrome, 1300)
    chrome.get("about:blank")
    began = time.perf_counter()
    chrome.get(page.as_uri())
    drawn = chrome.execute_script("return document.querySelectorAll('.chart .line').length")
    print(f"50 runs of 10,000 steps: {page.stat().st_size / 1e6:.1f} MB, drawn in {time.perf_counter() - began:.2f} s")
    assert drawn == 150
    assert page.stat().st_size < 4e6
    drawn = chrome.execute_script(
        "return [...document.querySelectorAll('.experiment .line')].map(l => getComputedStyle(l).stroke)"
    )
    colours = np.array([[float(part) for part in re.findall(r"-?[\d.]+", colour)[:3]] for colour in drawn])  # in oklab
    apart = [np.linalg.norm(colours[i] - colours[j]) for i in range(50) for j in range(i)]
    beside = [np.linalg.norm(colours[i] - colours[j]) for i in range(50) for j in range(max(0, i - 6), i)]
    assert min(apart) > 0.01, (min(apart), min(beside))
    assert min(beside) > 0.07, (min(apart), min(beside))
