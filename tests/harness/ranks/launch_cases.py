"""Cases that three forked ranks execute, for the tests of the local launcher and of objects.

    python -m tests.harness.ranks.launch_cases CASE FOLDER [BACKEND]

FOLDER is empty. The exit status is the launcher's.
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
SHORT_STEP_TIMEOUT = 1 if BACKEND == "builtin" else 3  # seconds
SHORT_TIMEOUTS = Launch(device="cpu", backend=BACKEND, setup_timeout=3, step_timeout=SHORT_STEP_TIMEOUT)
LONG_TIMEOUTS = Launch(device="cpu", backend=BACKEND, setup_timeout=60, step_timeout=3600)
FOREVER_SECONDS = 600.0  # longer than the test waits


def meet_by_name(info: RankInfo, folder: Path) -> None:
    """Wait for all ranks as ranks with nccl do, with the real store."""
    with rendezvous.join_world(info, SETTINGS) as world:
        for name in ("a", "b"):
            if world.rank == 1:
                time.sleep(0.3)
                (folder / name).touch()
            dataclasses.replace(world, backend="nccl").wait_for_all_ranks(name)
            assert (folder / name).exists()


def add_up(info: RankInfo, folder: Path) -> None:
    with rendezvous.join_world(info, SETTINGS) as world:
        x = torch.ones(1) * world.rank
        dist.all_reduce(x)
        assert x.item() == 3, x
        assert world.broadcast(world.rank) == 0
        gathered = world.gather(1)
        assert gathered == ([1, 1, 1] if world.is_main else [])
        threads_per_rank = max(1, len(os.sched_getaffinity(0)) // 3)
        assert torch.get_num_threads() == threads_per_rank
        assert world.threads == threads_per_rank


def send_values(info: RankInfo, folder: Path) -> None:
    """Exchange values of all types and lengths between all ranks and in a subgroup of two."""
    kinds = {"text": "é \udc80 \n", "integer": -(2**70), "number": 0.1, "inf": math.inf, "true": True, "none": None}
    with rendezvous.join_world(info, SETTINGS) as world:
        subgroup_ranks = [1, 2] if world.rank else [0]
        subgroup = world.make_subgroup(subgroup_ranks)
        values_of_rounds: list[list[Any]] = [  # one value per rank
            [None, [], {}],
            ["", kinds, [[kinds]]],
            [kinds, "y" * 10, [kinds] * 1000],
        ]
        for values in values_of_rounds:
            assert world.all_gather(values[world.rank]) == values
            assert world.gather(values[world.rank]) == (values if world.is_main else [])
            assert world.broadcast(values[2 - world.rank]) == values[2]
            assert subgroup.all_gather(values[world.rank]) == [values[rank] for rank in subgroup_ranks]
            assert subgroup.broadcast(values[world.rank]) == values[subgroup_ranks[0]]
        # lengths around the limit of one packet
        for length in range(objects.PACKET_BYTES - objects.HEADER_BYTES - 4, objects.PACKET_BYTES + 2):
            text = "z" * length
            assert world.broadcast(text) == text
            assert world.all_gather(text) == [text] * 3
        assert math.isnan(world.broadcast(math.nan))
        try:
            world.gather((1, 2))
            raise AssertionError("a tuple would arrive as a list")
        except TypeError:
            assert world.all_gather(world.rank) == [0, 1, 2]  # the refused value was not sent


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def one_sends_pickles(info: RankInfo, folder: Path) -> None:
    """Let rank 1 send pickles in otherwise valid messages, and then announce an impossible length."""
    executed = folder / "executed"
    with rendezvous.join_world(info, SETTINGS) as world:

        def read_error(receive: Callable[[], object]) -> str:
            try:
                return f"no error: {receive()}"
            except ValueError as error:
                return str(error)

        for size in (0, 5000):
            pickled = pickle.dumps([Payload(executed), "x" * size])
            if world.rank == 1:
                objects.all_gather_bytes(pickled, world.device)
                objects.broadcast_bytes(pickled, 1, world.device)
                continue
            message = f"rank 1 sent {len(pickled)} bytes that are not valid JSON"
            assert message in read_error(lambda: world.gather(world.rank))
            assert message in read_error(lambda: objects.broadcast_json(None, 1, world.device))
        if world.rank == 1:
            packets = [torch.empty(objects.PACKET_BYTES, dtype=torch.uint8) for _ in range(3)]
            dist.all_gather(packets, torch.full_like(packets[0], 255))
        else:
            message = f"rank 1 announces a value of {2**64 - 1} bytes"
            assert message in read_error(lambda: world.gather(world.rank))
        dist.barrier()
        if world.is_main:
            assert not executed.exists()
            pickle.loads(pickled)
            assert executed.exists()


def one_raises(info: RankInfo, folder: Path) -> None:
    with rendezvous.join_world(info, SETTINGS) as world:
        if world.rank == 1:
            raise KeyError("the cause")
        dist.barrier()


def user_error(info: RankInfo, folder: Path) -> None:
    raise UserError("change this")


def one_is_killed(info: RankInfo, folder: Path) -> None:
    with rendezvous.join_world(info, SETTINGS) as world:
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def one_takes_too_much(info: RankInfo, folder: Path) -> None:
    """Let rank 2 exceed the memory limit of the control group that is named in `folder`."""
    with rendezvous.join_world(info, SETTINGS) as world:
        if world.rank == 2:
            group = Path((folder / "group").read_text())
            (group / "cgroup.procs").write_text(str(os.getpid()))
            megabytes = [bytearray(os.urandom(1 << 20)) for _ in range(1 << 10)]
            raise AssertionError(f"{len(megabytes)} MB were allocated")
        dist.barrier()


def one_does_not_arrive(info: RankInfo, folder: Path) -> None:
    if info.rank == 1:
        time.sleep(FOREVER_SECONDS)
    with rendezvous.join_world(info, SHORT_TIMEOUTS):
        pass


def one_hangs(info: RankInfo, folder: Path) -> None:
    with rendezvous.join_world(info, SHORT_TIMEOUTS) as world:
        if world.rank == 0:
            time.sleep(FOREVER_SECONDS)
        dist.barrier()


def one_aborts(info: RankInfo, folder: Path) -> None:
    """Abort the process group of waiting rank 1 in another thread; rank 2 detects it. Rank 0 never joins."""
    with rendezvous.join_world(info, LONG_TIMEOUTS) as world:
        if world.rank == 0:
            time.sleep(FOREVER_SECONDS)
        is_waiting = threading.Event()
        value = torch.zeros(1 << 20)

        def abort() -> None:
            is_waiting.wait()
            time.sleep(0.3)
            dist.distributed_c10d._abort_process_group()

        if world.rank == 1:
            threading.Thread(target=abort, daemon=True).start()
        first = dist.all_reduce(value, async_op=True)
        is_waiting.set()
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


def one_ignores_being_asked(info: RankInfo, folder: Path) -> None:
    if info.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(FOREVER_SECONDS)
    time.sleep(0.5)
    sys.exit(3)


def meet_in_private(info: RankInfo, folder: Path) -> None:
    """Meet as ranks of a job: through a private file, with TLS on every connection of the world and of a subgroup."""
    slurm_info = dataclasses.replace(info, launcher="slurm", master="localhost", attempt_id="7.0.0")
    key_folder = backend_setup.get_key_folder(folder, slurm_info)
    settings = dataclasses.replace(SETTINGS, tls=True, transport="network")
    with rendezvous.join_world(slurm_info, settings, key_folder) as world:
        assert isinstance(world.store, dist.FileStore)
        groups = [dist.group.WORLD]
        if world.rank < 2:
            groups.append(world.make_subgroup([0, 1]).group)
        for group in groups:
            assert group is not None
            dist.barrier(group)
            communicator = cast(Any, group._get_backend(torch.device("cpu"))).communicator
            links = [*communicator.outgoing.values(), *communicator.incoming.values()]
            assert links
            for link in links:
                assert isinstance(link.stream.socket, TlsSocket)
                assert link.stream.socket.version() == "TLSv1.3"
        if world.is_main:
            names = [file.name for file in key_folder.iterdir()]
            mode = oct(key_folder.stat().st_mode & 0o777)
            (folder / "seen").write_text(f"{mode} {names}")
        dist.barrier()


ALL_CASES = (
    meet_by_name, add_up, send_values, one_sends_pickles, one_raises, user_error, one_is_killed, one_takes_too_much,
    meet_in_private, one_does_not_arrive, one_hangs, one_aborts, one_ignores_being_asked,
)  # fmt: skip
CASES: dict[str, Callable[[RankInfo, Path], None]] = {case.__name__: case for case in ALL_CASES}

if __name__ == "__main__":
    case = CASES[sys.argv[1]]
    folder = Path(sys.argv[2])
    sys.exit(local_launcher.run_ranks(lambda info: case(info, folder), 3, 1, lambda: None))
