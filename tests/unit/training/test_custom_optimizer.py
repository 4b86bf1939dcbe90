"""Custom optimizers and decays: missing files, and decays without a learning rate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.system.errors import UserError
from common.training import custom_optimizer
from configs.shared import Optim

INVALID_DECAYS = {
    "return -1": "own.py:1: the function returned -1 for step 0 of 100; function(step, total) must return",
    "return 1 / step": "own.py:2: ZeroDivisionError: division by zero",
    "return float('nan')": "the function returned nan for step 0 of 100",
    "return None": "own.py:1: float() argument must be a string or a real number, not 'NoneType'; function(step",
}


@pytest.mark.parametrize("body, message", INVALID_DECAYS.items())
def test_a_decay_that_returns_no_valid_factor_is_refused(tmp_path: Path, body: str, message: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def f(step, total):\n    {body}\n")
    with pytest.raises(UserError, match=re.escape(message)):
        custom_optimizer.check_custom_optimizer(Optim(decay=f"{file}:f"))


MISSING_FILES = [
    (Optim(name="no.py:Own"), "no.py; name an existing FILE.py:Class, or use one of sgd, adam, adamw, lars, lamb"),
    (Optim(name="own.txt:Own"), "optim.name=own.txt:Own: expected FILE.py:Class or one of sgd, adam, adamw, lars"),
    (Optim(decay="no.py:f"), "no.py; name an existing FILE.py:function, or use one of linear, cosine,"),
]


@pytest.mark.parametrize("settings, message", MISSING_FILES)
def test_missing_files_are_refused(settings: Optim, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        custom_optimizer.check_custom_optimizer(settings)


def test_a_file_without_the_function_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("class Own:\n    pass\n")
    with pytest.raises(UserError, match=re.escape("has no function 'f'; define it there, or use one of linear,")):
        custom_optimizer.check_custom_optimizer(Optim(decay=f"{file}:f"))
