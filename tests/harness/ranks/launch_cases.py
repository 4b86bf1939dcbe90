"""Execute a case on three forked ranks, for the tests of the local launcher, of objects and of the process group.

    python -m tests.harness.ranks.launch_cases CASE FOLDER [BACKEND]

FOLDER is for the files of the case. The exit status is that of the launcher.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from common.backend.tls import TlsSocket
from common.checkpoint.loading import LoadedCheckpoint
from common.ranks import backend_setup, local_launcher, objects, rendezvous
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from common.runs.failures import Failure, read_failure, write_failure
from common.runs.folder import RunFolder
from common.system.causes import Cause
from common.system.errors import UserError
from common.system.exit_status import EXIT_RESUMABLE
from common.techniques.elastic import peer_copy
from common.techniques.elastic.member import Member
from configs.dataparallel import Elastic
from configs.shared import Launch
from tests.harness.ranks.programs import run_on_ranks

BACKEND: Any = sys.argv[3] if len(sys.argv) > 3 else "auto"
RANKS = 3
SETTINGS = Launch(device="cpu", backend=BACKEND, setup_timeout=60, step_timeout=60)
SHORT_STEP_TIMEOUT = 1 if BACKEND == "builtin" else 3  # seconds
SHORT_TIMEOUTS = Launch(device="cpu", backend=BACKEND, setup_timeout=3, step_timeout=SHORT_STEP_TIMEOUT)
LONG_TIMEOUTS = Launch(device="cpu", backend=BACKEND, setup_timeout=60, step_timeout=3600)
HANG_SECONDS = 600.0  # longer than the test waits
FREE_SECONDS = 0.5  # duration of the destructor of SlowlyFreed
CONNECT_SECONDS = 0.2  # time limit for a new rank of an elastic run


def wait_for_ranks_by_name(world: World, folder: Path) -> None:
    """Wait for all ranks as ranks with nccl do, with the real store."""
    for name in ("a", "b"):
        if world.rank == 1:
            time.sleep(0.3)
            (folder / name).touch()
        dataclasses.replace(world, backend="nccl").wait_for_all_ranks(name)
        assert (folder / name).exists()


def get_timeout(group: dist.ProcessGroup) -> datetime.timedelta:
    """Return the time limit of a process group."""
    backend: Any = group._get_backend(torch.device("cpu"))
    return cast(datetime.timedelta, backend.options._timeout)


def reduce_and_gather_ranks(world: World, folder: Path) -> None:
    x = torch.ones(1) * world.rank
    dist.all_reduce(x)
    assert x.item() == 3, x
    assert world.broadcast(world.rank) == 0
    gathered = world.gather(1)
    assert gathered == ([1, 1, 1] if world.is_main else [])
    threads_per_rank = max(1, len(os.sched_getaffinity(0)) // 3)
    assert torch.get_num_threads() == threads_per_rank
    assert world.threads == threads_per_rank


def exchange_values(world: World, folder: Path) -> None:
    """Exchange values of all types and lengths between all ranks and in a subgroup of two."""
    subgroup_ranks = [1, 2] if world.rank else [0]
    subgroup = world.make_subgroup(subgroup_ranks)
    types = {"text": "é \udc80 \n", "integer": -(2**70), "number": 0.1, "inf": math.inf, "true": True, "none": None}
    values_of_rounds: list[list[Any]] = [  # one value per rank
        [None, [], {}],
        ["", types, [[types]]],
        [types, "y" * 10, [types] * 1000],
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
        assert world.all_gather(text) == [text] * RANKS
    assert math.isnan(world.broadcast(math.nan))
    with pytest.raises(TypeError):  # a tuple would arrive as a list
        world.gather((1, 2))
    assert world.all_gather(world.rank) == [0, 1, 2]  # the refused value was not sent


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def rank_1_sends_pickles(world: World, folder: Path) -> None:
    """Send pickles in otherwise valid messages from rank 1, and then announce an impossible length."""
    created_file = folder / "executed"
    for size in (0, 5000):
        pickled = pickle.dumps([Payload(created_file), "x" * size])
        if world.rank == 1:
            objects.all_gather_bytes(pickled, world.device)
            objects.broadcast_bytes(pickled, 1, world.device)
            continue
        message = f"rank 1 sent {len(pickled)} bytes that are not valid JSON"
        with pytest.raises(ValueError, match=message):
            world.gather(world.rank)
        with pytest.raises(ValueError, match=message):
            objects.broadcast_json(None, 1, world.device)

    if world.rank == 1:
        packets = [torch.empty(objects.PACKET_BYTES, dtype=torch.uint8) for _ in range(RANKS)]
        dist.all_gather(packets, torch.full_like(packets[0], 255))
    else:
        with pytest.raises(ValueError, match=f"rank 1 announces a value of {2**64 - 1} bytes"):
            world.gather(world.rank)
    dist.barrier()
    if world.is_main:
        assert not created_file.exists()
        pickle.loads(pickled)
        assert created_file.exists()


def copy_a_state_in_pieces(world: World, folder: Path) -> None:
    """Copy a training state that is larger than the largest value from rank 1 to rank 2."""
    weights = torch.arange(5000.0)
    model = {"weights": weights if world.rank == 1 else torch.zeros_like(weights)}
    loaded: list[LoadedCheckpoint] = []
    state = cast(
        Any,
        SimpleNamespace(
            collect_local_state=lambda: SimpleNamespace(model=model, optimizer={}, common={}, local={}),
            load_peer_state=loaded.append,
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "MAX_VALUE_BYTES", 5000)
        patch.setattr(peer_copy, "PIECE_BYTES", 4000)
        peer_copy.broadcast_state(state, 1, world, 7, loads=world.rank == 2)
    if world.rank != 2:
        assert not loaded
        return
    assert loaded[0].step == 7
    assert torch.equal(loaded[0].model["weights"], weights)


def create_a_mesh(world: World, folder: Path) -> None:
    """Create a mesh of two of the three ranks, whose process group is not that of all ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
    if world.rank < 2:
        group = mesh.get_group("shards")
        assert group is not dist.group.WORLD
        assert get_timeout(group) == world.timeout
    expected_timeout = {"nccl": world.timeout, "gloo": world.timeout}
    timeouts = {backend: dist.distributed_c10d._get_default_timeout(backend) for backend in expected_timeout}
    assert timeouts == expected_timeout
    dist.barrier()  # a rank that exits would disturb ranks that still create the group


def rank_1_raises_an_error(world: World, folder: Path) -> None:
    if world.rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def ranks_raise_user_error(info: RankInfo, folder: Path) -> None:
    raise UserError("change this")


def rank_2_is_killed(world: World, folder: Path) -> None:
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_2_exceeds_memory_limit(world: World, folder: Path) -> None:
    """Let rank 2 exceed the memory limit of the control group that is named in `folder`."""
    if world.rank == 2:
        group = Path((folder / "memory_group").read_text())
        (group / "cgroup.procs").write_text(str(os.getpid()))
        megabytes = [bytearray(os.urandom(1 << 20)) for _ in range(1 << 10)]
        raise AssertionError(f"{len(megabytes)} MB were allocated")
    dist.barrier()


def rank_1_does_not_join(info: RankInfo, folder: Path) -> None:
    if info.rank == 1:
        time.sleep(HANG_SECONDS)
    with rendezvous.join_world(info, SHORT_TIMEOUTS):
        pass


def rank_0_hangs(world: World, folder: Path) -> None:
    if world.rank == 0:
        time.sleep(HANG_SECONDS)
    dist.barrier()


def rank_1_aborts_the_group(world: World, folder: Path) -> None:
    """Abort the process group of rank 1 while it waits for rank 0, which hangs. Rank 2 detects the abort."""
    if world.rank == 0:
        time.sleep(HANG_SECONDS)
    is_waiting = threading.Event()
    value = torch.zeros(1 << 20)

    def abort() -> None:
        is_waiting.wait()
        time.sleep(0.3)
        dist.distributed_c10d._abort_process_group()

    if world.rank == 1:
        threading.Thread(target=abort, daemon=True).start()
    all_reduce = dist.all_reduce(value, async_op=True)
    is_waiting.set()
    assert all_reduce is not None
    waits: list[Callable[[], object]] = [dist.barrier, all_reduce.wait]
    for number, wait in enumerate(waits):
        try:
            wait()
        except RuntimeError as error:
            (folder / f"{world.rank}-{number}").write_text(f"{type(error).__name__}: {error}")
    while len(list(folder.iterdir())) < 4:
        time.sleep(0.01)
    raise UserError("all collectives have ended")


def rank_0_ignores_sigterm(info: RankInfo, folder: Path) -> None:
    if info.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(HANG_SECONDS)
    time.sleep(0.5)
    sys.exit(3)


def rank_0_is_killed_after_its_report(info: RankInfo, folder: Path) -> None:
    """Like a rank on a GPU that has named an unresponsive rank and is then killed by NCCL."""
    if info.rank == 0:
        report = Failure(Cause.SILENT_RANK, "after step 3: rank 1 on node-1 did not answer", time.time())
        run = RunFolder(folder)
        run.attempt_folder.mkdir(parents=True)
        write_failure(run, info.rank, report)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG_SECONDS)


def new_rank_1_stops_before_it_connects(info: RankInfo, folder: Path) -> None:
    """The other ranks of this elastic run need more time to stop than a new rank may need to connect."""
    if info.is_joining:
        sys.exit(EXIT_RESUMABLE)
    member = Member(info.coordinator, info.rank, 60, "", joins=False)
    member.set_value(f"connected-{info.rank}", "")
    if info.rank == 1:
        member.get_values(["connected-0", "connected-2"])
        os.kill(os.getpid(), signal.SIGKILL)
    while not member.generation_ended:
        time.sleep(0.01)
    member.sign_in([1, 0, 1])
    time.sleep(5 * CONNECT_SECONDS)
    sys.exit(EXIT_RESUMABLE)


def join_with_tls(info: RankInfo, folder: Path) -> None:
    """Join as ranks of a job: with a private store, and with TLS on all connections of the world and of a subgroup."""
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
                connection = link.stream.socket
                assert isinstance(connection, TlsSocket)
                assert connection.version() == "TLSv1.3"
        if world.is_main:
            names = [file.name for file in key_folder.iterdir()]
            mode = oct(key_folder.stat().st_mode & 0o777)
            (folder / "key_folder").write_text(f"{mode} {names}")
        dist.barrier()


class SlowlyFreed:
    """An object whose destructor takes half a second."""

    def __del__(self) -> None:
        time.sleep(FREE_SECONDS)


def create_callback() -> Callable[[Any], Any]:
    """Return a callback that holds the process group. Freeing the callback takes half a second."""
    kept = (dist.group.WORLD, SlowlyFreed())  # the last element of a tuple is freed first

    def get_value(future: Any) -> Any:
        assert kept
        return future.value()

    return get_value


def a_callback_is_freed_after_the_group(info: RankInfo, folder: Path) -> None:
    """Leave the group while a thread of gloo still frees a callback that holds the last reference to the group."""
    with rendezvous.join_world(info, SETTINGS) as world:
        if not world.is_main:
            time.sleep(FREE_SECONDS)  # the collective of rank 0 must not end before rank 0 has added its callback
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        future = work.get_future()
        future.then(create_callback()).wait()
        del work, future
    time.sleep(2 * FREE_SECONDS)


CASES_BEFORE_JOINING = (
    ranks_raise_user_error,
    rank_1_does_not_join,
    rank_0_ignores_sigterm,
    rank_0_is_killed_after_its_report,
    new_rank_1_stops_before_it_connects,
    join_with_tls,
    a_callback_is_freed_after_the_group,
)
"""Cases that are called with RankInfo. All others are called with a world, which has these settings or SETTINGS:"""
SETTINGS_OF_CASES = {rank_0_hangs: SHORT_TIMEOUTS, rank_1_aborts_the_group: LONG_TIMEOUTS}


def main(name: str, folder: Path) -> int:
    case = globals()[name]
    if case in CASES_BEFORE_JOINING:
        run = RunFolder(folder)
        return local_launcher.run_ranks(
            lambda info: case(info, folder),
            RANKS,
            1,
            lambda: None,
            elastic=Elastic(on=True) if case is new_rank_1_stops_before_it_connects else None,
            setup_timeout=CONNECT_SECONDS,
            read_failure=lambda rank: read_failure(run, rank),
        )
    settings = SETTINGS_OF_CASES.get(case, SETTINGS)
    return run_on_ranks(lambda world: case(world, folder), RANKS, settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
