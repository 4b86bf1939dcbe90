"""All threads count the bytes of collectives and messages."""

from __future__ import annotations

from tests.harness.ranks.programs import check_program


def test_all_threads_count_all_collectives() -> None:
    check_program("sent_messages")
