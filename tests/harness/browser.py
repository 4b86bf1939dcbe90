"""Debian's chromium without a screen, for the tests of pages."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NEEDS = "needs chromium and chromedriver: apt-get install chromium chromium-driver"


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser that has no network: every name leads nowhere, and every request is noted."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip(NEEDS)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    words = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1400,1500"]
    for word in [*words, "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


def requests(chrome: Any) -> list[str]:
    """The addresses that the page asked for since the last call."""
    events = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
