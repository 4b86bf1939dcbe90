"""Reading data sets in a subprocess: errors keep their cause."""

from __future__ import annotations

import errno

import pytest

from common.data import sources
from common.system.causes import Cause
from common.system.errors import UserError

CAUSES = [
    (MemoryError(), Cause.OUT_OF_MEMORY),
    (OSError(errno.ENOSPC, "x"), Cause.DISK_FULL),
    (UserError("x", cause=Cause.DAMAGED_DATA), Cause.DAMAGED_DATA),
    (ValueError("a damaged file"), Cause.OTHER),
    (ConnectionResetError("by a mirror"), Cause.OTHER),
]


@pytest.mark.parametrize("error, cause", CAUSES)
def test_an_error_in_the_subprocess_keeps_its_cause(error: Exception, cause: Cause) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(UserError) as caught:
        sources.call_in_subprocess(fail)
    assert caught.value.cause is cause
