"""The note on other processes that used the CPUs during a measurement."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from common.measure.foreign_load import CpuUse, ForeignLoadMeter, compute_foreign_shares, report_foreign_shares
from common.ranks.rendezvous import World


def test_hosts_of_one_machine_share_its_cpus() -> None:
    """Two hosts of a local cluster are one machine, and a rank may be bound to some of its CPUs."""
    uses = [
        CpuUse("a", "node1", 10.0, {"0": 9.0, "1": 8.0}, 6.0),
        CpuUse("a", "node2", 10.0, {"1": 8.0}, 7.0),
        CpuUse("b", "node3", 10.0, {"0": 5.0}, 5.5),
        CpuUse("c", "node4", 10.0, {}, 1.0),
    ]
    shares = compute_foreign_shares(uses)
    assert shares == {"node1, node2": pytest.approx(0.2), "node3": 0.0}


def test_only_a_large_foreign_share_is_shown() -> None:
    report = report_foreign_shares({"node1, node2": 0.2, "node3": 0.0})
    assert report.measured == {"foreign_cpu_share": pytest.approx(0.2)}
    (note,) = report.shown.values()
    assert note.startswith("other processes used 20% of the CPU time on node1, node2;")
    assert "node3" not in note

    assert report_foreign_shares({"node1": 0.05}).shown == {}
    assert report_foreign_shares({}).measured == {}


def test_the_cpu_time_of_another_process_is_measured() -> None:
    meter = ForeignLoadMeter(World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1))
    busy_loop = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", busy_loop], check=True)
    use = meter.measure_cpu_use()
    assert sum(use.busy.values()) - use.rank_seconds > 0.2
