"""Mistakes with several hosts.

Two hosts are two network namespaces that are connected by a cable, or two values of node_rank on one host.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import socket
import subprocess
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
from tests.harness.pitfalls.outcomes import record_outcome

TIMEOUT_SECONDS = 1.0
SETTINGS = Launch(device="cpu", threads=1, setup_timeout=60, step_timeout=60)
ADDRESSES = ("10.0.0.1", "10.0.0.2")


def find_namespace_problem() -> str:
    """Return why network namespaces cannot be created on this machine, or an empty string."""
    user_options = ["--user", "--map-root-user"] if os.getuid() else []
    command = ["unshare", *user_options, "--net", "--uts", "ip", "link", "add", "name", "a", "type", "veth"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()
    except OSError as error:
        return str(error)


def call_on_two_hosts(*functions: Callable[[int], Any]) -> list[list[Any]]:
    """Call functions with the number of the host on two hosts; return the outcomes of each host.

    Each host has its own name and its own loopback interface.
    """
    folder = Path(tempfile.mkdtemp())
    if os.getuid():
        namespaces.become_root_in_new_namespace(os.getuid(), os.getgid())
    namespaces.unshare_namespaces("net")  # without root, cables can only be added from a network of the user namespace
    socket_pairs = [socket.socketpair() for _ in ADDRESSES]
    host_ends = [pair[0] for pair in socket_pairs]
    parent_ends = [pair[1] for pair in socket_pairs]

    def run_host(number: int) -> None:
        def wait_for_other_host() -> None:
            host_ends[number].send(b".")
            host_ends[number].recv(1)

        namespaces.unshare_namespaces("net", "uts")
        socket.sethostname(f"host{number}")
        wait_for_other_host()  # afterwards the hosts are connected
        namespaces.run_ip("link set lo up", f"addr add {ADDRESSES[number]}/24 dev eth0", "link set eth0 up")
        outcomes = []
        for function in functions:
            wait_for_other_host()
            outcomes.append(record_outcome(functools.partial(function, number)))
        (folder / str(number)).write_text(json.dumps(outcomes))

    pids = [namespaces.fork_child(functools.partial(run_host, number)) for number in range(2)]
    for host_end in host_ends:
        host_end.close()
    cable_ends = [f"name eth0 netns /proc/{pid}/ns/net" for pid in pids]
    for barrier in range(1 + len(functions)):
        assert all(end.recv(1) for end in parent_ends), "a host has exited"
        if barrier == 0:
            namespaces.run_ip(f"link add {cable_ends[0]} type veth peer {cable_ends[1]}")
        for end in parent_ends:
            end.send(b".")
    assert [namespaces.wait_for_child(pid) for pid in pids] == [0, 0]
    return [json.loads((folder / str(number)).read_text()) for number in range(2)]


def loopback_master_address() -> Any:
    """The mistake: every host gets MASTER_ADDR=127.0.0.1."""

    def join_at_loopback(rank: int) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"}
        limit = datetime.timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)

    def join_at_rank_0(rank: int) -> Any:
        rank_info = RankInfo(rank, 2, nodes=2, launcher="slurm", master=ADDRESSES[0], attempt_id="1.0.0")
        with rendezvous.join_world(rank_info, SETTINGS) as world:
            return {"sum": sum_over_ranks(), "hosts": world.hosts}

    hosts = call_on_two_hosts(join_at_loopback, join_at_rank_0)
    return {"mistake": [host[0] for host in hosts], "correct": [host[1] for host in hosts]}


def sum_over_ranks() -> float:
    """Return the sum of the ranks of all processes."""
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def two_node_ranks_on_one_host() -> Any:
    """The mistake: `mp.spawn` with node_rank=0 and node_rank=1 on one host. Return the properties of the four ranks."""
    folder = Path(tempfile.mkdtemp())
    nodes = []
    for node_rank in range(2):
        arguments = (node_rank, str(folder))
        # Spawned ranks would import torch again. Forked ranks show the same mistake.
        nodes.append(mp.start_processes(save_rank_properties, arguments, nprocs=2, join=False, start_method="fork"))
    for node in nodes:
        while not node.join():
            pass
    return json.loads((folder / "ranks.json").read_text())


def save_rank_properties(local_rank: int, node_rank: int, folder: str) -> None:
    """Join the group of four ranks, and save the properties of all ranks."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank = 2 * node_rank + local_rank
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    properties = {
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "device": f"cuda:{local_rank}",
        "node_rank": node_rank,
        "sum": sum_over_ranks(),
    }
    properties_of_ranks = objects.all_gather_json(properties, torch.device("cpu"))
    if rank == 0:
        Path(folder, "ranks.json").write_text(json.dumps(properties_of_ranks))
    dist.destroy_process_group()
