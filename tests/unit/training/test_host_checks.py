"""A host's disk is checked without errors of the check itself."""

from __future__ import annotations

from pathlib import Path

from common.training.host_checks import measure_disk_write_speed
from tests.harness.environment.read_only import mount_read_only


def test_a_read_only_disk_is_reported_as_a_fact(tmp_path: Path) -> None:
    with mount_read_only(tmp_path):
        facts = measure_disk_write_speed(tmp_path)
    assert facts["disk_mb_per_s"] is None
    assert "the disk is read-only" in facts["disk_error"]
