"""A rendezvous of ranks in a folder, for tests of common/ranks/links. Ranks are threads or processes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.backend.certificates import Identity, create_identity_files, load_identity
from common.ranks.links.connecting import RankLinks, connect_ranks
from common.ranks.links.memory_stream import SLOT_COUNT
from common.ranks.links.socket_stream import PIECE_BYTES
from tests.harness.commands.processes import WAIT_TIMEOUT, wait_until

CONNECTION_KINDS = ("tcp", "tls", "memory")
LARGE_BYTES = 3 * SLOT_COUNT * PIECE_BYTES + 5  # more than the buffers of the kernel or the shared memory hold


class FolderRendezvous:
    """A rendezvous with the methods `set` and `get` of a store. `warnings` contains the warnings of the ranks."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.options = options
        self.warnings: list[str] = []
        self.links: list[RankLinks] = []
        folder.mkdir(exist_ok=True)

    def set(self, key: str, value: str) -> None:
        draft = self.folder / f"draft-{threading.get_ident()}-{os.getpid()}"
        draft.write_text(value)
        draft.rename(self.folder / key.replace("/", "-"))

    def get(self, key: str, seconds: float = WAIT_TIMEOUT) -> str:
        file = self.folder / key.replace("/", "-")
        return str(wait_until(lambda: file.exists() and file.read_text(), key, seconds, pause=0.002))

    def join(self, rank: int, size: int, **options: Any) -> RankLinks:
        defaults = {"group": "run", "address": "127.0.0.1", "setup_timeout": WAIT_TIMEOUT, "timeout": WAIT_TIMEOUT}
        keywords: dict[str, Any] = defaults | {"warn": self.warnings.append} | self.options | options
        lookup = functools.partial(self.get, seconds=keywords["setup_timeout"])
        links = connect_ranks(rank, size, self.set, lookup, **keywords)
        self.links.append(links)
        return links

    def join_all(self, size: int, **options: Any) -> list[RankLinks]:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda rank: self.join(rank, size, **options), range(size)))

    def close(self) -> None:
        """Close the links of all ranks that have joined in this process."""
        for links in self.links:
            links.close()


def make_connection_options(kind: str, identity: Identity) -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {
        "tls": {"identity": identity},
        "memory": {"host": "here", "polling_seconds": 1e-3},
    }
    return options.get(kind, {})


@pytest.fixture(scope="session")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    """A key and a certificate, created once."""
    folder = tmp_path_factory.mktemp("identity") / "tls"
    create_identity_files(folder, 3600)
    return load_identity(folder)


@pytest.fixture(params=CONNECTION_KINDS)
def rendezvous(request: pytest.FixtureRequest, identity: Identity, tmp_path: Path) -> Iterator[FolderRendezvous]:
    """A rendezvous for each kind of connection, whose links are closed at the end."""
    options = make_connection_options(request.param, identity)
    with contextlib.closing(FolderRendezvous(tmp_path / "rendezvous", **options)) as rendezvous:
        yield rendezvous


@pytest.fixture
def connected_ranks(rendezvous: FolderRendezvous) -> list[RankLinks]:
    """Two connected ranks."""
    return rendezvous.join_all(2)


def fork(function: Callable[..., object], *arguments: object) -> multiprocessing.context.ForkProcess:
    """Run a function in a forked process."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments, daemon=True)
    process.start()
    return process
