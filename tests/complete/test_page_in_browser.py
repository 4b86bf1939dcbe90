"""The page of make compare in a real browser: it works from disk, without a network, and draws what it should."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import inside
from tests.harness.browser import browser, requests
from tests.harness.made_runs import Made, write_six
from tests.harness.processes import wait_until


def compare(runs: Path, *words: str) -> None:
    """Write the page."""
    done = inside.run_verb("compare", f"--runs={runs}", *words)
    assert done.returncode == 0, done.stderr


def test_the_page_works_from_disk_without_a_network(tmp_path: Path) -> None:
    runs = write_six(tmp_path / "runs")
    hostile = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    config = next(runs.glob("*-0002")) / "config.yaml"
    config.write_text(config.read_text().replace("strategy: ddp", f"strategy: {json.dumps(hostile)}"))
    compare(runs)
    page = runs / "compare.html"
    with browser() as chrome:
        chrome.get(page.as_uri())
        wait_until(
            lambda: chrome.execute_script("return document.querySelectorAll('.scatterlayer path.js-line').length"),
            "the page changes",
            30,
        )
        said = chrome.get_log("browser")
        assert not said, said
        assert chrome.title == "6 runs compared"
        assert [url for url in requests(chrome) if not url.startswith(("data:", "blob:"))] == [page.as_uri()]

        titles = chrome.execute_script(
            "return [...document.querySelectorAll('.annotation-text')].map(t => t.textContent)"
        )
        assert titles == [
            "training loss",
            "test accuracy",
            "test loss",
            "samples a second",
            "share of the time waited for other processes",
            "peak memory where most was taken, MB",
        ]
        buttons = chrome.execute_script(
            "return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)"
        )
        assert "Zoom" in buttons and not [title for title in buttons if "Share" in title or "loud" in title]
        lines = chrome.execute_script("return document.querySelectorAll('.subplot.xy path.js-line').length")
        assert lines == 5  # all but the run that never began
        assert chrome.execute_script("return document.querySelectorAll('.barlayer .point path').length") == 6
        check_legend(chrome)
        check_axes(chrome)
        check_links(chrome, page)


def check_legend(chrome: Any) -> None:
    """A click on a run in the legend hides its curve in all plots, another one brings it back."""
    from selenium.webdriver.common.by import By

    count = "return document.querySelectorAll('.scatterlayer path.js-line').length"
    before = chrome.execute_script(count)
    entries = chrome.find_elements(By.CSS_SELECTOR, ".legend .traces")
    assert len(entries) == 5
    assert "(failed)" in entries[3].text and "(running)" in entries[4].text
    entries[0].find_element(By.CSS_SELECTOR, ".legendtoggle").click()
    wait_until(
        lambda: chrome.execute_script(count) == before - 4, "the page changes", 30
    )  # loss, speed, and two evaluations
    chrome.find_elements(By.CSS_SELECTOR, ".legendtoggle")[0].click()
    wait_until(lambda: chrome.execute_script(count) == before, "the page changes", 30)


def check_axes(chrome: Any) -> None:
    """The buttons change what the curves are drawn against, and how."""
    from selenium.webdriver.common.by import By

    for name, last in (("samples", 64_000), ("seconds", 10.0), ("step", 1000)):
        (button,) = [b for b in chrome.find_elements(By.TAG_NAME, "button") if b.text == name]
        button.click()
        assert (
            wait_until(lambda: chrome.execute_script("return plots.layout.xaxis.title.text"), "the page changes", 30)
            == name
        )
        assert chrome.execute_script("return plots.data[0].x.at(-1)") == pytest.approx(last, rel=0.1)
        low, high = chrome.execute_script("return plots.layout.xaxis.range")
        assert low <= 0.1 * last and last <= high < 1.2 * last
    (button,) = [b for b in chrome.find_elements(By.TAG_NAME, "button") if b.text == "logarithmic"]
    button.click()
    wait_until(lambda: chrome.execute_script("return plots.layout.yaxis.type") == "log", "the page changes", 30)
    assert chrome.execute_script("return plots.layout.yaxis2.type") != "log"  # accuracy


def check_links(chrome: Any, page: Path) -> None:
    """Every link leads to a file of a run."""
    found = re.findall(r'<a href="([^"]+)">', page.read_text().rpartition("<h2>Results")[2])
    assert len(found) > 20 and "attempts/0003/logs/rank-1.log" in " ".join(found)
    assert all((page.parent / link).exists() for link in found)


def test_fifty_runs_are_drawn(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for number in range(50):
        Made("ddp_multinode", number, 60, settings={"seed": str(number)}).write(runs)
    compare(runs, "--last=50")
    with browser() as chrome:
        chrome.get((runs / "compare.html").as_uri())
        count = "return document.querySelectorAll('.subplot.xy path.js-line').length"
        wait_until(lambda: chrome.execute_script(count) == 50, "the page changes", 30)
        colours = chrome.execute_script("return new Set(plots.data.map(t => t.line && t.line.color)).size")
        assert colours == 50
