"""Targets that do not count in the loss are the same for any division of a batch."""

from __future__ import annotations

import torch

from common.techniques.language_model.targets import draw_ignored


def test_a_share_of_the_targets_is_ignored_independently_of_the_division_into_microbatches() -> None:
    whole = draw_ignored(range(100, 200), 50, 0.3, key=7)
    parts = [draw_ignored(samples, 50, 0.3, key=7) for samples in (range(100, 101), range(101, 160), range(160, 200))]
    assert torch.equal(torch.cat(parts), whole)
    assert abs(whole.float().mean().item() - 0.3) < 0.03
    counts = whole.sum(1)
    assert counts.min() < counts.max(), "samples must have different numbers of valid tokens"
    assert not torch.equal(draw_ignored(range(100, 200), 50, 0.3, key=8), whole)
    assert not torch.equal(whole[0], whole[1])
