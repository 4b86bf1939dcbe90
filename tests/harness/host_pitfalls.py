"""Mistakes about hosts, made by real ranks, for tests/pitfalls/: two real networks with a cable, and two nodes that
are only numbers.

python -m tests.harness.host_pitfalls NAME ...      prints what the ranks found, as JSON, by name
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.ranks import objects, rendezvous
from common.ranks.rank_info import RankInfo
from configs.shared import Launch
from slurm.local_cluster import namespaces
from tests.harness.ddp_pitfalls import attempt

SECONDS = 1.0
PATIENT = Launch(device="cpu", threads=1, setup_timeout=60, step_timeout=60)
ADDRESSES = ("10.0.0.1", "10.0.0.2")


def refusal() -> str:
    """Why two hosts cannot be made here; empty if they can."""
    user = ["--user", "--map-root-user"] if os.getuid() else []
    trial = ["unshare", *user, "--net", "--uts", "ip", "link", "add", "name", "a", "type", "veth"]
    try:
        return subprocess.run(trial, capture_output=True, text=True, check=False).stderr.strip()
    except OSError as error:
        return str(error)


def on_two_hosts(*works: Callable[[int], Any]) -> list[list[Any]]:
    """What one rank on each of two hosts finds in several tasks; a host has its own name and its own loopback."""
    folder = Path(tempfile.mkdtemp())
    if os.getuid():
        namespaces.become_root_in_new_namespace(os.getuid(), os.getgid())
    namespaces.unshare_namespaces("net")  # an ordinary user plugs cables only from a network of the own namespace
    ours, theirs = zip(*(socket.socketpair() for _ in ADDRESSES), strict=True)

    def run_host(number: int) -> None:
        def meet() -> None:
            theirs[number].send(b".")
            theirs[number].recv(1)

        namespaces.unshare_namespaces("net", "uts")
        socket.sethostname(f"host{number}")
        meet()  # then the cable is there
        namespaces.run_ip("link set lo up", f"addr add {ADDRESSES[number]}/24 dev eth0", "link set eth0 up")
        found = []
        for work in works:
            meet()
            found.append(attempt(functools.partial(work, number)))
        (folder / str(number)).write_text(json.dumps(found))

    pids = [namespaces.fork_child(functools.partial(run_host, number)) for number in range(2)]
    for line in theirs:
        line.close()
    ends = [f"name eth0 netns /proc/{pid}/ns/net" for pid in pids]
    for meeting in range(1 + len(works)):
        assert all(line.recv(1) for line in ours), "a host has ended"
        if meeting == 0:
            namespaces.run_ip(f"link add {ends[0]} type veth peer {ends[1]}")
        for line in ours:
            line.send(b".")
    assert [namespaces.wait_for_child(pid) for pid in pids] == [0, 0]
    return [json.loads((folder / str(number)).read_text()) for number in range(2)]


def loopback_of_each_host() -> Any:
    """The mistake: every host is told MASTER_ADDR=127.0.0.1."""

    def meet_at_loopback(rank: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"}
        limit = datetime.timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)

    def meet_at_rank_0(rank: int) -> Any:
        known: Any = {"nodes": 2, "launcher": "slurm", "master": ADDRESSES[0], "attempt_id": "1.0.0"}
        with rendezvous.join_world(RankInfo(rank, 2, **known), PATIENT) as world:
            return {"sum": add_ranks(), "hosts": world.hosts}

    wrong, right = zip(*on_two_hosts(meet_at_loopback, meet_at_rank_0), strict=True)
    return {"wrong": wrong, "right": right}


def add_ranks() -> float:
    """Over all ranks."""
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def nodes_by_number() -> Any:
    """The mistake: two times `mp.spawn`, with node_rank=0 and node_rank=1, on one host. What each of four ranks has."""
    folder = Path(tempfile.mkdtemp())
    nodes = []
    for node_rank in range(2):  # spawned ranks would import torch anew; forked ones are the same otherwise
        how: Any = {"args": (node_rank, str(folder)), "nprocs": 2, "join": False, "start_method": "fork"}
        nodes.append(mp.start_processes(work_on_node, **how))
    for node in nodes:
        while not node.join():
            pass
    return json.loads((folder / "found").read_text())


def work_on_node(local_rank: int, node_rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank = 2 * node_rank + local_rank
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    own = {"host": socket.gethostname(), "cores": sorted(os.sched_getaffinity(0)), "device": f"cuda:{local_rank}"}
    found = objects.all_gather_json(own | {"node_rank": node_rank, "sum": add_ranks()}, torch.device("cpu"))
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
