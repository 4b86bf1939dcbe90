"""Problems of writing a checkpoint, as the run reports them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.checkpoint.rank_file import WriteProblem
from common.runs.folder import convert_disk_errors
from common.system.causes import Cause
from common.system.errors import UserError


@pytest.mark.parametrize(
    "number, cause", [(errno.EROFS, Cause.DISK_READ_ONLY), (errno.ENOSPC, Cause.DISK_FULL), (errno.EACCES, Cause.OTHER)]
)
def test_a_problem_is_that_of_the_disk_also_if_it_was_converted(number: int, cause: Cause) -> None:
    disk_error = OSError(number, os.strerror(number))
    with pytest.raises(UserError) as caught, convert_disk_errors(Path("metrics.jsonl")):
        raise disk_error
    problem = WriteProblem(os.strerror(number), cause)
    assert WriteProblem.from_error(disk_error) == WriteProblem.from_error(caught.value) == problem
