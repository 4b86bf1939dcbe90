"""The private folder of an attempt: how long its certificate is valid, and ranks that do not see it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from common.backend import private_folder
from common.ranks.backend_setup import get_key_folder
from common.ranks.rank_info import RankInfo
from common.runs.folder import write_json
from common.system.errors import UnreachableError


def test_a_certificate_is_valid_until_the_end_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = int(time.time())
    for end, least, most in (
        (str(now + 5000), 4000, 5000),
        (str(now - 5), 0, 0),
        ("4294967294", private_folder.MAX_CERTIFICATE_SECONDS, private_folder.MAX_CERTIFICATE_SECONDS),  # no limit
        ("", private_folder.DEFAULT_CERTIFICATE_SECONDS, private_folder.DEFAULT_CERTIFICATE_SECONDS),
    ):
        monkeypatch.setenv("SLURM_JOB_END_TIME", end)
        assert least <= private_folder.compute_certificate_seconds(tmp_path) <= most, end
    write_json(tmp_path / "meta.json", {"job": {"id": "7", "scheduler": "local", "profile": {"time": 90}}})
    assert private_folder.compute_certificate_seconds(tmp_path) == private_folder.DEFAULT_CERTIFICATE_SECONDS, (
        "this attempt is in no job"
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert private_folder.compute_certificate_seconds(tmp_path) == 90 * 60


@pytest.mark.parametrize("runs", ["", "new"])
def test_a_host_without_the_run_folder_is_told(runs: str, tmp_path: Path) -> None:
    folder = get_key_folder(tmp_path / runs, RankInfo(1, 2, attempt_id="7.0.0"))
    with pytest.raises(UnreachableError, match=r"rank 1 cannot find .*private-7.0.0, .* a folder that all hosts share"):
        private_folder.create_or_load_identity(folder, RankInfo(1, 2), 0.1)
