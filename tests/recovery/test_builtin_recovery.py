"""With the backend `builtin` runs resume to the bit, and end when a rank dies or is silent."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.harness.long_runs import ENDLESS, check_hanging_rank, only_folder, ranks_of, train_long
from tests.harness.processes import PATIENCE, processes_of, run
from tests.harness.registry import REPLICATED
from tests.harness.resuming import ALONE, check_that_it_goes_on, resume, trained_steps

CHAIN = """
def add_along_a_chain(ranks):
    inner = range(1, ranks - 1)
    middle = [[("add", 0, r - 1), ("send", 0, r + 1), ("receive", 0, r + 1), ("send", 0, r - 1)] for r in inner]
    return [[("send", 0, 1), ("receive", 0, 1)], *middle, [("add", 0, ranks - 2), ("send", 0, ranks - 2)]]
"""
BUILTIN = ("launch.backend=builtin", "launch.algorithm=tree")


def test_a_resumed_run_is_equal_to_the_bit(tmp_path: Path, quick: tuple[str, ...]) -> None:
    """Also with an algorithm of one's own, whose file the run has kept."""
    own = tmp_path / "own.py"
    own.write_text(CHAIN)
    words = ("launch.backend=builtin", f"launch.algorithm={own}:add_along_a_chain")
    whole = run(REPLICATED.name, *quick, *REPLICATED.spread(3), ALONE, "steps=12", *words, runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    own.unlink()
    check_that_it_goes_on(REPLICATED, whole, "builtin", tmp_path / "cut")


def test_a_rank_that_is_killed_ends_the_run_which_then_goes_on(tmp_path: Path, quick: tuple[str, ...]) -> None:
    words = (*quick, *REPLICATED.spread(2), *BUILTIN, *ENDLESS, "checkpoint.every_steps=3", "launch.step_timeout=600")
    with train_long(REPLICATED.name, *words, runs=tmp_path) as process:
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        _, err = process.communicate(PATIENCE)
        assert process.returncode == 128 + signal.SIGKILL
        assert "error: rank 1 (pid" in err and "killed by SIGKILL" in err and "Traceback" not in err
    assert not processes_of(str(tmp_path))
    folder = only_folder(tmp_path)
    steps = max(trained_steps(folder)) + 5
    done = resume(REPLICATED, folder, f"steps={steps}")
    assert done.returncode == 0, done.stderr
    assert trained_steps(folder) == list(range(1, steps + 1))


def test_a_silent_rank_is_named(tmp_path: Path, quick: tuple[str, ...]) -> None:
    check_hanging_rank(REPLICATED, (*quick, *BUILTIN), tmp_path, seconds=2)
