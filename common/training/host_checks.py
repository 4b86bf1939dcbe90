"""Health checks of the hosts: facts that each rank collects about its own, and the problems that comparing shows."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from common.checkpoint.stop_request import synchronize_exit
from common.core import host_memory, network
from common.core.errors import UserError
from common.data import prepare
from common.distributed.rendezvous import World
from common.measure.timing import time_calls
from common.runs import provenance
from common.runs.folder import disk_errors, read_json

SPACE_GB = 1.0  # less than this free is a problem
SIZE = 4 << 20  # elements of the all-reduce whose bandwidth is measured: 16 MiB
ROUNDS, MOST_ROUNDS = 3, 12  # of a rate; the larger number where a host seems slow, which other programs may cause
SIDE = {"cpu": 384, "cuda": 4096}  # of the matrices whose product is measured
PRODUCT_SECONDS = 0.5  # of each round of products
SLOW = 0.5  # of the median rate of the others: a slow host
WRITTEN = 16 << 20  # bytes that are written to measure a disk
SLOW_DISK = 5.0  # MB/s
SKEW = 1.0  # seconds between two clocks


def collect_basic_facts(world: World, folder: Path) -> dict[str, Any]:
    """Collect the facts that cost next to nothing, for the start of every job. GB are 1e9 bytes."""
    cuda = world.device.type == "cuda"
    free_bytes = torch.cuda.mem_get_info(world.device)[0] if cuda else host_memory.measure_available_memory()[0]
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "address": resolve_own_address(),
        "versions": {"python": platform.python_version()}
        | {p: provenance.read_package_version(p) for p in provenance.PACKAGES},
        "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
        "memory_free_gb": round(free_bytes / 1e9, 1),
        "cores": len(os.sched_getaffinity(0)),
        "cores_asked": int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) if world.launcher == "slurm" else 0,
        "disk_free_gb": measure_disk_free(folder),
    }


def check_hosts(world: World, folder: Path, *, mixed: bool) -> None:
    """Compare the hosts before training; all ranks call it. Raises UserError, on rank 0 naming the unsound host.

    With `mixed` they may have different devices.
    """
    facts = world.gather(collect_basic_facts(world, folder))
    wrong = world.broadcast(find_problems(facts, len(set(world.hosts)), mixed=mixed) if world.is_main else None)
    if wrong:
        synchronize_exit()
        raise UserError("; ".join(wrong) if world.is_main else "another host has a problem; rank 0 names it")


def resolve_own_address() -> str:
    """Return the address that this host's name resolves to; empty if it resolves to none."""
    try:
        return network.resolve_ipv4(socket.gethostname())
    except OSError:
        return ""


def measure_disk_free(folder: Path) -> float | None:
    """Return the GB that are free where runs are written; None where the folder cannot be reached."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return round(shutil.disk_usage(folder).free / 1e9, 1)
    except OSError:
        return None


def check_all_reduce(world: World) -> dict[str, Any]:
    """Check the sum of an all-reduce and measure its GB/s, the best of a few rounds. All ranks call it."""
    expected = world.size * (world.size + 1) / 2
    values, right = torch.empty(SIZE, device=world.device), True

    def fill() -> None:
        values.fill_(float(world.rank + 1))
        dist.barrier()

    def reduce_and_check() -> None:
        nonlocal right
        dist.all_reduce(values)
        right = right and bool((values == expected).all())

    best = min(time_calls(reduce_and_check, world.device, ROUNDS, warm_up=0, prepare=fill))
    return {"all_reduce_right": right, "all_reduce_gb_per_s": round(SIZE * 4 / best / 1e9, 2)}


def check_matrix_product(world: World) -> dict[str, Any]:
    """Check that a matrix product is finite and the same each time, and measure its GFLOP/s, the best of a few rounds.

    A round is long enough for a host whose processor is taken away now and then to show it. Where a host seems slow,
    there are more rounds: one that is slow stays so. All ranks call it.
    """
    draw, side = torch.Generator().manual_seed(0), SIDE[world.device.type]
    left, right = (torch.randn(side, side, generator=draw).to(world.device) for _ in range(2))
    first = left @ right
    finite, same, best = bool(first.isfinite().all()), True, 0.0

    def multiply_eight_times() -> None:
        nonlocal same
        for _ in range(8):
            last = left @ right
        same = same and bool(torch.equal(first, last))

    for number in range(MOST_ROUNDS):
        dist.barrier()
        times = time_calls(multiply_eight_times, world.device, sys.maxsize, warm_up=0, budget=PRODUCT_SECONDS)
        best = max(best, 8 * len(times) / sum(times))
        rates = world.gather([world.device.type, best])
        slow = [rate < SLOW * compute_usual_rate(rates, i) for i, (_, rate) in enumerate(rates)]
        if not world.broadcast(any(slow)) and number + 1 >= ROUNDS:
            break
    return {"product_finite": finite, "product_same": same, "gflop_per_s": round(best * 2 * side**3 / 1e9, 1)}


def sample_clock(world: World) -> dict[str, Any]:
    """Read this host's clock, in seconds, at moments that ranks share but for a barrier's delay. All ranks call it."""
    times = []
    for _ in range(5):
        dist.barrier()
        times.append(time.time())
    return {"times": times}


def measure_disk_writing(folder: Path) -> dict[str, Any]:
    """Measure the MB/s at which run folders are written, to the disk itself, or return why they cannot be."""
    file = folder / f".doctor-{secrets.token_hex(4)}"
    block = os.urandom(1 << 20)
    try:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            with open(file, "wb") as handle:
                for _ in range(WRITTEN >> 20):
                    handle.write(block)
                handle.flush()
                os.fsync(handle.fileno())
        return {"disk_mb_per_s": round(WRITTEN / 1e6 / (time.perf_counter() - start)), "disk_error": ""}
    except UserError as error:
        return {"disk_mb_per_s": None, "disk_error": str(error)}
    finally:
        file.unlink(missing_ok=True)


def collect_data_checksums(cache: Path) -> dict[str, Any]:
    """Return the checksums that the prepared sets in a folder should have, and the files that have others."""
    sets, damaged = {}, []
    for manifest in sorted(cache.glob("*/manifest.json")):
        known = read_json(manifest).get("sha256")
        if not isinstance(known, dict):
            damaged.append(str(manifest))
            continue
        sets[manifest.parent.name] = "".join(str(value)[:4] for value in known.values())
        for part, expected in known.items():
            file = manifest.parent / f"{part}.npy"
            if not file.is_file() or prepare.hash_file(file) != expected:
                damaged.append(str(file))
    return {"data": sets, "data_damaged": damaged}


def collect_thorough_facts(world: World, runs: Path, cache: Path) -> dict[str, Any]:
    """Collect all facts, for a long job. All ranks call it; the first of each host looks at its disks."""
    found = (
        collect_basic_facts(world, runs) | check_all_reduce(world) | check_matrix_product(world) | sample_clock(world)
    )
    if world.local_rank == 0:
        found |= measure_disk_writing(runs) | collect_data_checksums(cache)
    dist.barrier()
    return found


def find_problems(facts: Sequence[dict[str, Any]], hosts: int, *, mixed: bool = False) -> list[str]:
    """Return one line for each problem, which names the host. Facts that were not collected are left out.

    With `mixed` another device is none.
    """
    found = find_differences(facts) + ([] if mixed else find_other_devices(facts))
    for f in facts:
        found += find_host_problems(f, hosts)
    return found + find_speed_problems(facts) + find_clock_problems(facts)


def format_host(f: dict[str, Any]) -> str:
    """Return host and rank of the facts, as in `node1 (rank 0)`."""
    return f"{f['host']} (rank {f['rank']})"


def find_differences(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the differences in versions and data."""
    found = []
    for package in facts[0]["versions"]:
        for where, own, usual in find_unusual_values(facts, [f["versions"].get(package) for f in facts]):
            found.append(f"{where} has {package} {own}, the others {usual}; use one .venv")
    looked = [f for f in facts if "data" in f]
    for prepared in sorted({key for f in looked for key in f["data"]}):
        for where, _, _ in find_unusual_values(looked, [f["data"].get(prepared) for f in looked]):
            found.append(
                f"{where} has other data in {prepared} than the others, or none; "
                "data.cache must be one folder that all hosts share"
            )
    return found


def find_other_devices(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each rank whose device is another one than most have."""
    devices = find_unusual_values(facts, [f["device"] for f in facts])
    remedy = "take hosts with the same devices, or join them by launch.mixed=true"
    return [f"{where} has {own}, the others {usual}; {remedy}" for where, own, usual in devices]


def find_unusual_values(facts: Sequence[dict[str, Any]], values: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """Return the name of each host whose value is not the most frequent one, its value, and that one."""
    usual, _ = Counter(values).most_common(1)[0]
    return [(format_host(f), own, usual) for f, own in zip(facts, values, strict=True) if own != usual]


def find_host_problems(f: dict[str, Any], hosts: int) -> list[str]:
    """Return the problems of one host alone."""
    found, where = [], format_host(f)
    if not f["address"]:
        found.append(f"{where} does not know its own name; add it to /etc/hosts or DNS")
    elif hosts > 1 and f["address"].startswith("127."):
        found.append(f"{where} resolves its own name to {f['address']}, which other hosts cannot reach")
    if f["cores"] < f["cores_asked"]:
        found.append(f"{where} may use {f['cores']} cores, {f['cores_asked']} were asked for; see cluster.cpus")
    if f.get("disk_error"):
        found.append(f"{where} {f['disk_error']}")
    elif f["disk_free_gb"] is None or f["disk_free_gb"] < SPACE_GB:
        found.append(f"{where} has {f['disk_free_gb']} GB free for run folders; free space, or set runs=<elsewhere>")
    elif (f.get("disk_mb_per_s") or SLOW_DISK) < SLOW_DISK:
        found.append(f"{where} writes run folders at {f['disk_mb_per_s']} MB/s; set runs=<a faster disk>")
    found += [
        f"{where}: {file} is damaged (checksum differs); delete its folder, it is prepared anew"
        for file in f.get("data_damaged", [])
    ]
    if f.get("all_reduce_right") is False:
        found.append(f"{where} got a wrong sum from an all-reduce; its network or memory is not sound")
    if f.get("product_finite") is False or f.get("product_same") is False:
        found.append(f"{where} got different or infinite products of the same matrices; do not compute on it")
    return found


def compute_usual_rate(rates: Sequence[tuple[str, float]], rank: int) -> float:
    """Return the median rate of the other ranks with the device of `rank`, 0 where there are none.

    `rates` are device and GFLOP/s of each rank.
    """
    others = [rate for i, (device, rate) in enumerate(rates) if i != rank and device == rates[rank][0]]
    return median(others) if others else 0.0


def find_speed_problems(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each host that computes much slower than the others with such a device."""
    found, measured = [], [f for f in facts if "gflop_per_s" in f]
    rates = [(f["device"], f["gflop_per_s"]) for f in measured]
    for i, f in enumerate(measured):
        usual = compute_usual_rate(rates, i)
        if f["gflop_per_s"] < SLOW * usual:
            found.append(
                f"{format_host(f)} is slow: matrix products at {f['gflop_per_s']} GFLOP/s, the others {usual}; "
                "look for other programs and for thermal throttling there"
            )
    return found


def find_clock_problems(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the clocks that show another time than most. All ranks of a host have one clock: the first tells of it."""
    looked = list({f["host"]: f for f in reversed(facts) if f.get("times")}.values())[::-1]
    if len(looked) < 2:
        return []
    rounds = list(zip(*(f["times"] for f in looked), strict=True))
    # a rank that is held up once is late; a clock that is wrong is wrong in every round
    gaps = [min((times[i] - median(times) for times in rounds), key=abs) for i in range(len(looked))]
    if len(looked) == 2:  # neither is most
        gap = min((times[1] - times[0] for times in rounds), key=abs)
        both = f"{format_host(looked[1])} and {format_host(looked[0])}: their clocks are {gap:+.1f} s apart; set up NTP"
        return [both] if abs(gap) > SKEW else []
    return [
        f"{format_host(f)}: its clock is {gap:+.1f} s from the others'; set up NTP"
        for f, gap in zip(looked, gaps, strict=True)
        if abs(gap) > SKEW
    ]
