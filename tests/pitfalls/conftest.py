"""Fixtures of these tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Weights and images are drawn alike whatever tests ran before in this process."""
    torch.manual_seed(0)
