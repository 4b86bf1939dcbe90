"""Attackers who read a cable of the cluster or connect to the ranks of a run, with and without launch.tls=true."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from common.backend.certificates import Identity
from common.models.networks import build_network
from slurm.local_cluster.slurm_conf import CONTROLLER_ADDRESS
from tests.cluster.switch import intrude, open_sniffer, read_tcp
from tests.harness.environment.randomness import draw_seed
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.ranks.folder_rendezvous import identity
from tests.harness.slurm.cluster_site import Site, find_running_cluster

__all__ = ["identity"]
pytestmark = pytest.mark.timeout(300)
PATTERN = torch.linspace(-0.02, 0.02, 16)  # 64 bytes
OPTIONS = ("--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1")


def test_tls_hides_messages_and_no_intruder_joins_or_stalls_the_ranks(
    site: Site, identity: Identity, tmp_path: Path
) -> None:
    """`identity` belongs to another run."""
    weights = build_network("mlp", (28, 28), 10).state_dict()
    weights["fc1.weight"].view(-1, len(PATTERN))[:] = PATTERN
    torch.save(weights, tmp_path / "planted.pt")  # DDP sends these weights from rank 0 to rank 1
    cluster = find_running_cluster(site.env)
    traffic = []
    losses = []
    for runs, encrypted in (("plain", False), ("encrypted", True)):
        settings = (
            site.format_settings_option(runs, "steps=10", *REPLICATED_ENTRY.smallest_settings)
            .removeprefix("--args=")
            .split()
        )
        settings += [f"weights={tmp_path / 'planted.pt'}", "launch.nodes=2", "launch.backend=builtin"]
        if encrypted:
            settings.append("launch.tls=true")
        script = [sys.executable, "experiments/ddp_multinode.py", *settings]
        with open_sniffer(cluster, 1) as sniffer, ThreadPoolExecutor(1) as pool:
            run = pool.submit(site.execute_in_cluster, "srun", *OPTIONS, *script)
            status = intrude(cluster, identity, draw_seed("strangers")) if encrypted else 0
            process = run.result()
            traffic.append(read_tcp(sniffer, {1, 2}))
        assert (process.returncode, status) == (0, 0), process.stdout + process.stderr
        losses.append([row["loss"] for row in site.get_only_run(runs).read_metrics() if "loss" in row])
    assert f"rank 0 rejected a connection from {CONTROLLER_ADDRESS}:" in process.stderr
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10
    plain_traffic, encrypted_traffic = traffic
    pattern = PATTERN.numpy().tobytes()
    assert plain_traffic.count(pattern) > 1000
    assert encrypted_traffic.count(pattern) == 0
    assert len(encrypted_traffic) > 0.9 * len(plain_traffic)
