"""Is every host sound? What each process finds out about its own, and what is wrong when they are laid side by side."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import network, provenance
from common.launch import World

SPACE_GB = 1.0  # less than this free is a problem
SIZE = 4 << 20  # elements of the all-reduce whose bandwidth is measured: 16 MiB
ROUNDS = 3


def short(world: World, folder: Path) -> dict[str, Any]:
    """What costs next to nothing, for the start of every job."""
    cuda = world.device.type == "cuda"
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "address": own_address(),
        "versions": {"python": platform.python_version()} | {p: provenance.version(p) for p in provenance.PACKAGES},
        "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
        "memory_free_gb": round(torch.cuda.mem_get_info(world.device)[0] / 1e9, 1) if cuda else None,
        "cores": len(os.sched_getaffinity(0)),
        "cores_asked": int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) if world.how == "slurm" else 0,
        "disk_free_gb": disk_free(folder),
    }


def own_address() -> str:
    """The address that this host's name resolves to; empty if it resolves to none."""
    try:
        return network.resolve(socket.gethostname())
    except OSError:
        return ""


def disk_free(folder: Path) -> float | None:
    """Gigabytes free where runs are written; None where the folder cannot be reached."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return round(shutil.disk_usage(folder).free / 1e9, 1)
    except OSError:
        return None


def all_reduce(world: World) -> dict[str, Any]:
    """Whether an all-reduce adds up, and how many bytes a second it carries. All ranks call it."""
    expected = world.size * (world.size + 1) / 2
    right, best = True, float("inf")
    for _ in range(ROUNDS):
        values = torch.full((SIZE,), float(world.rank + 1), device=world.device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        right = right and bool((values == expected).all())
        best = min(best, time.perf_counter() - start)
    return {"all_reduce_right": right, "all_reduce_gb_per_s": round(SIZE * 4 / best / 1e9, 2)}


def problems(facts: Sequence[dict[str, Any]], hosts: int) -> list[str]:
    """What is wrong, one line each, naming the host."""
    found = []
    for name in facts[0]["versions"]:
        counts = Counter(str(f["versions"].get(name)) for f in facts)
        usual, _ = counts.most_common(1)[0]
        found += [
            f"{f['host']} (rank {f['rank']}) has {name} {f['versions'].get(name)}, the others {usual}; use one .venv"
            for f in facts
            if str(f["versions"].get(name)) != usual
        ]
    devices = Counter(f["device"] for f in facts).most_common(1)[0][0]
    for f in facts:
        where = f"{f['host']} (rank {f['rank']})"
        if not f["address"]:
            found.append(f"{where} does not know its own name; add it to /etc/hosts or DNS")
        elif hosts > 1 and f["address"].startswith("127."):
            found.append(f"{where} resolves its own name to {f['address']}, which other hosts cannot reach")
        if f["device"] != devices:
            found.append(f"{where} has {f['device']}, the others {devices}")
        if f["cores"] < f["cores_asked"]:
            found.append(f"{where} may use {f['cores']} cores, {f['cores_asked']} were asked for; see cluster.cpus")
        if f["disk_free_gb"] is None or f["disk_free_gb"] < SPACE_GB:
            found.append(
                f"{where} has {f['disk_free_gb']} GB free for run folders; free space, or set runs=<elsewhere>"
            )
        if f.get("all_reduce_right") is False:
            found.append(f"{where} got a wrong sum from an all-reduce; its network or memory is not sound")
    return found
