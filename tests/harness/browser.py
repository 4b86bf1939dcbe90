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


def set_width(chrome: Any, width: int, height: int = 900) -> None:
    """Give pages a width in pixels, also one that no window can have."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def set_scheme(chrome: Any, scheme: str) -> None:
    """Let the system prefer light or dark pages."""
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
