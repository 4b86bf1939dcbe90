"""Samples of a text data set, with the interface of `Images`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.data import sources
from common.data.prepare import PreparedDataset
from common.data.samples import Images
from common.runs.folder import read_json
from common.system.causes import Cause
from common.system.errors import UserError

REQUIRED_FACTS = {"vocabulary", "bytes", "sha256", "test_tokens", "test_bytes_per_token", "unigram_loss", "bigram_loss"}


def read_text_facts(prepared: PreparedDataset) -> dict[str, Any]:
    """Return the facts about a prepared text: its vocabulary size, checksum, and losses of n-gram models.

    Raises UserError if the file that contains the facts is missing or damaged.
    """
    file = prepared.path / sources.TEXT_FILE
    facts = read_json(file)
    if not facts.keys() >= REQUIRED_FACTS:
        problem = f"{file} is missing or damaged; delete {prepared.path} and start the run again"
        raise UserError(problem, cause=Cause.DAMAGED_DATA)
    return facts


class TextSamples(Images):
    """The training or test part of a text: inputs and targets are tokens, int64 [N, T]."""

    has_labels = False
    has_pixels = False

    def __init__(self, prepared: PreparedDataset, part: str, limit: int = 0) -> None:
        """Map the tokens of `part` ("train" or "test") into memory.

        Only the first `limit` samples are used; 0 uses all samples.
        """
        self.images = torch.from_numpy(prepared.map_array(f"{part}_images"))[: limit or None]
        self.labels = torch.from_numpy(prepared.map_array(f"{part}_labels"))[: limit or None]
        self.outputs = int(read_text_facts(prepared)["vocabulary"])

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the outputs for one sample: one logit per token of the vocabulary at each position."""
        return *self.shape, self.outputs

    def normalize(self, pixels: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return tokens [n, T] as int64 on the device."""
        return pixels.to(device).long()

    def cross_entropy(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy of logits [n, T, vocabulary] and targets [n, T], in nats per token.

        The reduction "sum" returns the sum over the samples of the mean over the positions of a sample.
        """
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction=reduction)
        return loss / targets.shape[-1] if reduction == "sum" else loss
