"""What forked ranks do, for test_local_launcher.py and test_objects.py to look at.

    python -m tests.harness.ranks CASE FOLDER [BACKEND]

Three ranks do a case in an empty folder; the exit status is the launcher's.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from common.backend.tls import TlsSocket
from common.ranks import backend_setup, local_launcher, objects, rendezvous
from common.ranks.rank_info import RankInfo
from common.system.errors import UserError
from configs.shared import Launch

BACKEND: Any = sys.argv[3] if len(sys.argv) > 3 else "auto"
SETTINGS = Launch(device="cpu", backend=BACKEND, setup_timeout=60, step_timeout=60)
BRIEF = 1 if BACKEND == "builtin" else 3  # seconds for whom is waited for in vain
SOON = Launch(device="cpu", backend=BACKEND, setup_timeout=3, step_timeout=BRIEF)
LATE = Launch(device="cpu", backend=BACKEND, setup_timeout=60, step_timeout=3600)
FOREVER = 600.0  # longer than the test waits


def meet_by_name(place: RankInfo, folder: Path) -> None:
    """As ranks with nccl do it, with the real store."""
    with rendezvous.join_world(place, SETTINGS) as world:
        for name in ("a", "b"):
            if world.rank == 1:
                time.sleep(0.3)
                (folder / name).touch()
            dataclasses.replace(world, backend="nccl").wait_for_all_ranks(name)
            assert (folder / name).exists()


def add_up(place: RankInfo, folder: Path) -> None:
    with rendezvous.join_world(place, SETTINGS) as world:
        x = torch.ones(1) * world.rank
        dist.all_reduce(x)
        assert x.item() == 3, x
        assert world.broadcast(world.rank) == 0 and len(world.gather(1)) == (3 if world.is_main else 0)
        assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // 3) == world.threads


def send_values(place: RankInfo, folder: Path) -> None:
    """Values of all kinds and lengths, by all ranks and by two of them."""
    kinds = {"text": "é \udc80 \n", "whole": -(2**70), "number": 0.1, "most": math.inf, "true": True, "none": None}
    with rendezvous.join_world(place, SETTINGS) as world:
        some = [1, 2] if world.rank else [0]
        own = world.make_subgroup(some)
        values: list[list[Any]] = [[None, [], {}], ["", kinds, [[kinds]]], [kinds, "y" * 10, [kinds] * 1000]]
        for sent in values:
            assert world.all_gather(sent[world.rank]) == sent
            assert world.gather(sent[world.rank]) == (sent if world.is_main else [])
            assert world.broadcast(sent[2 - world.rank]) == sent[2]
            assert own.all_gather(sent[world.rank]) == [sent[rank] for rank in some]
            assert own.broadcast(sent[world.rank]) == sent[some[0]]
        # just one message, just two
        for length in range(objects.PACKET_BYTES - objects.HEADER_BYTES - 4, objects.PACKET_BYTES + 2):
            text = "z" * length
            assert world.broadcast(text) == text and world.all_gather(text) == [text] * 3
        assert math.isnan(world.broadcast(math.nan))
        try:
            world.gather((1, 2))
            raise AssertionError("a tuple would arrive as a list")
        except TypeError:
            assert world.all_gather(world.rank) == [0, 1, 2]  # nothing has been sent before


class Payload:
    """Once it is unpickled, there is a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def one_sends_pickles(place: RankInfo, folder: Path) -> None:
    """Rank 1, in messages that are as they should be otherwise; then more bytes than anybody has."""
    executed = folder / "executed"
    with rendezvous.join_world(place, SETTINGS) as world:

        def refuse(receive: Callable[[], object]) -> str:
            try:
                return f"nothing: {receive()}"
            except ValueError as error:
                return str(error)

        for size in (0, 5000):
            given = pickle.dumps([Payload(executed), "x" * size])
            if world.rank == 1:
                objects.all_gather_bytes(given, world.device)
                objects.broadcast_bytes(given, 1, world.device)
                continue
            words = f"rank 1 sent {len(given)} bytes that are not valid JSON"
            assert words in refuse(lambda: world.gather(world.rank))
            assert words in refuse(lambda: objects.broadcast_json(None, 1, world.device))
        if world.rank == 1:
            packets = [torch.empty(objects.PACKET_BYTES, dtype=torch.uint8) for _ in range(3)]
            dist.all_gather(packets, torch.full_like(packets[0], 255))
        else:
            assert f"rank 1 announces a value of {2**64 - 1} bytes" in refuse(lambda: world.gather(world.rank))
        dist.barrier()
        if world.is_main:
            assert not executed.exists()
            pickle.loads(given)
            assert executed.exists()


def one_raises(place: RankInfo, folder: Path) -> None:
    with rendezvous.join_world(place, SETTINGS) as world:
        if world.rank == 1:
            raise KeyError("the cause")
        dist.barrier()


def user_error(place: RankInfo, folder: Path) -> None:
    raise UserError("change this")


def one_is_killed(place: RankInfo, folder: Path) -> None:
    with rendezvous.join_world(place, SETTINGS) as world:
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def one_takes_too_much(place: RankInfo, folder: Path) -> None:
    """In the control group `folder` names, whose limit is small."""
    with rendezvous.join_world(place, SETTINGS) as world:
        if world.rank == 2:
            group = Path((folder / "group").read_text())
            (group / "cgroup.procs").write_text(str(os.getpid()))
            held = [bytearray(os.urandom(1 << 20)) for _ in range(1 << 10)]
            raise AssertionError(f"{len(held)} MB fit")
        dist.barrier()


def one_does_not_arrive(place: RankInfo, folder: Path) -> None:
    if place.rank == 1:
        time.sleep(FOREVER)
    with rendezvous.join_world(place, SOON):
        pass


def one_hangs(place: RankInfo, folder: Path) -> None:
    with rendezvous.join_world(place, SOON) as world:
        if world.rank == 0:
            time.sleep(FOREVER)
        dist.barrier()


def one_aborts(place: RankInfo, folder: Path) -> None:
    """Another thread ends the collectives of a rank that waits; the next rank notices. Rank 0 never comes."""
    with rendezvous.join_world(place, LATE) as world:
        if world.rank == 0:
            time.sleep(FOREVER)
        waiting, value = threading.Event(), torch.zeros(1 << 20)

        def abort() -> None:
            waiting.wait()
            time.sleep(0.3)
            dist.distributed_c10d._abort_process_group()

        if world.rank == 1:
            threading.Thread(target=abort, daemon=True).start()
        first = dist.all_reduce(value, async_op=True)
        waiting.set()
        assert first is not None
        waits: list[Callable[[], object]] = [dist.barrier, first.wait]
        for number, wait in enumerate(waits):
            try:
                wait()
            except RuntimeError as error:
                (folder / f"{world.rank}-{number}").write_text(f"{type(error).__name__}: {error}")
        while len(list(folder.iterdir())) < 4:
            time.sleep(0.01)
        raise UserError("all was ended")


def one_ignores_being_asked(place: RankInfo, folder: Path) -> None:
    if place.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(FOREVER)
    time.sleep(0.5)
    sys.exit(3)


def meet_in_private(place: RankInfo, folder: Path) -> None:
    """As ranks of a job: through a file that is nobody else's, over connections that are all TLS, subgroups' too."""
    info = dataclasses.replace(place, launcher="slurm", master="localhost", attempt_id="7.0.0")
    private = backend_setup.get_key_folder(folder, info)
    settings = dataclasses.replace(SETTINGS, tls=True, transport="network")
    with rendezvous.join_world(info, settings, private) as world:
        assert isinstance(world.store, dist.FileStore)
        groups = [dist.group.WORLD, *([world.make_subgroup([0, 1]).group] if world.rank < 2 else [])]
        for group in groups:
            assert group is not None
            dist.barrier(group)
            communicator = cast(Any, group._get_backend(torch.device("cpu"))).communicator
            links = [*communicator.outgoing.values(), *communicator.incoming.values()]
            sockets = [link.stream.socket for link in links]
            assert all(isinstance(one, TlsSocket) and one.version() == "TLSv1.3" for one in sockets) and sockets
        if world.is_main:
            names = [file.name for file in private.iterdir()]
            (folder / "seen").write_text(f"{oct(private.stat().st_mode & 0o777)} {names}")
        dist.barrier()


ALL = (
    *(meet_by_name, add_up, send_values, one_sends_pickles, one_raises, user_error, one_is_killed, one_takes_too_much),
    *(meet_in_private, one_does_not_arrive, one_hangs, one_aborts, one_ignores_being_asked),
)
CASES: dict[str, Callable[[RankInfo, Path], None]] = {case.__name__: case for case in ALL}

if __name__ == "__main__":
    case, folder = CASES[sys.argv[1]], Path(sys.argv[2])
    sys.exit(local_launcher.run_ranks(lambda place: case(place, folder), 3, 1, lambda: None))
