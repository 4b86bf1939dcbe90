"""A GPT: a decoder-only transformer (Vaswani et al. 2017, arXiv 1706.03762; Radford et al. 2019).

The blocks follow LLaMA (Touvron et al. 2023, arXiv 2302.13971): RMSNorm before each branch (arXiv 1910.07467), rotary
position embedding (RoPE, arXiv 2104.09864), SwiGLU (arXiv 2002.05202), and no biases. Every weight is a separate
matrix, so that each shard of tensor parallelism is a slice of one dimension. `GPT.list_shard_dims` states once how each
parameter is divided: the layers, the formulas and torch's DTensors read it, and all other code reads the DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.networks import make_recipe
from common.models.position_dropout import PositionDropout
from common.system.errors import UserError
from configs.networks import choose_hidden_width

NOT_SCORED = -100
"""Target of a token without a loss, as in torch."""
INITIAL_STD = 0.02
"""Standard deviation of the initial weights (GPT-2)."""
NORM_EPSILON = 1e-5
ROTARY_BASE = 10_000.0
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: maps queries [N, heads, T, D] and keys and values [N, key_value_heads, T, D], whose heads may be
fewer, to outputs [N, heads, T, D]."""


@dataclass(frozen=True)
class ShardDims:
    """Dimensions of a parameter that the ranks of each mesh dimension divide. Replicas hold copies."""

    tensor: int | None
    """Dimension that the ranks of tensor parallelism divide, or None if each of them holds the whole parameter."""
    fsdp: int
    """Dimension that the ranks of sharded parameters divide."""


class KeyValueCache:
    """Keys and values of the tokens that an attention layer has processed, for generating text token by token."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [N, heads, T, D], and return those of all tokens so far."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys = keys
        self.values = values
        return keys, values


def rotate_positions(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate queries or keys [N, heads, T, D] by angles that are proportional to their positions int64 [T] (RoPE).

    The product of a query and a key then depends on the distance between the two tokens.
    """
    head_width = x.shape[-1]
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64, device=x.device) / head_width
    angles = torch.outer(positions.to(x.device, torch.float64), ROTARY_BASE**-exponents)
    cos = angles.cos().to(x.dtype)
    sin = angles.sin().to(x.dtype)
    first_half, second_half = x.chunk(2, dim=-1)
    rotated_first = first_half * cos - second_half * sin
    rotated_second = first_half * sin + second_half * cos
    return torch.cat([rotated_first, rotated_second], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al. 2023, arXiv 2305.13245).

    Each of the `key_value_heads` keys and values is used by heads / key_value_heads consecutive queries. The layer
    derives the number of its heads from the sizes of its weights, so that it also works with a shard of the heads.
    """

    def __init__(self, width: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_value_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, key_value_heads * self.head_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.cache: KeyValueCache | None = None
        """Keys and values of earlier tokens; None unless the model generates text."""
        self.attend: Attend = attend_to_past
        self.positions: Tensor | None = None
        """Positions int64 [T] of the tokens in their sample; None if the layer gets all tokens of a sample."""

    def divide_tokens(self, positions: Tensor, attend: Attend) -> None:
        """Let each rank process the tokens at some positions int64 [T], which are the inputs of the layer.

        `attend` gets the queries, keys and values of these tokens, and attends to the tokens of all ranks.
        """
        self.positions = positions
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, T, width] to attended tokens [N, T, width]."""
        past = self.cache.length if self.cache is not None else 0
        positions = self.positions
        if positions is None:
            positions = torch.arange(past, past + x.shape[1], device=x.device)
        queries = rotate_positions(self._split_heads(self.query(x)), positions)
        keys = rotate_positions(self._split_heads(self.key(x)), positions)
        values = self._split_heads(self.value(x))
        if self.cache is not None:
            keys, values = self.cache.append(keys, values)
        attended = self.attend(queries, keys, values)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        """Divide tokens [N, T, heads * D] into heads [N, heads, T, D]."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def attend_to_past(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend to all keys up to the position of each query.

    The T queries [N, heads, T, D] are those of the last T tokens of the keys and values [N, key_value_heads, past + T,
    D].
    """
    keys, values = (repeat_heads(x, queries.shape[1]) for x in (keys, values))
    past = keys.shape[2] - queries.shape[2]
    if past:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask_future(queries, past))
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each head of keys or values [N, key_value_heads, T, D] for all queries that use it."""
    group = heads // x.shape[1]
    return x.repeat_interleave(group, dim=1) if group > 1 else x


def mask_future(queries: Tensor, past: int) -> Tensor:
    """Return a mask [T, past + T] that is True where a query may attend to a key.

    The T queries [N, heads, T, D] follow `past` earlier tokens.
    """
    tokens = queries.shape[-2]
    return torch.ones(tokens, past + tokens, dtype=torch.bool, device=queries.device).tril(past)


class FeedForward(nn.Module):
    """The feed-forward branch of a block: SwiGLU with three matrices, or GELU with two."""

    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False) if activation == "swiglu" else None
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, T, width] to tokens [N, T, width], each by itself."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Embedding(nn.Embedding):
    """The table of token vectors [vocabulary, width], followed by dropout."""

    def __init__(self, vocabulary: int, width: int, dropout: PositionDropout) -> None:
        super().__init__(vocabulary, width)
        self.dropout = dropout

    def forward(self, input: Tensor) -> Tensor:
        """Map tokens [N, T] to vectors [N, T, width]."""
        return self.dropout(super().forward(input))


class Block(nn.Module):
    """A transformer block with two residual branches: attention and feed-forward."""

    def __init__(self, attention: Attention, feed_forward: FeedForward, dropouts: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        width = attention.output.out_features
        self.attention_norm = nn.RMSNorm(width, NORM_EPSILON)
        self.attention = attention
        self.attention_dropout = dropouts[0]
        self.feed_forward_norm = nn.RMSNorm(width, NORM_EPSILON)
        self.feed_forward = feed_forward
        self.feed_forward_dropout = dropouts[1]

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, T, width] to tokens [N, T, width]."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)))
        return x + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x)))


class TiedHead(nn.Module):
    """An output layer that has no weights: it uses the table of token vectors (arXiv 1608.05859)."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        # The tuple hides the embedding from nn.Module, so that the table has only one name in the model.
        self.embedding = (embedding,)

    @property
    def weight(self) -> Tensor:
        """The table [vocabulary, width]."""
        weight = self.embedding[0].weight
        assert isinstance(weight, Tensor)
        return weight

    def register_table(self) -> None:
        """Register the table as a parameter of this layer, because the embedding belongs to another rank."""
        self.add_module("table", self.embedding[0])

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, T, width] to logits [N, T, vocabulary]."""
        return F.linear(x, self.weight)


class GPT(nn.Sequential):
    """A small GPT, with the layers `embedding`, `block0`, `block1`, ..., `norm`, and `head`.

    The network maps tokens int64 [N, T] with T <= context to logits [N, T, vocabulary].

    `width`: size of a token vector.
    `layers`: number of blocks.
    `heads`, `key_value_heads`: number of heads of the queries, and of the keys and values (0: the same number).
    `hidden`: size of the feed-forward layer (0: four times the width for gelu, and 8/3 of the width for swiglu, which
        has three matrices instead of two).
    `activation`: swiglu or gelu.
    `tied`: use the table of token vectors also in the output layer.
    `dropout`, `seed`: rate and seed of the dropout on the token vectors and on both branches of each block.

    Raises UserError if the sizes do not fit together.
    """

    def __init__(
        self,
        context: int,
        vocabulary: int,
        *,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        key_value_heads: int = 0,
        hidden: int = 0,
        activation: str = "swiglu",
        tied: bool = True,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        key_value_heads = key_value_heads or heads
        hidden = hidden or choose_hidden_width(width, activation)
        check_heads(width, heads, key_value_heads)
        self.context = context
        self.vocabulary = vocabulary
        self.recipe = make_recipe(
            "GPT",
            context=context,
            vocabulary=vocabulary,
            width=width,
            layers=layers,
            heads=heads,
            key_value_heads=key_value_heads,
            hidden=hidden,
            activation=activation,
            tied=tied,
            dropout=dropout,
        )
        self.embedding = Embedding(vocabulary, width, PositionDropout(dropout, seed, "embedding"))
        for number in range(layers):
            attention_dropout = PositionDropout(dropout, seed, f"block{number}/attention")
            feed_forward_dropout = PositionDropout(dropout, seed, f"block{number}/feed_forward")
            block = Block(
                Attention(width, heads, key_value_heads),
                FeedForward(width, hidden, activation),
                (attention_dropout, feed_forward_dropout),
            )
            self.add_module(f"block{number}", block)
        self.norm = nn.RMSNorm(width, NORM_EPSILON)
        self.head = TiedHead(self.embedding) if tied else nn.Linear(width, vocabulary, bias=False)
        self._init_weights(layers)

    @torch.no_grad()
    def _init_weights(self, layers: int) -> None:
        """Draw all matrices from a normal distribution.

        The weights that end a residual branch are smaller, so that the sum of all branches does not grow with the
        number of blocks (GPT-2).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            ends_branch = name.endswith((".attention.output.weight", ".feed_forward.down.weight"))
            parameter.normal_(std=INITIAL_STD / (2 * layers) ** 0.5 if ends_branch else INITIAL_STD)

    @property
    def blocks(self) -> list[Block]:
        """The blocks in their order."""
        return [layer for layer in self if isinstance(layer, Block)]

    def keep_layers(self, names: Collection[str]) -> None:
        """Delete all layers except some, because other ranks hold them."""
        for name, _ in list(self.named_children()):
            if name not in names:
                delattr(self, name)

    def list_shard_dims(self) -> dict[str, ShardDims]:
        """Return the dimensions in which each parameter is divided among ranks, by name.

        Tensor parallelism divides queries, keys, values and the first feed-forward matrices by outputs (dimension 0),
        the matrices that end a branch by inputs (dimension 1), and the tables of token vectors by tokens (dimension 0).
        Every rank of tensor parallelism holds the scales of the norms. Sharded parameters are divided by dimension 0,
        the only one that `fully_shard` can divide unevenly.
        """
        dims = {}
        for name, parameter in self.named_parameters():
            tensor_dim: int | None = 0
            if parameter.dim() < 2:
                tensor_dim = None
            elif name.endswith(("output.weight", "down.weight")):
                tensor_dim = 1
            dims[name] = ShardDims(tensor=tensor_dim, fsdp=0)
        return dims

    def forward(self, input: Tensor) -> Tensor:
        """Map tokens int64 [N, T] to logits [N, T, vocabulary]."""
        if input.shape[1] > self.context:
            raise ValueError(f"the text has {input.shape[1]} tokens, but the context of the model is {self.context}")
        return super().forward(input)


def check_heads(width: int, heads: int, key_value_heads: int) -> None:
    """Raise UserError if the width or the key-value heads cannot be divided among the heads."""
    if width % (2 * heads):
        multiple = 2 * heads
        nearest = max(multiple, width // multiple * multiple)
        problem = f"width must be a multiple of 2 x heads = {multiple} (got {width})"
        raise UserError(f"{problem}; use width={nearest} or other heads")
    if heads % key_value_heads:
        raise UserError(
            f"heads={heads} is not a multiple of key_value_heads={key_value_heads}; use key_value_heads=0 for as many "
            "as heads"
        )
