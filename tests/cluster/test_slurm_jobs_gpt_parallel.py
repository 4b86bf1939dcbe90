"""Layouts of gpt_parallel whose ranks are on two hosts of a SLURM cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.runs.folder import read_json
from tests.harness.commands.processes import run_experiment
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.slurm.cluster_site import Site

pytestmark = pytest.mark.timeout(300)
ENTRY = ENTRY_BY_NAME["gpt_parallel"]
LAYOUTS = {
    "sharded": ("replicas=1", "tensor=2", "fsdp=2"),  # tensor parallelism within a host, fsdp between hosts
    "sequence": ("replicas=1", "tensor=2", "sequence=true"),  # tensor parallelism between hosts
    "stages": ("replicas=1", "stages=2", "accumulate=2"),  # a stage on each host
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_spans_two_hosts_and_equals_a_local_run(name: str, site: Site, tmp_path: Path) -> None:
    settings = (*ENTRY.smallest_settings, "dropout=0.2", "masked=0.3", "dtype=float64", "steps=10", *LAYOUTS[name])
    process = site.submit(ENTRY.name, name, *settings, options=("--nodes=2", "--follow=1"))
    assert process.returncode == 0, process.stdout + process.stderr
    folder = site.get_only_run(name)
    hosts = read_json(folder.path / "meta.json")["world"]["hosts"]
    assert set(hosts) == {"node1", "node2"}
    assert hosts == sorted(hosts), "neighboring ranks are on the same host"
    config_file = str(folder.path / "config.yaml")
    local = run_experiment(ENTRY.name, "--config", config_file, "launch.threads=1", runs=tmp_path / "local")
    assert local.returncode == 0, local.stderr
    losses = [row["loss"] for row in folder.read_metrics() if "loss" in row]
    assert losses == local.losses
    assert len(losses) == 10
