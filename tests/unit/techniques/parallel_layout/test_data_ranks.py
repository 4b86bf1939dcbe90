"""Gradients are averaged over ranks that have used different parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.techniques.parallel_layout import data_ranks


class TwoRanks:
    """A group of this rank and another one."""

    def size(self) -> int:
        return 2


def test_a_parameter_that_a_rank_has_not_used_has_a_gradient_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1, bias=False), "unused": nn.Linear(3, 1, bias=False)})
    model["unused_by_all"] = nn.Linear(1, 1, bias=False)
    model["frozen"] = nn.Linear(4, 1, bias=False).requires_grad_(False)
    model["used"](torch.tensor([2.0, 4.0])).backward()
    gradients_of_other_rank = [0.0, 0.0, 6.0, 8.0, 10.0, 0.0]
    flags_of_other_rank = [0.0, 1.0, 0.0]
    other_rank = torch.tensor([*gradients_of_other_rank, *flags_of_other_rank])

    def add_other_rank(flat: Tensor, group: Any) -> None:
        assert flat.shape == other_rank.shape, "the message has the same size on all ranks"
        flat += other_rank

    monkeypatch.setattr(dist, "all_reduce", add_other_rank)
    data_ranks.average_gradients(model, TwoRanks())  # type: ignore[arg-type]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients["frozen.weight"] is None
    assert gradients["unused_by_all.weight"] is None, "weight decay would change the parameter"
    assert gradients["used.weight"] is not None and gradients["used.weight"].tolist() == [[1.0, 2.0]]
    assert gradients["unused.weight"] is not None and gradients["unused.weight"].tolist() == [[3.0, 4.0, 5.0]]
