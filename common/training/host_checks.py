"""Health checks of hosts, based on facts that each rank collects about its host.

Rank 0 compares the facts of all ranks to find problems.
"""

from __future__ import annotations

import contextlib
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

from common.checkpoint.stop_request import synchronize_before_exit
from common.data import prepare
from common.measure.timing import time_calls
from common.ranks.rendezvous import World
from common.runs import provenance
from common.runs.folder import convert_disk_errors, read_json
from common.system import host_memory, network
from common.system.errors import UserError

HostFacts = dict[str, Any]  # facts about a host, as collected by one rank on this host

MIN_FREE_GB = 1.0
ALL_REDUCE_ELEMENTS = 4 << 20  # 16 MiB of float32 values
MIN_ROUNDS = 3  # minimum number of rounds in which a rate is measured
MAX_ROUNDS = 12  # maximum number of rounds; more than MIN_ROUNDS are measured only if a host seems slow
MATRIX_SIDES = {"cpu": 384, "cuda": 4096}  # rows and columns of the matrices whose product is timed
PRODUCT_SECONDS = 0.5  # duration of one round of matrix products
SLOW_RATIO = 0.5  # a host is slow if its rate is below this fraction of the median rate of the other ranks
DISK_TEST_BYTES = 16 << 20
MIN_DISK_MB_PER_S = 5.0
MAX_CLOCK_SKEW_SECONDS = 1.0


def collect_basic_host_facts(world: World, folder: Path) -> HostFacts:
    """Collect the facts about this host that take almost no time to obtain.

    The basic facts are checked at the start of every job on several hosts. Sizes are in GB (1e9 bytes).
    """
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
        "address": None if world.launcher == "torchrun" else resolve_host_address(),  # torchrun uses the master address
        "versions": versions,
        "device": device,
        "memory_free_gb": round(free_bytes / 1e9, 1),
        "cores": len(os.sched_getaffinity(0)),
        "cores_asked": int(os.environ.get("SLURM_CPUS_PER_TASK", "0")) if world.launcher == "slurm" else 0,
        "disk_free_gb": measure_free_disk_gb(folder),
    }


def check_hosts(world: World, folder: Path, *, mixed: bool) -> None:
    """Compare the hosts before training, and raise UserError if a host has a problem.

    On rank 0, the error names the host and its problem. If `mixed` is True, ranks may have different devices. All ranks
    must call this function.
    """
    facts = world.gather(collect_basic_host_facts(world, folder))
    problems = []
    if world.is_main:
        problems = find_problems(facts, len(set(world.hosts)), mixed=mixed)
    if world.broadcast(bool(problems)):
        synchronize_before_exit()
        raise UserError("; ".join(problems) or "another host has a problem; see the error message of rank 0")


def resolve_host_address() -> str:
    """Return the IPv4 address to which this host's name resolves, or an empty string."""
    try:
        return network.resolve_ipv4(socket.gethostname())
    except OSError:
        return ""


def measure_free_disk_gb(folder: Path) -> float | None:
    """Return the free disk space in GB, or None if the disk is not accessible.

    `folder` is a folder on the disk. The folder does not have to exist.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return round(shutil.disk_usage(folder).free / 1e9, 1)
    except OSError:
        return None


def check_all_reduce(world: World) -> HostFacts:
    """Check the result of an all-reduce, and measure its throughput in GB/s.

    Several rounds are measured, and the throughput of the fastest round is returned. All ranks must call this function.
    """
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
    """Check that a matrix product is finite and reproducible, and measure its rate in GFLOP/s.

    The rate of the fastest round is returned. A round is long enough to reveal a host whose processor is shared with
    other programs. If a host seems slow, more rounds are measured, because another program may have slowed the host
    only temporarily. All ranks must call this function.
    """
    generator = torch.Generator().manual_seed(0)
    side = MATRIX_SIDES[world.device.type]
    left, right = torch.randn(2, side, side, generator=generator).to(world.device)
    expected = left @ right
    finite = bool(expected.isfinite().all())
    repeatable = True
    best_rate = 0.0  # in products/s

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
        slow = [i for i, (_, rate) in enumerate(rates) if rate < SLOW_RATIO * compute_median_of_other_ranks(rates, i)]
        # Only rank 0 knows the rates of all ranks, and broadcasts whether a host seems slow.
        if not world.broadcast(bool(slow)) and number + 1 >= MIN_ROUNDS:
            break
    gflops = best_rate * 2 * side**3 / 1e9
    return {"product_finite": finite, "product_same": repeatable, "gflop_per_s": round(gflops, 1)}


def sample_host_clock(world: World) -> HostFacts:
    """Read this host's clock five times, each time immediately after a barrier.

    The times are in seconds since the epoch. All ranks must call this function.
    """
    times = []
    for _ in range(5):
        dist.barrier()
        times.append(time.time())
    return {"times": times}


def measure_disk_write_speed(folder: Path) -> HostFacts:
    """Measure the speed in MB/s at which a file can be written to a folder.

    The measurement includes an fsync. If writing fails, the error message is returned instead of the speed.
    """
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
        with contextlib.suppress(OSError):  # a read-only disk refuses this too, and does not contain the file
            file.unlink(missing_ok=True)


def collect_data_checksums(cache: Path) -> HostFacts:
    """Return the expected checksums of the prepared data sets, and all damaged files.

    `cache` is the folder of the prepared data sets. A file is damaged if it is missing or its checksum does not match.
    """
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


def collect_all_host_facts(world: World, runs: Path, cache: Path) -> HostFacts:
    """Collect all facts about this host, including those that take several seconds to measure.

    All ranks must call this function. Only the first rank of each host examines the disks of the host.
    """
    facts = collect_basic_host_facts(world, runs)
    facts |= check_all_reduce(world)
    facts |= check_matrix_product(world)
    facts |= sample_host_clock(world)
    if world.local_rank == 0:
        facts |= measure_disk_write_speed(runs)
        facts |= collect_data_checksums(cache)
    dist.barrier()
    return facts


def find_problems(facts: Sequence[HostFacts], hosts: int, *, mixed: bool = False) -> list[str]:
    """Return one line for each problem in the facts of all ranks.

    Every line names the host that has the problem. `hosts` is the number of different hosts. A check is skipped if its
    facts were not collected. If `mixed` is True, ranks may have different devices.
    """
    problems = find_version_and_data_differences(facts)
    if not mixed:
        problems += find_unusual_devices(facts)
    for rank_facts in facts:
        problems += find_host_problems(rank_facts, hosts)
    return problems + find_speed_problems(facts) + find_clock_problems(facts)


def format_host(facts: HostFacts) -> str:
    """Return the host and rank that collected the facts, such as `node1 (rank 0)`."""
    return f"{facts['host']} (rank {facts['rank']})"


def find_version_and_data_differences(facts: Sequence[HostFacts]) -> list[str]:
    """Return one line per rank whose package versions or data differ from other ranks."""
    problems = []
    for package in facts[0]["versions"]:
        versions = [rank_facts["versions"].get(package) for rank_facts in facts]
        for host, version, usual in find_unusual_values(facts, versions):
            problems.append(
                f"{host} has {package} {version}, but other ranks have {usual}; use the same .venv on all hosts"
            )

    with_data = [rank_facts for rank_facts in facts if "data" in rank_facts]
    names = set[str]()
    for rank_facts in with_data:
        names |= rank_facts["data"].keys()
    for name in sorted(names):
        checksums = [rank_facts["data"].get(name) for rank_facts in with_data]
        for host, _, _ in find_unusual_values(with_data, checksums):
            problems.append(
                f"{host}: the data set {name} is missing or differs from that of other hosts; "
                "data.cache must be a folder that all hosts share"
            )
    return problems


def find_unusual_devices(facts: Sequence[HostFacts]) -> list[str]:
    """Return one line per rank whose device is not the most common one."""
    devices = find_unusual_values(facts, [rank_facts["device"] for rank_facts in facts])
    remedy = "use hosts with the same devices, or set launch.mixed=true"
    return [f"{host} has {device}, but other ranks have {usual}; {remedy}" for host, device, usual in devices]


def find_unusual_values(facts: Sequence[HostFacts], values: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """Return (host, value, most common value) for each rank with a different value."""
    usual, _ = Counter(values).most_common(1)[0]
    pairs = zip(facts, values, strict=True)
    return [(format_host(rank_facts), value, usual) for rank_facts, value in pairs if value != usual]


def find_host_problems(facts: HostFacts, hosts: int) -> list[str]:
    """Return the problems of a host that can be found without comparing hosts."""
    host = format_host(facts)
    problems = []
    address = facts["address"]
    if address == "":
        problems.append(f"{host} cannot resolve its own name; add the name to /etc/hosts or DNS")
    elif hosts > 1 and address and address.startswith("127."):
        problem = f"resolves its own name to {address}, which other hosts cannot reach"
        problems.append(f"{host} {problem}; correct the entry in /etc/hosts or DNS")
    if facts["cores"] < facts["cores_asked"]:
        problem = f"can use only {facts['cores']} of the {facts['cores_asked']} requested cores"
        problems.append(f"{host} {problem}; check cluster.cpus")

    if facts.get("disk_error"):
        problems.append(f"{host} {facts['disk_error']}")
    elif facts["disk_free_gb"] is None:
        problems.append(f"{host} cannot access the disk of the run folders; check its mount, or set runs=<folder>")
    elif facts["disk_free_gb"] < MIN_FREE_GB:
        problem = f"has only {facts['disk_free_gb']} GB free on the disk of the run folders"
        problems.append(f"{host} {problem}; free some space, or set runs=<another folder>")
    elif facts.get("disk_mb_per_s", MIN_DISK_MB_PER_S) < MIN_DISK_MB_PER_S:
        problem = f"writes run folders at only {facts['disk_mb_per_s']} MB/s"
        problems.append(f"{host} {problem}; set runs=<folder on a faster disk>")
    for file in facts.get("data_damaged", []):
        problems.append(f"{host}: {file} is damaged (checksum differs); delete its folder to prepare the data again")

    if facts.get("all_reduce_right") is False:
        problems.append(f"{host} got a wrong sum from an all-reduce; check the network and memory of this host")
    if facts.get("product_finite") is False or facts.get("product_same") is False:
        problems.append(f"{host} computed different or infinite products of the same matrices; do not use this host")
    return problems


def compute_median_of_other_ranks(rates: Sequence[tuple[str, float]], rank: int) -> float:
    """Return the median rate of the other ranks with the same device as `rank`.

    Returns 0 if no other rank has the same device. `rates` contains the device and the rate of every rank. The rates
    can have any unit.
    """
    device, _ = rates[rank]
    other_rates = [rate for i, (name, rate) in enumerate(rates) if i != rank and name == device]
    return median(other_rates) if other_rates else 0.0


def find_speed_problems(facts: Sequence[HostFacts]) -> list[str]:
    """Return one line per rank that is much slower than ranks with the same device."""
    problems = []
    measured = [rank_facts for rank_facts in facts if "gflop_per_s" in rank_facts]
    rates = [(rank_facts["device"], rank_facts["gflop_per_s"]) for rank_facts in measured]
    for i, (_, rate) in enumerate(rates):
        usual = compute_median_of_other_ranks(rates, i)
        if rate < SLOW_RATIO * usual:
            problems.append(
                f"{format_host(measured[i])} is slow: matrix products at {rate} GFLOP/s, compared with {usual} GFLOP/s "
                "on other ranks; check this host for other programs and thermal throttling"
            )
    return problems


def find_clock_problems(facts: Sequence[HostFacts]) -> list[str]:
    """Return one line per host whose clock differs from the median clock of all hosts.

    If there are only two hosts, their clocks are compared to each other. For each host, only the times of the first
    rank on the host are used.
    """
    by_host: dict[str, HostFacts] = {}
    for rank_facts in facts:
        if rank_facts.get("times"):
            by_host.setdefault(rank_facts["host"], rank_facts)
    clocks = list(by_host.values())
    if len(clocks) < 2:
        return []

    # A delayed rank reads a late time in some rounds only, but a wrong clock is wrong in every round. The smallest
    # difference over all rounds therefore reveals a wrong clock.
    rounds = list(zip(*(clock["times"] for clock in clocks), strict=True))
    if len(clocks) == 2:  # either clock may be the wrong one
        gap = min((second - first for first, second in rounds), key=abs)
        hosts = f"{format_host(clocks[1])} and {format_host(clocks[0])}"
        problem = f"{hosts}: their clocks differ by {gap:+.1f} s; set up NTP"
        return [problem] if abs(gap) > MAX_CLOCK_SKEW_SECONDS else []

    problems = []
    for i, clock in enumerate(clocks):
        gap = min((times[i] - median(times) for times in rounds), key=abs)
        if abs(gap) > MAX_CLOCK_SKEW_SECONDS:
            problems.append(f"{format_host(clock)}: its clock differs by {gap:+.1f} s from other hosts; set up NTP")
    return problems
