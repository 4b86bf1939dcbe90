"""Data workers: hanging and killed workers, errors, stop requests, a full /dev/shm, and reused memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.data.loader import DataWorkerError, Loader
from common.data.prepare import prepare_digits
from common.data.samples import Images
from common.system.causes import PEER_CAUSES, Cause
from common.system.foreign_text import classify_error
from slurm.local_cluster import namespaces
from tests.unit.data.conftest import list_labels

BATCH = 64
MOUNT_REFUSED = 77  # exit status


@pytest.fixture(scope="module")
def images(cache: Path) -> Images:
    return Images(prepare_digits(cache), "train", limit=30 * BATCH)


MakeLoader = Callable[..., Loader]


@pytest.fixture
def make_loader(images: Images) -> MakeLoader:
    """Make a loader with two workers."""

    def make(**settings: Any) -> Loader:
        keywords: dict[str, Any] = {"workers": 2, "worker_timeout": 60.0} | settings
        return Loader(images, BATCH, 0, torch.device("cpu"), torch.float32, **keywords)

    return make


def signal_second_worker(number: int) -> int:
    """Send a signal to data worker 1; return its pid."""
    workers = sorted(multiprocessing.active_children(), key=lambda process: process.pid or 0)
    assert len(workers) == 2
    pid = workers[1].pid
    assert pid is not None
    os.kill(pid, number)
    return pid


@pytest.mark.parametrize(
    "number, timeout, problem",
    [
        (signal.SIGSTOP, 0.6, "for 0.6 s; its process is stopped (SIGSTOP)"),
        (signal.SIGKILL, 60.0, "was killed by SIGKILL"),
    ],
    ids=["stopped", "killed"],
)
def test_a_worker_that_sends_no_batch_is_named(
    number: int, timeout: float, problem: str, make_loader: MakeLoader
) -> None:
    batches = iter(make_loader(worker_timeout=timeout))
    next(batches)
    pid = signal_second_worker(number)
    with pytest.raises(DataWorkerError) as caught:
        list_labels(batches)
    assert f"data worker 1 (pid {pid})" in str(caught.value)
    assert problem in str(caught.value)
    assert classify_error(caught.value) not in PEER_CAUSES, "the rank must not blame another rank"
    assert not multiprocessing.active_children()


def test_an_error_in_a_worker_is_raised_in_the_rank(make_loader: MakeLoader) -> None:
    loader = make_loader()
    loader.transform = lambda *_: 1 // 0  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"(?s)data worker 0 .* failed:.*ZeroDivisionError") as caught:
        next(iter(loader))
    assert classify_error(caught.value) is Cause.SOURCE_ERROR


def test_after_a_stop_request_the_rank_prepares_the_batches_of_a_hanging_worker(make_loader: MakeLoader) -> None:
    stop_signals: list[int] = []
    loader = make_loader(stop_requested=lambda: bool(stop_signals))
    batches = iter(loader)
    first_labels = list_labels([next(batches)])
    signal_second_worker(signal.SIGSTOP)
    stop_signals.append(signal.SIGTERM)
    assert first_labels + list_labels(batches) == list_labels(make_loader(workers=0))
    assert loader.state_dict() == {"epoch": 1, "position": 0}


def test_workers_need_no_space_in_dev_shm(make_loader: MakeLoader) -> None:
    expected_labels = list_labels(make_loader(workers=0))

    def load_with_full_shm() -> None:
        if os.getuid():
            namespaces.become_root_in_new_namespace(os.getuid(), os.getgid())
        namespaces.unshare_namespaces("mnt")
        namespaces.mount_path("none", "/", None, namespaces.RECURSIVE | namespaces.PRIVATE)
        mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            sys.exit(MOUNT_REFUSED)
        Path("/dev/shm/full").write_bytes(bytes(4096))
        assert list_labels(make_loader()) == expected_labels

    status = namespaces.wait_for_child(namespaces.fork_child(load_with_full_shm))
    if status == MOUNT_REFUSED:
        pytest.skip("this machine does not allow mounts in a new namespace")
    assert status == 0


def test_workers_make_no_temporary_folder(
    make_loader: MakeLoader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed rank would not delete it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    list_labels(make_loader())
    assert not list(tmp_path.iterdir())


def test_batches_do_not_change_while_workers_reuse_the_memory_of_blocks(make_loader: MakeLoader) -> None:
    expected_inputs = [inputs.clone() for inputs, _ in make_loader(workers=0)]
    loaded_inputs = [inputs for inputs, _ in make_loader(block=2)]
    assert torch.equal(torch.stack(loaded_inputs), torch.stack(expected_inputs))
