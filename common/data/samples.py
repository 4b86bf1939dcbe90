"""Samples of a prepared data set: the training or test part, as inputs and targets on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.config.lookup import import_object
from common.data.prepare import PreparedDataset
from common.system.causes import Cause
from common.system.errors import UserError

# Mean and standard deviation of the training pixels, scaled to [0, 1]. Color images have one value per color channel.
STATISTICS: dict[str, tuple[Any, Any]] = {
    "mnist": (0.1307, 0.3081),
    "digits": (0.1699, 0.3058),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagefolder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # statistics of ImageNet
    "generated": ((0.5, 0.5, 0.5), (0.29, 0.29, 0.29)),
    "vectors": (0.5, 0.29),
}


def get_pixel_statistics(prepared: PreparedDataset) -> tuple[Any, Any]:
    """Return the mean and the standard deviation of the training pixels.

    The mean and the standard deviation are single numbers, or lists with one number per color channel. Raises UserError
    if the file that contains the statistics is missing.
    """
    statistics = prepared.statistics or STATISTICS.get(prepared.name)
    if statistics is None:
        raise UserError(
            f"{prepared.path} is damaged: the statistics file is missing; delete this folder and start the run again",
            cause=Cause.DAMAGED_DATA,
        )
    return statistics


class Images:
    """The training or test part of a prepared data set.

    Images are uint8 [N, H, W] (grayscale) or [N, 3, H, W], vectors are uint8 [N, D], and labels are int64 [N]. A custom
    data set may contain other inputs, float32 [N, ...], and other targets, float32 or int64 [N, ...].
    """

    cross_entropy: Callable[..., Tensor] = staticmethod(F.cross_entropy)
    """The loss `cross_entropy` of the outputs for samples of this data set."""
    reads_on_demand = False
    """True if `read_samples` reads samples from disk when they are needed."""

    def __init__(self, prepared: PreparedDataset, part: str, limit: int = 0) -> None:
        """Map the arrays of `part` ("train" or "test") into memory.

        Only the first `limit` samples are used; 0 uses all samples.
        """
        images = torch.from_numpy(prepared.map_array(f"{part}_images"))
        labels = torch.from_numpy(prepared.map_array(f"{part}_labels"))
        self.has_labels = prepared.target_kind == "labels"
        if self.has_labels:
            labels = labels.long()
        self.outputs = labels.shape[1:].numel() if labels.is_floating_point() else int(labels.max()) + 1
        self.images = images[: limit or None]
        self.labels = labels[: limit or None]
        self.has_pixels = images.dtype == torch.uint8
        if self.has_pixels:
            mean, std = get_pixel_statistics(prepared)
            self.mean = to_channel_tensor(mean)
            self.std = to_channel_tensor(std)

    def __len__(self) -> int:
        return self.labels.shape[0]  # faster than len(), which runs Python code in torch; called often in each step

    @property
    def shape(self) -> torch.Size:
        """Shape of one image: [H, W] or [3, H, W]."""
        return self.images.shape[1:]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the outputs of a network for one sample."""
        return (self.outputs,)

    def load_inputs(self, index: Tensor | slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the inputs at `index` on the device, as [n, H, W] or [n, 3, H, W]. Images are normalized.

        `index` is an int64 tensor [n] or a slice.
        """
        pixels = self.images[index] if isinstance(index, slice) else self.images.index_select(0, index)
        return self.normalize(pixels, device, dtype)

    def normalize(self, pixels: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Normalize uint8 images [n, H, W] or [n, 3, H, W] on the device: (pixel / 255 - mean) / std.

        Float inputs are copied unchanged.
        """
        if not self.has_pixels:
            return pixels.to(device, dtype, copy=True)
        inputs = pixels.to(device).to(dtype)
        mean = self.mean.to(inputs) if isinstance(self.mean, Tensor) else self.mean
        std = self.std.to(inputs) if isinstance(self.std, Tensor) else self.std
        return inputs.sub_(255 * mean).mul_(1 / (255 * std))

    def read_samples(self, rows: Sequence[int], seeds: Sequence[int], *target: Any) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of samples, for a part that reads samples on demand."""
        raise NotImplementedError

    def load_targets(self, index: Tensor | slice, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the targets at `index` on `device`: int64 labels [n], or float targets [n, ...] as `dtype`.

        `index` is an int64 tensor [n] or a slice.
        """
        return self.labels[index].to(device, dtype if self.labels.is_floating_point() else torch.int64)


def open_samples(prepared: PreparedDataset, part: str, limit: int = 0) -> Images:
    """Open the part "train" or "test" of a data set: its first `limit` samples, or all samples if `limit` is 0."""
    kind = Images
    if prepared.name == "text":
        kind = import_object("common.data.text_samples:TextSamples")
    elif prepared.description:
        kind = import_object("common.data.map_style:MapSamples")
    samples: Images = kind(prepared, part, limit)
    return samples


def to_channel_tensor(statistic: Any) -> Any:
    """Convert a list with one number per color channel to a float64 tensor [C, 1, 1].

    A single number is returned unchanged.
    """
    if isinstance(statistic, float):
        return statistic
    return torch.tensor(statistic, dtype=torch.float64).view(-1, 1, 1)
