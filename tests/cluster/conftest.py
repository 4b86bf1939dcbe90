"""Clusters that the tests of one pytest process share, and a folder that all processes share."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.data.prepare import prepare_digits
from tests.cluster import fault_tables
from tests.cluster.lab import Lab, laboratory
from tests.harness.environment.shared_results import hold_lock
from tests.harness.slurm.cluster_site import HIGH_PRIORITY, Site, start_cluster

SEED_VARIABLE = "FAULT_SEED"


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed before the worker processes start, which inherit it."""
    os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(10**6)))


def pytest_report_header() -> str:
    return f"{SEED_VARIABLE}={os.environ[SEED_VARIABLE]} repeats the steps at which faults strike"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the cost of each fault."""
    lines = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            lines += [str(line) for name, line in report.user_properties if name == "fault"]
    if lines:
        terminalreporter.write_line(f"{SEED_VARIABLE}={os.environ[SEED_VARIABLE]}\n{fault_tables.table(lines)}")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test run use."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cache(shared: Path) -> Path:
    """A folder with the digits set, prepared once for all processes."""
    path = shared / "cache"
    with hold_lock(shared / "cache.lock"):
        prepare_digits(path)
    return path


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Site]:
    """A cluster of two hosts, and a checkout on it."""
    with start_cluster(Site(tmp_path_factory.mktemp("site"), cache, HIGH_PRIORITY)) as running_site:
        yield running_site


@pytest.fixture(scope="session")
def lab(shared: Path) -> Iterator[Lab]:
    """A cluster for faults."""
    with laboratory(shared) as fault_lab:
        yield fault_lab
