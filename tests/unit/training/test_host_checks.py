"""The checks at the start of a job refuse only what is wrong, and do not fail themselves."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.ranks.rendezvous import World
from common.system import network
from common.system.errors import UserError
from common.training.host_checks import check_hosts, measure_disk_write_speed
from tests.harness.environment.read_only import mount_read_only


def test_a_read_only_disk_is_reported_as_a_fact(tmp_path: Path) -> None:
    with mount_read_only(tmp_path):
        facts = measure_disk_write_speed(tmp_path)
    assert facts["disk_mb_per_s"] is None
    assert "the disk is read-only" in facts["disk_error"]


@pytest.fixture
def sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which ranks ignore before they exit together."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("sigterm_handler")
def test_the_name_of_a_host_is_checked_only_if_other_hosts_may_use_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Debian, a host resolves its own name to 127.0.1.1. torchrun connects the hosts by the master address."""
    monkeypatch.setattr(network, "resolve_ipv4", lambda _: "127.0.1.1")
    two_hosts = dataclasses.replace(world, hosts=("node1", "node2"))
    check_hosts(dataclasses.replace(two_hosts, launcher="torchrun"), tmp_path, mixed=False)
    with pytest.raises(UserError, match=r"resolves its own name to 127.0.1.1, which other hosts cannot reach"):
        check_hosts(dataclasses.replace(two_hosts, launcher="slurm"), tmp_path, mixed=False)
