"""A run of an older version from one machine continues as a job of a real cluster, with its own source."""

from __future__ import annotations

import pytest

from tests.harness.old_runs import VERSIONS, unpack
from tests.harness.slurm.cluster_site import Site

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_run_continues_as_a_job(site: Site, version: str) -> None:
    stopped, finished = unpack(version, site.folder / version)
    options = (f"--resume={stopped.path}", "--launch=slurm", f"--args=data.cache={site.cache}", "--follow=1")
    process = site.execute_module("slurm", "exp", *options, status=None)
    assert process.returncode == 0, process.stdout + process.stderr
    assert stopped.result["state"] == "finished"
    assert stopped.result["scores"]["test_samples"] == 200
    steps = [row["global_step"] for row in stopped.read_rows() if "loss" in row]
    assert steps == [row["global_step"] for row in finished.read_rows() if "loss" in row]
    assert [attempt.number for attempt in stopped.list_attempts()] == [1, 2]
