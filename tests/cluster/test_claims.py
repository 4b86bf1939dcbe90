"""Concurrent commands on a run of a cluster: one attempt trains at a time. Locally: tests/recovery/test_claims.py."""

from __future__ import annotations

import random

import pytest

from tests.harness.environment.randomness import draw_seed
from tests.harness.runs import claims_campaign
from tests.harness.runs.claims_campaign import ClusterRuns
from tests.harness.slurm.cluster_site import Site

PAIRS = [("stopped", "resume", "resume"), ("running", "resume", "cancel")]


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_concurrent_commands_leave_one_attempt_that_trains(
    site: Site, pair: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_campaign, "TOTAL_STEPS", 600)
    monkeypatch.setattr(claims_campaign, "MAX_FIRST_DELAY", 0.5)
    draw = random.Random(draw_seed("claims"))
    case = claims_campaign.execute_case(ClusterRuns(site), draw, pair, resumes_until_finished=False)
    assert not case.problems, case.describe()
