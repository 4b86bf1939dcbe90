"""Headless chromium of Debian, for the tests of pages."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

SKIP_REASON = "needs chromium and chromedriver: apt-get install chromium chromium-driver"
CHROMIUM_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--window-size=1400,1500",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--disable-background-networking",
)


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """Start a browser without network: no host name can be resolved, and all requests are logged."""
    chromium = shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip(SKIP_REASON)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in CHROMIUM_ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


def read_requested_urls(chrome: Any) -> list[str]:
    """Return the URLs that the page has requested since the last call."""
    urls = []
    for log_entry in chrome.get_log("performance"):
        event = json.loads(log_entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            urls.append(event["params"]["request"]["url"])
    return urls


def set_page_width(chrome: Any, width: int, height: int = 900) -> None:
    """Set the width of pages in pixels, which may be smaller than that of any window."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def set_color_scheme(chrome: Any, scheme: str) -> None:
    """Emulate a system that prefers light or dark pages."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
