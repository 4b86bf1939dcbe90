"""Random augmentation of training images, determined by each image's position in the epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.core import seeds


class Augment:
    """torchvision's v2 transforms of uint8 images; equal for a sample on any rank and in any block.

    Each image has its own random stream, derived from the seed, the epoch and its position in it, so a resumed run
    augments the remaining epoch as an uninterrupted run does. torch's global random state stays unchanged.
    """

    def __init__(self, kind: str, size: Sequence[int], seed: int) -> None:
        from torchvision.transforms import v2  # takes a second to import

        padding = max(1, min(size) // 8)
        transforms: list[torch.nn.Module] = [v2.RandomCrop(size, padding=padding)]
        if kind == "crop_flip":
            transforms.append(v2.RandomHorizontalFlip())
        self.transform = v2.Compose(transforms)
        self.seed = seed

    def __call__(self, images: Tensor, epoch: int, positions: Tensor) -> Tensor:
        """Augment images uint8 [n, H, W] or [n, 3, H, W] at `positions` int64 [n] of an epoch, in the same shape."""
        is_grey = images.dim() == 3
        augmented = torch.empty_like(images)
        with torch.random.fork_rng(devices=[]):
            for index, position in enumerate(positions.tolist()):
                torch.default_generator.manual_seed(seeds.derive_seed(self.seed, "augment", epoch, position))
                augmented[index] = self.transform(images[index, None] if is_grey else images[index])
        return augmented
