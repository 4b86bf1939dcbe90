"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from common.data.prepare import prepare_digits
from configs.shared import Data
from tests.harness.commands.execution import ForkServer
from tests.harness.commands.processes import Settings, write_script
from tests.harness.environment.randomness import ALL_CASES_VARIABLE, SEED_VARIABLE, is_test_drawn, read_commit_seed
from tests.harness.environment.shared_results import GetRun, create_folder_once, run_experiment_once
from tests.harness.gpu.visible_gpus import hide_gpus
from tests.harness.repository import ROOT

if TYPE_CHECKING:
    from common.ranks.rendezvous import World
    from tests.harness.commands.processes import FinishedRun
    from tests.harness.experiments.registry import Entry

EXIT_STATUS_FILE = os.environ.pop("EXIT_STATUS_FILE", "")  # removed, so that workers and tests do not write this file
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


def pytest_configure(config: pytest.Config) -> None:
    """Start one fork server for all workers; it executes its imports while they collect the tests.

    It and all that workers start keep the memory of freed tensors, instead of asking the kernel for it in each step.
    The process that starts the workers executes no test, and imports no torch. In the other processes, Python's garbage
    collector is disabled until `pytest_collection_finish`.
    """
    hide_gpus()
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ.update(MEMORY)
        ForkServer.start()
        return
    gc.disable()
    import torch

    torch.set_num_threads(1)  # tests run three at a time, and threads that wait for each other burn the other's core


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the marker `omitted` to about five sixths of the tests with the marker `drawn`.

    The choice depends only on the commit and the name of the test. With --last-failed, no test is omitted.
    """
    if config.getoption("lf", False):
        return
    for item in items:
        if item.get_closest_marker("drawn") and not is_test_drawn(item.nodeid):
            item.add_marker("omitted")


def pytest_collection_finish() -> None:
    """Enable the garbage collector, which never examines the imported modules and the collected tests."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(exitstatus: int) -> None:
    """Write the exit status to EXIT_STATUS_FILE for .ci/run, unless an earlier pytest of this make target wrote it."""
    if EXIT_STATUS_FILE and not Path(EXIT_STATUS_FILE).exists():
        Path(EXIT_STATUS_FILE).write_text(str(int(exitstatus)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Print the seed from which cases were drawn, and what to change if no test was selected."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        terminalreporter.write_line("no test was selected; name an existing file or folder, or another -k expression")
    if not os.environ.get(ALL_CASES_VARIABLE):
        terminalreporter.write_line(f"{SEED_VARIABLE}={read_commit_seed()} repeats the drawn cases")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Weights and images are drawn alike whatever tests ran before in this process."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits set, prepared once for all tests of all workers."""
    return create_folder_once(tmp_path_factory, "prepared", prepare_digits)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A real process group that contains only this process."""
    import torch
    import torch.distributed as dist

    from common.ranks.rendezvous import World

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    dist.destroy_process_group()


@pytest.fixture
def digits(cache: Path) -> Settings:
    """Settings of a quick run on the digits set, with nothing left to chance or to the network."""
    return (
        "data.name=digits",
        f"data.cache={cache}",
        "data.test_limit=1000",
        "epochs=1",
        "batch=32",
        "steps=30",
        "log.progress=lines",
        "launch.threads=1",  # tests run three at a time
    )


@pytest.fixture
def waiting_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a test may record as that of a run."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder where make finds everything set up."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    write_script(folder / ".venv/bin/python", f'PYTHONPATH="$BEFORE:{ROOT}" exec "{sys.executable}" "$@"')
    (folder / ".venv/.ready").touch()
    return folder


@pytest.fixture
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> GetRun:
    """An experiment's run with its smallest settings, made once; no test may write into its folder."""
    common = (f"data.cache={cache}", "data.name=digits", "data.test_limit=333", "epochs=1", "steps=40")
    alone = "launch.threads=1"  # tests run three at a time
    description = ("run.name=smallest run", "run.notes=40 steps, for several tests")

    def train(entry: Entry) -> FinishedRun:
        settings = [*common, alone, *description, *entry.smallest_settings]
        if entry.trains_model:
            settings.append("log.gradient_norm=true")
        return run_experiment_once(tmp_path_factory, f"smallest-{entry.name}", entry.name, *settings)

    return train


@pytest.fixture
def quick(cache: Path) -> Settings:
    """13 steps an epoch, a checkpoint every third step, all kept."""
    data = ("data.name=digits", f"data.cache={cache}", "data.train_limit=320", "data.test_limit=100")
    saving = ("checkpoint.every_steps=3", "checkpoint.every_seconds=0", "checkpoint.keep=100")
    quiet = ("log.progress=none", "launch.threads=1")
    return (*data, *saving, *quiet, "batch=24", "steps=30", "epochs=3", "optim.warmup=0")


@pytest.fixture
def many(tmp_path: Path) -> Data:
    """A folder whose 200 training images take 157 MB once prepared."""
    noise = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.jpg")
    for part, count in (("train", 100), ("val", 1)):
        for label in ("noise", "more"):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                (tmp_path / part / label / f"{number}.jpg").hardlink_to(tmp_path / "noise.jpg")
    return Data(name="imagefolder", root=str(tmp_path), cache=str(tmp_path / "cache"), image_size=512)
