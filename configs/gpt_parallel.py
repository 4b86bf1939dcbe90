"""Settings for experiments/gpt_parallel.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, format_nearest_multiples
from configs.fields import at_least, between, flat
from configs.layout import Layout
from configs.networks import network_field
from configs.shared import InitialWeights, TrainingExperiment

VOCABULARY = 256
"""Number of values of a byte."""


@dataclass(frozen=True)
class NetworkSize:
    """Sizes of the network gpt."""

    width: int = between(2, 65_536, 128)
    """Size of a token vector."""
    layers: int = between(1, 1024, 4)
    """Number of transformer blocks."""
    heads: int = between(1, 4096, 4)
    """Number of attention heads."""
    key_value_heads: int = between(0, 4096, 0)
    """Number of heads of the keys and values, each of which several attention heads share (arXiv 2305.13245). 0 uses as
    many as `heads`."""
    hidden: int = between(0, 1_000_000, 0)
    """Size of the feed-forward layer. 0 uses four times the width for gelu, and about 8/3 of the width for swiglu,
    which then has as many parameters."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Activation of the feed-forward layer (SwiGLU, arXiv 2002.05202, or GELU, arXiv 1606.08415)."""
    tied: bool = True
    """Use the table of token vectors also as the output matrix (arXiv 1608.05859)."""

    @property
    def divided_sizes(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides, by the names of their settings."""
        key_value_heads = self.key_value_heads or self.heads
        return {"heads": self.heads, "key_value_heads": key_value_heads, "hidden": self.hidden}

    def check(self) -> None:
        """Raise ValueError if the sizes cannot be divided among the heads."""
        key_value_heads = self.key_value_heads or self.heads
        if self.width % (2 * self.heads):
            remedy = f"use width={format_nearest_multiples(self.width, 2 * self.heads)}, or change heads"
            raise ValueError(f"width={self.width} cannot be divided into heads={self.heads} of even size; {remedy}")
        if self.heads % key_value_heads:
            raise ValueError(
                f"heads={self.heads} cannot be divided evenly among key_value_heads={key_value_heads}; use a divisor "
                "of heads, or key_value_heads=0"
            )


@dataclass(frozen=True)
class Config(TrainingExperiment):
    """Settings for training a GPT."""

    rank_settings: ClassVar[str] = "replicas, fsdp, context or tensor, whose product is the number of ranks"
    smallest_settings: ClassVar[tuple[str, ...]] = (
        *("data.name=text", "data.context=16", "width=16", "layers=2", "heads=2", "batch=16", "optim.warmup=0"),
    )

    model: str = network_field("gpt", "gpt")
    """Network to train. gpt is a decoder-only transformer. FILE.py:Class is a custom network, which maps tokens int64
    [N, T] to logits [N, T, 256]; its ranks can only be replicas."""
    size: NetworkSize = flat(NetworkSize)
    dropout: float = between(0, 0.95, 0)
    """Dropout probability for token vectors and for the branches of each block. The mask of a value depends only on its
    position in the epoch, so that every layout drops the same values."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Numeric precision of matrix products. bf16 uses autocast with parameters in float32."""
    accumulate: int = at_least(1, 1)
    """Number of microbatches per optimizer step. `batch` is the number of samples of a step over all ranks."""
    masked: float = between(0, 0.95, 0)
    """Fraction of the target tokens that are drawn at random and do not count in the loss, as in a training on answers
    only. Samples, ranks and microbatches then have different numbers of valid tokens. An evaluation counts all
    tokens."""
    prompt: str = "def "
    """Text that the trained model continues in the final table."""
    clip: float = between(0, 1e6, 1)
    """Maximum gradient norm; 0 disables clipping. The norm is the Euclidean norm over the gradients of all parameters,
    for the whole batch."""
    layout: Layout = flat(Layout)
    initial: InitialWeights = flat(InitialWeights)

    @property
    def processes(self) -> int:
        return self.layout.ranks

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, self.layout.data_shards, self.accumulate)

    def check(self) -> None:
        super().check()
        is_divided = self.layout.tensor > 1 or self.layout.context > 1 or self.layout.fsdp > 1
        if is_divided and self.model != "gpt":
            degrees = "tensor, context and fsdp"
            raise ValueError(f"{degrees} divide model=gpt only; with model={self.model}, use replicas instead")
        if self.layout.context > 1 and self.launch.device == "cuda":
            raise ValueError("context runs on CPUs only; set launch.device=cpu, or use context=1")
        self.layout.check(self.size.divided_sizes, self.batch, self.data.context)
        if VOCABULARY % self.layout.tensor:
            problem = f"tensor={self.layout.tensor} does not divide the vocabulary of {VOCABULARY} bytes evenly"
            raise ValueError(f"{problem}; use tensor=2, 4, 8, 16, 32 or 64")
        if self.dtype == "float64" and self.precision == "bf16":
            raise ValueError("precision=bf16 cannot be combined with dtype=float64; omit one of them")
        if self.loss != "cross_entropy":
            raise ValueError(f"loss={self.loss} is not available for text; omit loss")
        if self.model == "gpt":
            self.size.check()
        elif self.dropout:
            remedy = "omit dropout, or add dropout layers to the custom network"
            raise ValueError(f"dropout={self.dropout:g} applies to model=gpt only; {remedy}")
        divisor = self.layout.data_shards * self.accumulate
        if self.batch % divisor:
            problem = f"batch={self.batch} cannot be divided evenly into accumulate={self.accumulate} microbatches"
            shards = f" of fsdp x replicas = {self.layout.data_shards} shards"
            raise ValueError(f"{problem}{shards}; use batch={format_nearest_multiples(self.batch, divisor)}")
