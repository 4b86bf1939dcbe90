"""The mistakes about hosts and about ranks elsewhere: what they really do, and what is right instead."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.harness import warm
from tests.harness.ddp_pitfalls import made
from tests.harness.host_pitfalls import SECONDS, refusal
from tests.harness.processes import Done, environment
from tests.harness.warnings_of_ranks import LOST, SAID, WARNED


def execute(*words: str, runs: Path) -> Done:
    done = warm.execute([sys.executable, "-m", *words], env=environment())
    assert done.returncode == 0, done.stderr
    return Done(done.returncode, done.stdout, done.stderr, runs)


def test_a_loopback_address_is_another_on_each_host() -> None:
    if problem := refusal():
        pytest.skip(f"NOT TESTED, no networks can be made here: {problem}")
    found = made("loopback_of_each_host", module="host_pitfalls")["loopback_of_each_host"]
    assert "1/2 clients joined" in found["wrong"][0]["error"], "rank 0 waits alone"
    assert "trying to connect to (127.0.0.1, 29500)" in found["wrong"][1]["error"], "where nobody serves"
    assert all(answer["seconds"] >= SECONDS for answer in found["wrong"])
    assert found["right"] == [{"sum": 1.0, "hosts": ["host0", "host1"]}] * 2


def test_nodes_that_are_only_numbers_are_one_host(digits: tuple[str, ...], tmp_path: Path) -> None:
    ranks = made("nodes_by_number", module="host_pitfalls")["nodes_by_number"]
    assert [rank["sum"] for rank in ranks] == [0 + 1 + 2 + 3] * 4, "all four meet: nothing tells"
    assert [rank["node_rank"] for rank in ranks] == [0, 0, 1, 1]
    assert len({rank["host"] for rank in ranks}) == 1
    assert [rank["device"] for rank in ranks] == ["cuda:0", "cuda:1"] * 2, "each device is two ranks' at once"
    assert all(rank["cores"] == ranks[0]["cores"] for rank in ranks)
    settings = shlex.join([f"runs={tmp_path}", *digits, "steps=2", "data.test_limit=10"])
    done = execute(
        "slurm", "exp", "--launch=local", "--nodes=2", f"--args={settings}", "--", "ddp_multinode", runs=tmp_path
    )
    assert "not using SLURM: 2 nodes are simulated by processes on this machine" in done.out
    world = json.loads((done.folder.list_attempts()[0].attempt_folder / "world.json").read_text())
    assert world["nodes"] == 2 and world["hosts"] == [ranks[0]["host"]] * 2, "the names are the hosts' own"


def test_warnings_of_other_ranks_are_lost_by_their_level(digits: tuple[str, ...], tmp_path: Path) -> None:
    settings = (f"runs={tmp_path}", *digits, "steps=2", "data.test_limit=10", "log.level=error")
    done = execute("tests.harness.warnings_of_ranks", *settings, runs=tmp_path)
    files = [path for path in done.folder.path.rglob("*") if path.is_file() and "code" not in path.parts]
    texts = [done.out, done.err, *(path.read_text(errors="replace") for path in files)]
    assert not any(LOST in text for text in texts)
    logs = [done.folder.list_attempts()[0].log_file(rank).read_text() for rank in range(2)]
    assert f"WARNING {SAID}" in logs[1] and f"UserWarning: {WARNED}" in logs[1]
    assert not any(words in text for words in (SAID, WARNED) for text in (done.out, done.err, logs[0]))
