"""Dropout of token vectors whose masks do not depend on how samples and tokens are divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from common.models.sample_dropout import SampleDropout
from common.system import seeds

HASH_BITS = 32
COLUMN_PURPOSE = "columns"


class PositionDropout(SampleDropout):
    """A dropout layer for token vectors [n, T, width], whose mask is a hash of the position of each value.

    A value is dropped depending on the seed, the name of the layer, the epoch, the position of the sample in the epoch,
    the position of the token in the sample, and the position of the value in the vector. A rank that holds only some
    tokens of each sample (sequence or context parallelism) calls `set_token_positions`. A hash needs no state, so each
    rank computes the masks of its own values only.
    """

    def __init__(self, rate: float, seed: int, name: str) -> None:
        super().__init__(rate, seed, name)
        self.token_positions: Tensor | None = None
        """Positions of this rank's tokens in their sample; None if the layer gets all tokens of a sample."""
        self.shards = 1
        """Number of ranks among which the tokens of a sample are divided evenly."""

    def set_token_positions(self, positions: Tensor, shards: int) -> None:
        """Set the positions int64 [T] of this rank's tokens, and the number of ranks that divide a sample."""
        self.token_positions = positions
        self.shards = shards

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout to the token vectors [n, T, width] of the next microbatch."""
        if not self.training or not self.rate:
            return input
        positions = self.pop_positions(len(input))
        kept_share = 1 - self.rate
        dropped = self.draw_dropped(positions, input.shape[1], input.shape[2]).to(input.device)
        return (input / kept_share).masked_fill(dropped, 0.0)

    def draw_dropped(self, samples: range, tokens: int, width: int) -> Tensor:
        """Return a bool tensor [n, tokens, width] that is True for the values to drop."""
        key = seeds.derive_seed(self.seed, self.name, self.epoch)
        sample_numbers = torch.arange(samples.start, samples.stop)
        positions = torch.arange(tokens) if self.token_positions is None else self.token_positions
        # The number of a token in the epoch is the same for any division of the samples and tokens.
        rows = sample_numbers[:, None] * (tokens * self.shards) + positions
        row_bits = hash_numbers(rows, key)
        column_bits = hash_numbers(torch.arange(width), seeds.derive_seed(self.seed, self.name, COLUMN_PURPOSE))
        bits = mix_bits(row_bits[:, :, None] ^ column_bits)
        limit = round(self.rate * 2**HASH_BITS) - 2 ** (HASH_BITS - 1)
        return bits < limit


def shift_right(x: Tensor, bits: int, size: int) -> Tensor:
    """Return integers of `size` bits shifted to the right, with zeros as the first bits."""
    return (x >> bits) & ((1 << (size - bits)) - 1)


def hash_numbers(numbers: Tensor, key: int) -> Tensor:
    """Return a hash of int64 numbers as int32 numbers of the same shape (SplitMix64, Steele et al. 2014)."""
    x = numbers * to_signed(0x9E3779B97F4A7C15, 64) + key
    x = (x ^ shift_right(x, 30, 64)) * to_signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ shift_right(x, 27, 64)) * to_signed(0x94D049BB133111EB, 64)
    x = x ^ shift_right(x, 31, 64)
    return (x >> 32).to(torch.int32)


def mix_bits(x: Tensor) -> Tensor:
    """Mix the bits of int32 numbers in place, and return them (lowbias32 by Wellons, without its last shift)."""
    x ^= shift_right(x, 16, 32)
    x *= 0x7FEB352D
    x ^= shift_right(x, 15, 32)
    x *= to_signed(0x846CA68B, 32)
    return x


def to_signed(number: int, bits: int) -> int:
    """Return the signed integer with the same bits as an unsigned integer."""
    return number - (1 << bits) if number >> (bits - 1) else number
