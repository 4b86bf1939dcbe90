"""Who reads a cable of the cluster, and who connects to the ranks of a run, with and without launch.tls=true."""

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
from tests.harness.chance import draw_seed
from tests.harness.registry import REPLICATED
from tests.harness.site import Site, find_cluster
from tests.harness.transport import identity

__all__ = ["identity"]
pytestmark = pytest.mark.timeout(300)
PATTERN = torch.linspace(-0.02, 0.02, 16)  # 64 bytes
OPTIONS = ("--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1")


def test_tls_hides_what_ranks_send_and_no_stranger_joins_or_stalls_them(
    site: Site, identity: Identity, tmp_path: Path
) -> None:
    """`identity` is that of another run."""
    weights = build_network("mlp", (28, 28), 10).state_dict()
    weights["fc1.weight"].view(-1, len(PATTERN))[:] = PATTERN
    torch.save(weights, tmp_path / "planted.pt")  # which DDP sends from rank 0 to the other
    cluster, seen, losses = find_cluster(site.env), [], []
    for runs, more in (("plain", ()), ("encrypted", ("launch.tls=true",))):
        words = site.settings(runs, "steps=10", *REPLICATED.smallest).removeprefix("--args=").split()
        words += [f"weights={tmp_path / 'planted.pt'}", "launch.nodes=2", "launch.backend=builtin", *more]
        script = [sys.executable, "experiments/ddp_multinode.py", *words]
        with open_sniffer(cluster, 1) as sniffer, ThreadPoolExecutor(1) as pool:
            run = pool.submit(site.inside, "srun", *OPTIONS, *script)
            status = intrude(cluster, identity, draw_seed("strangers")) if more else 0
            done = run.result()
            seen.append(read_tcp(sniffer, {1, 2}))
        assert (done.returncode, status) == (0, 0), done.stdout + done.stderr
        losses.append([row["loss"] for row in site.run_of(runs).read_metrics() if "loss" in row])
    assert f"rank 0 rejected a connection from {CONTROLLER_ADDRESS}:" in done.stderr
    assert losses[0] == losses[1] and len(losses[0]) == 10
    found = [data.count(PATTERN.numpy().tobytes()) for data in seen]
    assert found[0] > 1000 and found[1] == 0, found
    assert len(seen[1]) > 0.9 * len(seen[0])
