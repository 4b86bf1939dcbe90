"""Random augmentation of training images that is reproducible for any number of ranks and after a resume."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.system import seeds


class Augment:
    """Random transform of uint8 images, based on torchvision's v2 transforms.

    Each image has its own random stream, derived from the seed, the epoch and the position of the image in the epoch.
    The augmented image therefore does not depend on the rank or block that contains the image. A resumed run augments
    images exactly like an uninterrupted run. The global random state of PyTorch does not change.
    """

    def __init__(self, kind: str, size: Sequence[int], seed: int) -> None:
        from torchvision.transforms import v2  # this import takes about a second

        padding = max(1, min(size) // 8)
        transforms: list[torch.nn.Module] = [v2.RandomCrop(size, padding=padding)]
        if kind == "crop_flip":
            transforms.append(v2.RandomHorizontalFlip())
        self.transform = v2.Compose(transforms)
        self.seed = seed

    def __call__(self, images: Tensor, epoch: int, positions: Tensor) -> Tensor:
        """Return augmented copies of uint8 images [n, H, W] or [n, 3, H, W].

        `positions` is an int64 tensor [n] with the position of each image in the epoch.
        """
        is_grey = images.dim() == 3
        augmented = torch.empty_like(images)
        with torch.random.fork_rng(devices=[]):
            for index, position in enumerate(positions.tolist()):
                torch.default_generator.manual_seed(seeds.derive_seed(self.seed, "augment", epoch, position))
                augmented[index] = self.transform(images[index, None] if is_grey else images[index])
        return augmented
