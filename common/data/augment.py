"""Random changes of training images, each by its position in the epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.core import seeds


class Augment:
    """torchvision's v2 transforms on uint8 images, the same for a sample on any rank and in any block.

    Each image has its own random stream, derived from the seed, the epoch and its position in it: a resumed run
    augments the rest of an epoch as an uninterrupted one does. torch's global stream is left as it was.
    """

    def __init__(self, kind: str, size: Sequence[int], seed: int) -> None:
        from torchvision.transforms import v2  # a second to import, so only when asked for

        crop = v2.RandomCrop(size, padding=max(1, min(size) // 8))
        self.change = v2.Compose([crop, v2.RandomHorizontalFlip()] if kind == "crop_flip" else [crop])
        self.seed = seed

    def __call__(self, images: Tensor, epoch: int, positions: Tensor) -> Tensor:
        """Augment images uint8 [n, H, W] or [n, 3, H, W] at `positions` int64 [n] of an epoch; the shape stays."""
        changed = torch.empty_like(images)
        with torch.random.fork_rng(devices=[]):
            for number, position in enumerate(positions.tolist()):
                torch.default_generator.manual_seed(seeds.derive_seed(self.seed, "augment", epoch, position))
                changed[number] = self.change(images[number, None] if images.dim() == 3 else images[number])
        return changed
