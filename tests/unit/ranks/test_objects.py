"""Values that ranks send each other arrive unchanged, and received bytes are never executed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.ranks import objects
from common.techniques.pipeline.schedules import Action
from tests.harness.commands import execution
from tests.harness.commands.processes import WAIT_TIMEOUT, make_environment


@pytest.mark.parametrize("case", ["send_values", "one_sends_pickles"])
def test_values_arrive_unchanged_and_pickles_are_refused(case: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.harness.ranks.launch_cases", case, str(tmp_path)]
    process = execution.execute_command(argv, env=make_environment(), timeout=WAIT_TIMEOUT)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), "the value is of type tuple"),
        ([Action("F", 0, 0)], r"the value\[0\] is of type Action"),
        ({"runs": {"first": Path("runs")}}, r"the value\['runs'\]\['first'\] is of type PosixPath"),
        ({"steps": {3: 0.5}}, r"the value\['steps'\] has the key 3; keys sent between ranks must be strings"),
        (b"bytes", "the value is of type bytes"),
        (torch.ones(1), "the value is of type Tensor"),
        (np.float32(1), "the value is of type float32"),
    ],
)
def test_values_that_json_cannot_represent_are_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        objects.encode_value(value)
