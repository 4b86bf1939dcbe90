"""Mistakes of data parallelism on two real ranks with short time-outs, for tests/pitfalls/.

python -m tests.harness.pitfalls.ddp_pitfalls NAME ...      print the results of each named function as JSON
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.models.networks import SimpleNN
from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from common.techniques.data_parallel import ddp
from configs.ddp_multinode import Config
from configs.shared import Launch
from experiments import ddp_multinode
from tests.harness.commands import execution
from tests.harness.commands.processes import make_environment

SECONDS = 2.0
"""Time limit of a collective."""


def attempt(function: Callable[[], Any]) -> Any:
    """Call a function; return its result, or its error message and the seconds until the error."""
    start = time.monotonic()
    try:
        return function()
    except Exception as error:
        return {"error": str(error), "seconds": time.monotonic() - start}


def make_run_stub(world: World) -> Any:
    """Return an object with the attributes of a run that the experiment's `wrap_model` uses."""

    def ignore(*_: Any) -> None:
        """No run trains the model."""

    return SimpleNamespace(world=world, device=world.device, add_hook=ignore, add_local_part=ignore)


def in_ranks(size: int, function: Callable[[World], Any], seconds: float = SECONDS) -> list[Any]:
    """Call a function on `size` ranks and return their results; `seconds` is the time limit of a collective."""
    folder = Path(tempfile.mkdtemp())
    files = [folder / str(rank) for rank in range(size)]

    def call_on_rank(rank_info: RankInfo) -> None:
        with rendezvous.join_world(rank_info, Launch(device="cpu", threads=1, step_timeout=seconds)) as world:
            dist.barrier()  # a rank that leaves at once would fail the others, which may still connect to it
            files[rank_info.rank].write_text(json.dumps(attempt(lambda: function(world))))
            if world.is_main:  # rank 0 has the store, which must exist until the other ranks have failed too
                deadline = time.monotonic() + 3 * seconds
                while not all(file.exists() for file in files) and time.monotonic() < deadline:
                    time.sleep(0.01)

    assert local_launcher.run_ranks(call_on_rank, size, 1, lambda: None) == 0
    return [json.loads(file.read_text()) for file in files]


def in_two(function: Callable[[World], Any]) -> list[Any]:
    """Call a function on two ranks and return their results."""
    return in_ranks(2, function)


def ranks_in_a_loop() -> Any:
    """The mistake: `for rank in range(2): train(rank)`."""
    store_file = str(Path(tempfile.mkdtemp()) / "store")
    started_ranks = []

    def train(rank: int) -> None:
        started_ranks.append(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = datetime.timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", store=dist.FileStore(store_file, 2), rank=rank, world_size=2, timeout=limit)

    def loop() -> None:
        for rank in range(2):
            train(rank)

    return {"together": in_two(lambda world: world.size), "loop": attempt(loop), "began": started_ranks}


def group_in_a_function_that_returns() -> Any:
    """The mistake: processes set up the group and end; afterwards it is used in another process."""
    inside = in_two(lambda world: dist.is_initialized())
    return {"inside": inside, "after": dist.is_initialized(), "use": attempt(lambda: dist.all_reduce(torch.ones(1)))}


def barrier_on_one_rank() -> Any:
    """The mistake: only rank 0 calls `dist.barrier`."""

    def sum_after_barrier(world: World, on_all_ranks: bool) -> float:
        if on_all_ranks or world.is_main:
            dist.barrier()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item()

    return {
        "one": in_two(lambda world: sum_after_barrier(world, on_all_ranks=False)),
        "all": in_two(lambda world: sum_after_barrier(world, on_all_ranks=True)),
    }


def several_devices() -> Any:
    """The mistake: `device_ids` with two devices. The correct wrapper follows."""

    def wrap(world: World) -> Any:
        error = attempt(lambda: DistributedDataParallel(SimpleNN(), device_ids=[0, 1]))
        model = ddp_multinode.wrap_model(Config(), SimpleNN(), make_run_stub(world))
        return [error, type(model).__name__]

    return in_two(wrap)


def model_parallelism() -> Any:
    """Return the number of parameters that each rank holds with ddp and with fsdp."""

    def count_local_parameters(world: World, strategy: Any) -> int:
        model = ddp_multinode.wrap_model(Config(strategy=strategy), SimpleNN(), make_run_stub(world))
        count = 0
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            count += local.numel()
        return count

    return in_two(lambda world: [count_local_parameters(world, "ddp"), count_local_parameters(world, "fsdp")])


def own_statistics() -> Any:
    """Return whether BatchNorm under DDP has the statistics of each rank's samples, as without DDP."""

    def has_equal_buffers(world: World) -> bool:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        unwrapped = copy.deepcopy(inner)
        model = ddp.wrap_ddp(inner, world.device)
        for step in range(3):
            torch.manual_seed(10 * step + world.rank)
            x = torch.randn(5, 3, 4, 4)
            model(x).sum().backward()
            unwrapped(x)
        return all(torch.equal(a, b) for a, b in zip(inner.buffers(), unwrapped.buffers(), strict=True))

    return in_two(has_equal_buffers)


def torchs_norm() -> Any:
    """Return the result of torch's SyncBatchNorm on each rank."""
    return in_two(lambda world: attempt(lambda: nn.SyncBatchNorm(3)(torch.randn(2, 3, 4, 4)).sum().item()))


def made(*names: str, module: str = "ddp_pitfalls", **variables: str) -> dict[str, Any]:
    """Execute functions of a module of tests/harness that make mistakes; return the results by name."""
    command = [sys.executable, "-m", f"tests.harness.pitfalls.{module}", *names]
    process = execution.execute_command(command, env=make_environment(**variables), timeout=250)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
