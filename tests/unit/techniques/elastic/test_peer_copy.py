"""The training state that one rank sends to others may be larger than the largest value that ranks can exchange."""

from __future__ import annotations

from pathlib import Path

from tests.harness.ranks.programs import execute_launch_case


def test_a_state_larger_than_the_largest_value_is_copied(tmp_path: Path) -> None:
    process = execute_launch_case("copy_a_state_in_pieces", tmp_path)
    assert process.returncode == 0, process.stderr
