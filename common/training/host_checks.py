"""Health checks of the hosts: facts that each rank collects, and the problems that a comparison reveals."""

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

from common.checkpoint.stop_request import wait_for_all_ranks_to_exit
from common.data import prepare
from common.measure.timing import time_calls
from common.ranks.rendezvous import World
from common.runs import provenance
from common.runs.folder import convert_disk_errors, read_json
from common.system import host_memory, network
from common.system.errors import UserError

HostFacts = dict[str, Any]  # facts that one rank collected about its host

MIN_FREE_GB = 1.0
ALL_REDUCE_ELEMENTS = 4 << 20  # 16 MiB
MIN_ROUNDS = 3  # of a measured rate
MAX_ROUNDS = 12  # used if a host seems slow, which other programs may cause
MATRIX_SIDES = {"cpu": 384, "cuda": 4096}  # of the matrices whose product is measured
PRODUCT_SECONDS = 0.5  # of each round of products
SLOW_RATIO = 0.5  # a slow host has less than this fraction of the others' median rate
DISK_TEST_BYTES = 16 << 20
MIN_DISK_MB_PER_S = 5.0
MAX_CLOCK_SKEW_SECONDS = 1.0


def collect_basic_facts(world: World, folder: Path) -> HostFacts:
    """Collect the facts that take almost no time, for the start of every job. 1 GB is 1e9 bytes."""
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
        free_bytes, _ = torch.cuda.mem_get_info(world.device)
    else:
        device = "cpu"
        free_bytes, _ = host_memory.measure_available_memory()
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in provenance.PACKAGES:
        versions[package] = provenance.read_package_version(package)
    return {
        "rank": world.rank,
        "host": socket.gethostname(),
        "address": resolve_host_address(),
        "versions": versions,
        "device": device,
        "memory_free_gb": round(free_bytes / 1e9, 1),
        "cores": len(os.sched_getaffinity(0)),
        "cores_asked": int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) if world.launcher == "slurm" else 0,
        "disk_free_gb": measure_disk_free(folder),
    }


def check_hosts(world: World, folder: Path, *, mixed: bool) -> None:
    """Compare the hosts before training. All ranks call it. With `mixed` the devices may differ.

    Raises UserError, which on rank 0 names the host and its problem.
    """
    facts = world.gather(collect_basic_facts(world, folder))
    problems = []
    if world.is_main:
        problems = find_problems(facts, len(set(world.hosts)), mixed=mixed)
    if world.broadcast(bool(problems)):
        wait_for_all_ranks_to_exit()
        raise UserError("; ".join(problems) or "another host has a problem; see the error of rank 0")


def resolve_host_address() -> str:
    """Return the address to which this host's name resolves; empty if it does not resolve."""
    try:
        return network.resolve_ipv4(socket.gethostname())
    except OSError:
        return ""


def measure_disk_free(folder: Path) -> float | None:
    """Return the free GB of the disk of the run folders; None if the folder cannot be reached."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return round(shutil.disk_usage(folder).free / 1e9, 1)
    except OSError:
        return None


def check_all_reduce(world: World) -> HostFacts:
    """Check the sum of an all-reduce and measure its GB/s, the best of several rounds. All ranks call it."""
    expected = world.size * (world.size + 1) / 2
    values = torch.empty(ALL_REDUCE_ELEMENTS, device=world.device)
    correct = True

    def fill() -> None:
        values.fill_(float(world.rank + 1))
        dist.barrier()

    def reduce_and_check() -> None:
        nonlocal correct
        dist.all_reduce(values)
        correct = correct and bool((values == expected).all())

    seconds = min(time_calls(reduce_and_check, world.device, MIN_ROUNDS, warm_up=0, prepare=fill))
    return {"all_reduce_right": correct, "all_reduce_gb_per_s": round(values.nbytes / seconds / 1e9, 2)}


def check_matrix_product(world: World) -> HostFacts:
    """Check that a matrix product is finite and repeatable, and measure its GFLOP/s. All ranks call it.

    The rate is that of the best round. A round is long enough to reveal a host whose processor is shared with other
    programs. More rounds follow if a host seems slow: a host that really is slow stays so.
    """
    generator = torch.Generator().manual_seed(0)
    side = MATRIX_SIDES[world.device.type]
    left, right = torch.randn(2, side, side, generator=generator).to(world.device)
    expected = left @ right
    finite = bool(expected.isfinite().all())
    repeatable = True
    best_rate = 0.0  # products/s

    def multiply_eight_times() -> None:
        nonlocal repeatable
        for _ in range(8):
            product = left @ right
        repeatable = repeatable and bool(torch.equal(expected, product))

    for number in range(MAX_ROUNDS):
        dist.barrier()
        times = time_calls(multiply_eight_times, world.device, sys.maxsize, warm_up=0, budget=PRODUCT_SECONDS)
        best_rate = max(best_rate, 8 * len(times) / sum(times))
        rates = world.gather([world.device.type, best_rate])
        slow = [i for i, (_, rate) in enumerate(rates) if rate < SLOW_RATIO * compute_usual_rate(rates, i)]
        if not world.broadcast(bool(slow)) and number + 1 >= MIN_ROUNDS:
            break
    gflops = best_rate * 2 * side**3 / 1e9
    return {"product_finite": finite, "product_same": repeatable, "gflop_per_s": round(gflops, 1)}


def sample_clock(world: World) -> HostFacts:
    """Read this host's clock in seconds, five times, each just after a barrier. All ranks call it."""
    times = []
    for _ in range(5):
        dist.barrier()
        times.append(time.time())
    return {"times": times}


def measure_disk_writing(folder: Path) -> HostFacts:
    """Measure the MB/s at which run folders are written through to the disk, or return the error."""
    file = folder / f".doctor-{secrets.token_hex(4)}"
    block = os.urandom(1 << 20)
    try:
        with convert_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            with open(file, "wb") as handle:
                for _ in range(DISK_TEST_BYTES >> 20):
                    handle.write(block)
                handle.flush()
                os.fsync(handle.fileno())
        seconds = time.perf_counter() - start
        return {"disk_mb_per_s": round(DISK_TEST_BYTES / 1e6 / seconds), "disk_error": ""}
    except UserError as error:
        return {"disk_mb_per_s": None, "disk_error": str(error)}
    finally:
        file.unlink(missing_ok=True)


def collect_data_checksums(cache: Path) -> HostFacts:
    """Return the expected checksums of the prepared data sets in a folder, and the files that do not match."""
    checksums = {}
    damaged = []
    for manifest in sorted(cache.glob("*/manifest.json")):
        expected = read_json(manifest).get("sha256")
        if not isinstance(expected, dict):
            damaged.append(str(manifest))
            continue
        checksums[manifest.parent.name] = "".join(str(checksum)[:4] for checksum in expected.values())
        for part, checksum in expected.items():
            file = manifest.parent / f"{part}.npy"
            if not file.is_file() or prepare.hash_file(file) != checksum:
                damaged.append(str(file))
    return {"data": checksums, "data_damaged": damaged}


def collect_thorough_facts(world: World, runs: Path, cache: Path) -> HostFacts:
    """Collect all facts, for a long job. All ranks call it; the first rank of each host examines its disks."""
    facts = collect_basic_facts(world, runs)
    facts |= check_all_reduce(world)
    facts |= check_matrix_product(world)
    facts |= sample_clock(world)
    if world.local_rank == 0:
        facts |= measure_disk_writing(runs)
        facts |= collect_data_checksums(cache)
    dist.barrier()
    return facts


def find_problems(facts: Sequence[HostFacts], hosts: int, *, mixed: bool = False) -> list[str]:
    """Return one line per problem, which names the host. Facts that were not collected are not checked.

    With `mixed`, a different device is no problem.
    """
    problems = find_differences(facts)
    if not mixed:
        problems += find_other_devices(facts)
    for rank_facts in facts:
        problems += find_host_problems(rank_facts, hosts)
    return problems + find_speed_problems(facts) + find_clock_problems(facts)


def format_host(facts: HostFacts) -> str:
    """Return host and rank of the facts, such as `node1 (rank 0)`."""
    return f"{facts['host']} (rank {facts['rank']})"


def find_differences(facts: Sequence[HostFacts]) -> list[str]:
    """Return one line per rank whose package versions or data differ from the others'."""
    problems = []
    for package in facts[0]["versions"]:
        versions = [rank_facts["versions"].get(package) for rank_facts in facts]
        for host, version, usual in find_unusual_values(facts, versions):
            problems.append(f"{host} has {package} {version}, the others {usual}; use one .venv")
    with_data = [rank_facts for rank_facts in facts if "data" in rank_facts]
    names = set[str]()
    for rank_facts in with_data:
        names |= rank_facts["data"].keys()
    for name in sorted(names):
        checksums = [rank_facts["data"].get(name) for rank_facts in with_data]
        for host, _, _ in find_unusual_values(with_data, checksums):
            problems.append(
                f"{host} has other data in {name} than the others, or none; "
                "data.cache must be one folder that all hosts share"
            )
    return problems


def find_other_devices(facts: Sequence[HostFacts]) -> list[str]:
    """Return one line per rank whose device is not the most frequent one."""
    devices = find_unusual_values(facts, [rank_facts["device"] for rank_facts in facts])
    remedy = "use hosts with the same devices, or set launch.mixed=true"
    return [f"{host} has {device}, the others {usual}; {remedy}" for host, device, usual in devices]


def find_unusual_values(facts: Sequence[HostFacts], values: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """Return (host, its value, most frequent value) for each host whose value is not the most frequent one."""
    usual, _ = Counter(values).most_common(1)[0]
    pairs = zip(facts, values, strict=True)
    return [(format_host(rank_facts), value, usual) for rank_facts, value in pairs if value != usual]


def find_host_problems(facts: HostFacts, hosts: int) -> list[str]:
    """Return the problems of one host that are visible without a comparison."""
    host = format_host(facts)
    problems = []
    if not facts["address"]:
        problems.append(f"{host} cannot resolve its own name; add it to /etc/hosts or DNS")
    elif hosts > 1 and facts["address"].startswith("127."):
        problems.append(f"{host} resolves its own name to {facts['address']}, which other hosts cannot reach")
    if facts["cores"] < facts["cores_asked"]:
        cores = f"{facts['cores']} cores, but {facts['cores_asked']} were requested"
        problems.append(f"{host} may use {cores}; see cluster.cpus")

    if facts.get("disk_error"):
        problems.append(f"{host} {facts['disk_error']}")
    elif facts["disk_free_gb"] is None or facts["disk_free_gb"] < MIN_FREE_GB:
        free_gb = facts["disk_free_gb"]
        problems.append(f"{host} has {free_gb} GB free for run folders; free space, or set runs=<elsewhere>")
    elif (facts.get("disk_mb_per_s") or MIN_DISK_MB_PER_S) < MIN_DISK_MB_PER_S:
        problems.append(f"{host} writes run folders at {facts['disk_mb_per_s']} MB/s; set runs=<a faster disk>")
    for file in facts.get("data_damaged", []):
        problems.append(f"{host}: {file} is damaged (checksum differs); delete its folder to prepare the data again")

    if facts.get("all_reduce_right") is False:
        problems.append(f"{host} got a wrong sum from an all-reduce; check its network and memory")
    if facts.get("product_finite") is False or facts.get("product_same") is False:
        problems.append(f"{host} got different or infinite products of the same matrices; do not compute on it")
    return problems


def compute_usual_rate(rates: Sequence[tuple[str, float]], rank: int) -> float:
    """Return the median rate of the other ranks with the device of `rank`; 0 if there are none.

    `rates` has the device and GFLOP/s of each rank.
    """
    device, _ = rates[rank]
    other_rates = [rate for i, (name, rate) in enumerate(rates) if i != rank and name == device]
    return median(other_rates) if other_rates else 0.0


def find_speed_problems(facts: Sequence[HostFacts]) -> list[str]:
    """Return one line per host that computes much slower than the others with the same device."""
    problems = []
    measured = [rank_facts for rank_facts in facts if "gflop_per_s" in rank_facts]
    rates = [(rank_facts["device"], rank_facts["gflop_per_s"]) for rank_facts in measured]
    for i, (_, rate) in enumerate(rates):
        usual = compute_usual_rate(rates, i)
        if rate < SLOW_RATIO * usual:
            problems.append(
                f"{format_host(measured[i])} is slow: matrix products at {rate} GFLOP/s, the others {usual}; "
                "check it for other programs and thermal throttling"
            )
    return problems


def find_clock_problems(facts: Sequence[HostFacts]) -> list[str]:
    """Return one line per host whose clock differs from the median. The first rank of a host stands for its clock."""
    by_host: dict[str, HostFacts] = {}
    for rank_facts in facts:
        if rank_facts.get("times"):
            by_host.setdefault(rank_facts["host"], rank_facts)
    clocks = list(by_host.values())
    if len(clocks) < 2:
        return []

    # A rank that was delayed once reads a late time in one round; a wrong clock is wrong in every round.
    rounds = list(zip(*(clock["times"] for clock in clocks), strict=True))
    if len(clocks) == 2:  # either may be wrong
        gap = min((second - first for first, second in rounds), key=abs)
        hosts = f"{format_host(clocks[1])} and {format_host(clocks[0])}"
        problem = f"{hosts}: their clocks are {gap:+.1f} s apart; set up NTP"
        return [problem] if abs(gap) > MAX_CLOCK_SKEW_SECONDS else []

    problems = []
    for i, clock in enumerate(clocks):
        gap = min((times[i] - median(times) for times in rounds), key=abs)
        if abs(gap) > MAX_CLOCK_SKEW_SECONDS:
            problems.append(f"{format_host(clock)}: its clock is {gap:+.1f} s from the others'; set up NTP")
    return problems
