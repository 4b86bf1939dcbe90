"""What forked ranks do, for test_launch.py to look at.

python -m tests.harness.ranks CASE FOLDER    three ranks do a case in an empty folder; the exit status is the launcher's
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from common.core.errors import UserError
from common.distributed import local_launcher, rendezvous
from common.distributed.rank_info import RankInfo
from configs.shared import Launch

SETTINGS = Launch(device="cpu", setup_timeout=60, step_timeout=60)
SOON = Launch(device="cpu", setup_timeout=3, step_timeout=3)  # where somebody is waited for in vain
FOREVER = 600.0  # longer than the test waits


def meet_by_name(place: RankInfo, folder: Path) -> None:
    """As ranks with nccl do it, with the real store."""
    with rendezvous.joined_world(place, SETTINGS) as world:
        for name in ("a", "b"):
            if world.rank == 1:
                time.sleep(0.3)
                (folder / name).touch()
            dataclasses.replace(world, backend="nccl").named_barrier(name)
            assert (folder / name).exists()


def add_up(place: RankInfo, folder: Path) -> None:
    with rendezvous.joined_world(place, SETTINGS) as world:
        x = torch.ones(1) * world.rank
        dist.all_reduce(x)
        assert x.item() == 3, x
        assert world.broadcast(world.rank) == 0 and len(world.gather(1)) == (3 if world.is_main else 0)
        assert torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // 3) == world.threads


def one_raises(place: RankInfo, folder: Path) -> None:
    with rendezvous.joined_world(place, SETTINGS) as world:
        if world.rank == 1:
            raise KeyError("the cause")
        dist.barrier()


def user_error(place: RankInfo, folder: Path) -> None:
    raise UserError("change this")


def one_is_killed(place: RankInfo, folder: Path) -> None:
    with rendezvous.joined_world(place, SETTINGS) as world:
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


def one_takes_too_much(place: RankInfo, folder: Path) -> None:
    """In the control group `folder` names, whose limit is small."""
    with rendezvous.joined_world(place, SETTINGS) as world:
        if world.rank == 2:
            group = Path((folder / "group").read_text())
            (group / "cgroup.procs").write_text(str(os.getpid()))
            held = [bytearray(os.urandom(1 << 20)) for _ in range(1 << 10)]
            raise AssertionError(f"{len(held)} MB fit")
        dist.barrier()


def one_does_not_arrive(place: RankInfo, folder: Path) -> None:
    if place.rank == 1:
        time.sleep(FOREVER)
    with rendezvous.joined_world(place, SOON):
        pass


def one_hangs(place: RankInfo, folder: Path) -> None:
    with rendezvous.joined_world(place, SOON) as world:
        if world.rank == 0:
            time.sleep(FOREVER)
        dist.barrier()


def one_ignores_being_asked(place: RankInfo, folder: Path) -> None:
    if place.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(FOREVER)
    time.sleep(0.5)
    sys.exit(3)


ALL = (meet_by_name, add_up, one_raises, user_error, one_is_killed, one_takes_too_much, one_does_not_arrive, one_hangs)
CASES: dict[str, Callable[[RankInfo, Path], None]] = {case.__name__: case for case in (*ALL, one_ignores_being_asked)}

if __name__ == "__main__":
    case, folder = CASES[sys.argv[1]], Path(sys.argv[2])
    sys.exit(local_launcher.run_ranks(lambda place: case(place, folder), 3, 1, lambda: None))
