"""Check that a user's mistake is refused within the process of the test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from common.system.errors import UserError


@contextlib.contextmanager
def expect_refusal(*parts: str) -> Iterator[None]:
    """Check that the `with` block raises a UserError whose message is one line and contains each part.

    ` ... ` separates parts of the message that do not follow each other directly.
    """
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message, message
    for part in " ... ".join(parts).split(" ... "):
        assert part in message, message
