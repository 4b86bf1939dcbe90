"""The private folder of an attempt: validity of its certificate, and hosts that cannot see the folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from common.backend.private_folder import (
    DEFAULT_CERTIFICATE_SECONDS,
    MAX_CERTIFICATE_SECONDS,
    compute_certificate_seconds,
    create_or_load_identity,
)
from common.ranks.backend_setup import get_key_folder
from common.ranks.rank_info import RankInfo
from common.runs.folder import write_json
from common.system.errors import UnreachableError


def test_a_certificate_is_valid_until_the_end_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = int(time.time())
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(now + 5000))
    assert 4000 <= compute_certificate_seconds(tmp_path) <= 5000
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(now - 5))
    assert compute_certificate_seconds(tmp_path) == 0
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4294967294")  # no limit
    assert compute_certificate_seconds(tmp_path) == MAX_CERTIFICATE_SECONDS
    monkeypatch.setenv("SLURM_JOB_END_TIME", "")
    assert compute_certificate_seconds(tmp_path) == DEFAULT_CERTIFICATE_SECONDS


def test_the_time_limit_of_a_local_job_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "")
    write_json(tmp_path / "meta.json", {"job": {"id": "7", "scheduler": "local", "profile": {"time": 90}}})
    assert compute_certificate_seconds(tmp_path) == DEFAULT_CERTIFICATE_SECONDS, "this attempt is in no job"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert compute_certificate_seconds(tmp_path) == 90 * 60


@pytest.mark.parametrize("runs", ["", "new"])
def test_a_host_without_the_run_folder_is_refused(runs: str, tmp_path: Path) -> None:
    folder = get_key_folder(tmp_path / runs, RankInfo(1, 2, attempt_id="7.0.0"))
    with pytest.raises(UnreachableError, match=r"rank 1 cannot find .*private-7.0.0, .* a folder that all hosts share"):
        create_or_load_identity(folder, RankInfo(1, 2), 0.1)
