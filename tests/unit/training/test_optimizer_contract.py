"""The contract of an optimizer: built-in ones satisfy it, and each violation is reported in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from common.system.errors import UserError
from common.training.optimizer_contract import CHECKS, check_independent_parameters, check_optimizer
from configs.shared import OPTIMIZERS, Optim
from tests.harness.custom_code.optimizers import MIXING, VIOLATIONS, Violation, write_optimizer

ACCUMULATING = Violation(  # a step at every third call
    'p.add_(state["mean"], ',
    'state["calls"] = state.get("calls", 0) + 1\n'
    '                if state["calls"] % 3 == 0:\n'
    '                    p.add_(state["mean"], ',
    "",
)
NOISY = Violation("p.add_(", 'p.add_(torch.randn_like(p), alpha=group["lr"]).add_(', "")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("weight_decay", [0, 0.01])
def test_built_in_optimizers_satisfy_the_contract(name: str, weight_decay: float) -> None:
    passed_checks: list[str] = []
    check_optimizer(Optim(name=name, weight_decay=weight_decay, decayed="matrices"), passed_checks.append)
    assert passed_checks == list(CHECKS)


@pytest.mark.parametrize("variant", [None, NOISY, ACCUMULATING], ids=["plain", "noisy", "accumulating"])
def test_a_valid_custom_optimizer_passes_without_a_change_of_the_generator(
    variant: Violation | None, tmp_path: Path
) -> None:
    """The checks draw no random numbers of the run, even if the optimizer draws some."""
    generator_state = torch.get_rng_state()
    check_optimizer(Optim(name=write_optimizer(tmp_path, variant)))
    assert torch.equal(torch.get_rng_state(), generator_state)


@pytest.mark.parametrize("breach", VIOLATIONS.values(), ids=list(VIOLATIONS))
def test_each_violation_is_reported_in_one_line(tmp_path: Path, breach: Violation) -> None:
    _, _, expected_message = breach
    name = write_optimizer(tmp_path, breach)
    with pytest.raises(UserError, match=re.escape(expected_message)) as caught:
        check_optimizer(Optim(name=name))
    message = str(caught.value)
    assert message.startswith(f"optim.name={name}: ")
    assert "\n" not in message
    assert message.count("optim.name=") == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_built_in_optimizers_update_parameters_independently(name: str) -> None:
    check_independent_parameters(Optim(name=name, weight_decay=0.01, decayed="matrices"), "zero1=false")


@pytest.mark.parametrize("variant", [MIXING, NOISY], ids=["mixing", "noisy"])
def test_an_optimizer_that_mixes_parameters_is_refused_if_ranks_divide_them(variant: Violation, tmp_path: Path) -> None:
    name = write_optimizer(tmp_path, variant)
    check_optimizer(Optim(name=name))
    with pytest.raises(UserError, match=re.escape(MIXING.message_part)):
        check_independent_parameters(Optim(name=name), "zero1=false")


def test_a_setting_that_the_optimizer_does_not_accept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("the class does not accept weight_decay; omit optim.weight")):
        check_optimizer(Optim(name=write_optimizer(tmp_path), weight_decay=0.1))
