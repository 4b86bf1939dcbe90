"""Collectives of the backend `builtin`, compared with gloo and with arithmetic, for test_process_group.py.

    python -m tests.harness.ranks.backend_calls RANKS TRANSPORT [CASE ...]   execute cases on RANKS ranks

Without CASE, executes all cases except `ddp`. The cases are here, in backend_group_operations.py, in
backend_messages.py and in torch_features.py.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common.backend import algorithm_choice
from common.backend.algorithms import build_algorithm, count_bytes_per_rank
from common.config.changed_settings import CHANGES_FILE, read_last_changes
from common.config.config import read_config_file, read_settings
from common.ranks.rendezvous import World
from configs.shared import Launch
from tests.harness.ranks import backend_group_operations as group_operations
from tests.harness.ranks import backend_messages as messages
from tests.harness.ranks.backend_group_operations import SETTINGS, make_group
from tests.harness.ranks.programs import run_on_ranks


def check_algorithm_choice(world: World) -> None:
    """A measured algorithm is saved in resolved.yaml, and a later attempt uses the algorithms in this file by size.

    The choice of an attempt that was resumed with another setting is saved with the changes of this attempt.
    """
    folder = Path(world.broadcast(tempfile.mkdtemp() if world.is_main else ""))

    def resolve_algorithm(resolved_settings: str) -> str:
        if world.is_main:
            (folder / "config.yaml").write_text("launch:\n  algorithm: auto\nseed: 1\n")
            (folder / "resolved.yaml").write_text(resolved_settings)
        launch = Launch(backend="builtin", algorithm="auto")
        algorithm_choice.set_all_reduce_algorithm(launch, folder, world)
        dist.barrier()
        assert launch.algorithm == "auto"
        assert read_config_file(folder / "config.yaml")["launch.algorithm"] == "auto"
        return str(read_settings(folder)["launch.algorithm"])

    def count_sent_bytes() -> int:
        assert dist.group.WORLD is not None
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
        return sum(link.bytes_sent for link in backend.communicator.outgoing.values())

    measured = resolve_algorithm("")
    assert measured != "auto"
    assert world.all_gather(measured) == [measured] * world.size
    assert resolve_algorithm("launch.algorithm: star<1000<ring\n") == "star<1000<ring"
    for length, name in ((249, "star"), (250, "ring")):
        bytes_before = count_sent_bytes()
        tensor = torch.ones(length)
        dist.all_reduce(tensor)
        sent_bytes = count_sent_bytes() - bytes_before
        expected_elements = count_bytes_per_rank(build_algorithm(name, world.size), length)
        assert sent_bytes == 4 * expected_elements[world.rank], name
        assert tensor.eq(world.size).all(), name

    changes_file = folder / "attempts" / "0002" / CHANGES_FILE
    if world.is_main:
        changes_file.parent.mkdir(parents=True)
        changes_file.write_text('{"launch.algorithm": ["previous", "auto"], "seed": ["1", "2"]}')
    assert resolve_algorithm("launch.algorithm: previous\n") == "previous"
    changes = read_last_changes(folder)
    assert changes["launch.algorithm"][0] == "previous"
    assert changes["launch.algorithm"][1] not in ("previous", "auto")
    assert changes["seed"] == ("1", "2")
    dist.barrier()  # all ranks have read the file
    if world.is_main:
        shutil.rmtree(folder)


def check_subgroups(world: World) -> None:
    """Subgroups that only their members create, and groups of one rank."""
    rank = world.rank
    half = world.size // 2
    members = list(range(half)) if rank < half else list(range(half, world.size))
    group = make_group(members, use_local_synchronization=True)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(members)
    dist.broadcast(tensor.fill_(rank), members[-1], group=group)
    assert tensor.item() == members[-1]
    dist.destroy_process_group(group)

    single_rank_group = make_group([rank], use_local_synchronization=True)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        dist.all_reduce(tensor.fill_(3), op, group=single_rank_group)
        assert tensor.item() == 3


def check_unsupported_calls(world: World) -> None:
    """Unsupported calls raise a clear error before anything is sent, so that the next call works."""
    size = world.size
    pair = torch.zeros(2)
    integers = pair.long()
    fp8 = pair.to(torch.float8_e4m3fn)
    single = torch.zeros(1)
    premultiplied_sum: Any = dist._make_nccl_premul_sum(2.0)
    calls: dict[str, Callable[[], object]] = {
        "the reduction PREMUL_SUM; supported reductions: SUM": lambda: dist.all_reduce(pair, premultiplied_sum),
        "AVG of torch.int64 tensors; use SUM and divide": lambda: dist.all_reduce(integers, dist.ReduceOp.AVG),
        "BAND of torch.float32": lambda: dist.all_reduce(pair, dist.ReduceOp.BAND),
        "SUM of torch.float8_e4m3fn": lambda: dist.reduce(fp8, 0),
        "receiving from any rank": lambda: dist.recv(pair),
        "sparse": lambda: dist.all_reduce(pair.to_sparse()),
        "must be contiguous": lambda: dist.all_gather_into_tensor(torch.zeros(size + 1), single),
        "do not match": lambda: dist.all_gather([pair] * size, torch.zeros(3)),
        "does not support": lambda: dist.gather_into_tensor(torch.zeros(size), single),
    }
    if size > 1:
        uneven = torch.zeros(size + 1)
        calls["cannot be divided equally"] = lambda: dist.all_to_all_single(uneven, uneven)
    for message, call in calls.items():
        with pytest.raises(Exception, match=re.escape(message)):
            call()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


CASES: dict[str, Callable[[World], None]] = {
    "reductions": group_operations.check_reductions,
    "half_precision_sums": group_operations.check_half_precision_sums,
    "reproducible_bits": group_operations.check_reproducible_bits,
    "copies": group_operations.check_copies,
    "all_to_all": group_operations.check_all_to_all,
    "overlapping_arguments": group_operations.check_overlapping_arguments,
    "unusual_tensors": group_operations.check_unusual_tensors,
    "messages": messages.check_messages,
    "time_limits": messages.check_time_limits,
    "asynchronous_calls": messages.check_asynchronous_calls,
    "objects": group_operations.check_objects,
    "algorithm_choice": check_algorithm_choice,
    "subgroups": check_subgroups,
    "unsupported_calls": check_unsupported_calls,
}


def main(size: str, transport: Any, *names: str) -> int:
    cases = dict(CASES)
    if not names or not cases.keys() >= set(names):
        from tests.harness.ranks import torch_features  # takes seconds to import

        cases |= torch_features.CASES

    selected_names = names or [name for name in cases if name != "ddp"]

    def execute_cases(world: World) -> None:
        assert world.backend == "builtin"
        assert dist.get_backend() == "builtin"
        for name in selected_names:
            torch.manual_seed(0)
            cases[name](world)

    return run_on_ranks(execute_cases, int(size), dataclasses.replace(SETTINGS, transport=transport))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
