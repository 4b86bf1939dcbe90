"""Data workers that stand still or end, a full /dev/shm, and a stop request while a rank waits for a batch."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.data.loader import DataWorkerError, Images, Loader
from common.data.prepare import prepare_digits
from common.system.causes import PEER_CAUSES, Cause
from common.system.foreign_text import classify_error
from slurm.local_cluster import namespaces

BATCH = 64


@pytest.fixture(scope="module")
def images(cache: Path) -> Images:
    return Images(prepare_digits(cache), "train", limit=30 * BATCH)


@pytest.fixture
def helped(images: Images) -> Callable[..., Loader]:
    """Makes a loader with two workers."""

    def make(**settings: Any) -> Loader:
        keywords: dict[str, Any] = {"workers": 2, "worker_timeout": 0.6} | settings
        return Loader(images, BATCH, 0, torch.device("cpu"), torch.float32, **keywords)

    return make


def labels(batches: Iterator[tuple[Any, Any]]) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


def signal_second_worker(number: int) -> int:
    """Send a signal to data worker 1; returns its pid."""
    workers = sorted(multiprocessing.active_children(), key=lambda process: process.pid or 0)
    assert len(workers) == 2 and workers[1].pid is not None
    os.kill(workers[1].pid, number)
    return workers[1].pid


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGSTOP, "for 0.6 s; its process is stopped (SIGSTOP)"), (signal.SIGKILL, "was killed by SIGKILL")],
    ids=["stopped", "killed"],
)
def test_a_worker_that_gives_no_batch_is_named(number: int, words: str, helped: Callable[..., Loader]) -> None:
    batches = iter(helped())
    next(batches)
    pid = signal_second_worker(number)
    with pytest.raises(DataWorkerError) as caught:
        labels(batches)
    assert f"data worker 1 (pid {pid})" in str(caught.value) and words in str(caught.value)
    assert classify_error(caught.value) not in PEER_CAUSES, "no other rank is asked for"
    assert not multiprocessing.active_children()


def test_an_error_in_a_worker_is_that_of_the_rank(helped: Callable[..., Loader]) -> None:
    broken = helped()
    broken.transform = lambda *_: 1 // 0  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"(?s)data worker 0 .* failed:.*ZeroDivisionError") as caught:
        next(iter(broken))
    assert classify_error(caught.value) is Cause.SOURCE_ERROR


def test_a_rank_that_is_asked_to_stop_makes_the_batches_of_a_stopped_worker(helped: Callable[..., Loader]) -> None:
    requests = list[int]()
    source = helped(worker_timeout=60.0, stop_requested=lambda: bool(requests))
    batches = iter(source)
    first = next(batches)[1].tolist()
    signal_second_worker(signal.SIGSTOP)
    requests.append(signal.SIGTERM)
    assert [first, *labels(batches)] == labels(iter(helped(workers=0)))
    assert source.state_dict() == {"epoch": 1, "position": 0}


def test_workers_need_no_space_in_dev_shm(helped: Callable[..., Loader]) -> None:
    def read_with_full_shm() -> None:
        if os.getuid():
            namespaces.become_root_in_new_namespace(os.getuid(), os.getgid())
        namespaces.unshare_namespaces("mnt")
        namespaces.mount_path("none", "/", None, namespaces.RECURSIVE | namespaces.PRIVATE)
        mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            sys.exit(77)
        Path("/dev/shm/full").write_bytes(bytes(4096))
        assert labels(iter(helped())) == alone

    alone = labels(iter(helped(workers=0)))
    status = namespaces.wait_for_child(namespaces.fork_child(read_with_full_shm))
    if status == 77:
        pytest.skip("this machine lets nobody mount a file system of their own")
    assert status == 0


def test_workers_make_no_temporary_folder(
    helped: Callable[..., Loader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stay where the rank is killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    labels(iter(helped()))
    assert not list(tmp_path.iterdir())


def test_memory_of_a_block_is_free_for_the_next_one(helped: Callable[..., Loader]) -> None:
    """Batches stay what they are while workers go on."""
    kept = [x.clone() for x, _ in helped(workers=0)]
    given = [x for x, _ in helped(block=2)]
    assert all(torch.equal(one, other) for one, other in itertools.zip_longest(kept, given))
