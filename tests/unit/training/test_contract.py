"""The contract of an optimizer: built-in ones keep it, and each breach is told in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from common.system.errors import UserError
from common.training import custom_optimizer
from common.training.optimizer_contract import CHECKS, check_optimizer
from configs.shared import OPTIMIZERS, Optim
from tests.harness.own_optimizer import BREACHES, KEEPS, Breach, write_own

GATHERS = Breach(  # a step at every third call
    'p.add_(state["mean"], ',
    'state["calls"] = state.get("calls", 0) + 1\n'
    '                if state["calls"] % 3 == 0:\n'
    '                    p.add_(state["mean"], ',
    "",
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("weight_decay", [0, 0.01])
def test_built_in_optimizers_keep_it(name: str, weight_decay: float) -> None:
    passed: list[str] = []
    check_optimizer(Optim(name=name, weight_decay=weight_decay, decayed="matrices"), passed.append)
    assert passed == list(CHECKS)


def test_one_of_ones_own_keeps_it_and_may_draw_numbers(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    check_optimizer(Optim(name=write_own(tmp_path)))
    noise = Breach("p.add_(", 'p.add_(torch.randn_like(p), alpha=group["lr"]).add_(', "")
    check_optimizer(Optim(name=write_own(tmp_path, noise)))
    check_optimizer(Optim(name=write_own(tmp_path, GATHERS)))
    assert torch.equal(torch.get_rng_state(), before), "a run draws what it would without"


@pytest.mark.parametrize("breach", BREACHES.values(), ids=list(BREACHES))
def test_each_breach_is_told_in_one_line(tmp_path: Path, breach: Breach) -> None:
    name = write_own(tmp_path, breach)
    with pytest.raises(UserError, match=re.escape(breach.told)) as error:
        check_optimizer(Optim(name=name))
    assert str(error.value).startswith(f"optim.name={name}: ") and "\n" not in str(error.value)
    assert str(error.value).count("optim.name=") == 1


def test_a_setting_that_it_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("the class does not accept weight_decay; omit optim.weight")):
        check_optimizer(Optim(name=write_own(tmp_path), weight_decay=0.1))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return -1", "own.py:1: the function returned -1 for step 0 of 100; function(step, total) must return"),
        ("return 1 / step", "own.py:2: ZeroDivisionError: division by zero"),
        ("return float('nan')", "the function returned nan for step 0 of 100"),
        ("return None", "own.py:1: float() argument must be a string or a real number, not 'NoneType'; function(step"),
    ],
)
def test_a_decay_that_gives_no_rate_is_refused(tmp_path: Path, body: str, told: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def f(step, total):\n    {body}\n")
    with pytest.raises(UserError, match=re.escape(told)):
        custom_optimizer.check_custom_optimizer(Optim(decay=f"{file}:f"))


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(KEEPS)
    for settings, told in (
        (Optim(name="no.py:Own"), "no.py; name an existing FILE.py:Class, or use one of sgd, adam, adamw, lars, lamb"),
        (Optim(decay="no.py:f"), "no.py; name an existing FILE.py:function, or use one of linear, cosine,"),
        (
            Optim(name="own.txt:Own"),
            "optim.name=own.txt:Own: expected FILE.py:Class or one of sgd, adam, adamw, lars",
        ),
        (Optim(decay=f"{tmp_path / 'own.py'}:f"), "has no function 'f'; define it there, or use one of linear,"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            custom_optimizer.check_custom_optimizer(settings)
