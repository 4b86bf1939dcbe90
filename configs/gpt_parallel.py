"""Settings for experiments/gpt_parallel.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, format_nearest_multiples, list_divisors
from configs.dataparallel import RanksPerNode
from configs.fields import at_least, between, flat
from configs.layout import Layout
from configs.memory import StateSharding
from configs.networks import choose_hidden_width, network_field
from configs.shared import InitialWeights, TrainingExperiment

BYTE_VOCABULARY = 256
"""Number of different tokens of a text whose tokens are bytes."""


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
        hidden = self.hidden or choose_hidden_width(self.width, self.activation)
        return {"heads": self.heads, "key_value_heads": key_value_heads, "hidden": hidden}

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
class LayoutSettings(RanksPerNode):
    """Settings that determine the layout of a run. The number of replicas may depend on the number of ranks."""

    processes_per_node: int = at_least(0, 0)
    """Number of ranks per host. With replicas=0, 0 uses the number in the cluster profile, or the number that torchrun
    or srun started. Otherwise, `replicas`, `fsdp`, `context` and `tensor` determine the number of ranks."""
    tensor: int = between(1, 64, 1)
    """Number of ranks among which each matrix is divided (tensor parallelism, arXiv 1909.08053)."""
    sequence: bool = False
    """Also divide the tokens among the ranks of tensor parallelism, outside of attention and feed-forward layers
    (sequence parallelism, arXiv 2205.05198). This divides the memory of these activations."""
    context: int = between(1, 64, 1)
    """Number of ranks among which the tokens of each sample are divided, also inside of attention (context parallelism
    with ring attention, arXiv 2310.01889). `data.context` is the number of tokens of a sample. CPUs only."""
    fsdp: int = between(1, 64, 1)
    """Number of ranks among which parameters, gradients and optimizer states are divided (fully sharded data
    parallelism, arXiv 2304.11277). Each rank processes a different shard of the batch. With `context`, the ranks that
    divide the tokens also divide the parameters."""
    reshard: bool = True
    """With fsdp, free the gathered parameters of a block after its forward pass, and gather them again for its
    backward pass. false keeps them, which needs more memory and less communication."""
    replicas: int = between(0, 64, 0)
    """Number of copies of the model, each of which processes a different shard of the batch. With fsdp, this is hybrid
    sharding. 0 uses as many replicas as the ranks allow. If nothing sets the number of ranks, one host has two replicas
    of an undivided model or one of a divided model, and several hosts have the fewest that use all hosts equally."""

    @property
    def is_set(self) -> bool:
        return self.replicas != 0 or super().is_set

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that process the samples of a replica."""
        return self.fsdp * self.context * self.tensor

    def count_ranks(self, nodes: int) -> int:
        if self.processes_per_node:
            return nodes * self.processes_per_node
        if self.replicas:
            return self.replicas * self.ranks_per_replica
        if nodes == 1 and self.ranks_per_replica == 1:
            return 2
        return math.lcm(nodes, self.ranks_per_replica)

    def resolve(self, nodes: int) -> Layout:
        """Return the layout of a run on `nodes` hosts.

        Raises ValueError if the ranks cannot be divided into complete replicas.
        """
        ranks = self.count_ranks(nodes)
        replicas = self.replicas or ranks // self.ranks_per_replica
        if replicas * self.ranks_per_replica == ranks:
            return Layout(
                tensor=self.tensor,
                sequence=self.sequence,
                context=self.context,
                fsdp=self.fsdp,
                reshard=self.reshard,
                replicas=replicas,
            )

        count = f"launch.nodes={nodes} x processes_per_node={self.processes_per_node} = {ranks}"
        degrees = f"fsdp={self.fsdp} x context={self.context} x tensor={self.tensor}"
        if self.replicas:
            problem = f"the number of ranks, {count}, differs from replicas={self.replicas} x {degrees}"
            raise ValueError(f"{problem}; set replicas=0 or processes_per_node=0")
        multiple = math.lcm(nodes, self.ranks_per_replica) // nodes
        problem = f"the number of ranks, {count}, cannot be divided evenly by {degrees}"
        raise ValueError(f"{problem}; use processes_per_node={multiple} or a multiple of {multiple}")


@dataclass(frozen=True)
class Config(TrainingExperiment):
    """Settings for training a GPT."""

    rank_settings: ClassVar[str] = "replicas, fsdp, context or tensor, whose product is the number of ranks"
    smallest_settings: ClassVar[tuple[str, ...]] = (
        *("data.name=text", "data.context=16", "width=16", "layers=2", "heads=2", "batch=16", "optim.warmup=0"),
    )

    model: str = network_field("gpt", "gpt")
    """Network to train. gpt is a decoder-only transformer. FILE.py:Class is a custom network, which maps tokens int64
    [N, T] to logits [N, T, vocabulary]. The logits of a position must not depend on later tokens. The ranks of a custom
    network can only be replicas. `width`, `layers`, `heads`, `key_value_heads`, `hidden`, `activation` and `tied` then
    have no effect."""
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
    layout_settings: LayoutSettings = flat(LayoutSettings)
    state_sharding: StateSharding = flat(StateSharding)
    initial: InitialWeights = flat(InitialWeights)

    @property
    def processes(self) -> int:
        return self.layout_settings.count_ranks(self.launch.nodes)

    @property
    def layout(self) -> Layout:
        """Division of the model and the batches among the ranks of the run."""
        return replace(self.layout_settings.resolve(self.launch.nodes), zero1=self.state_sharding.zero1)

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, self.layout.data_shards, self.accumulate)

    def check(self) -> None:
        super().check()
        if self.data.name != "text":
            raise ValueError(f"gpt_parallel trains on text (got data.name={self.data.name}); use data.name=text")
        is_divided = self.layout.tensor > 1 or self.layout.context > 1 or self.layout.fsdp > 1
        if is_divided and self.model != "gpt":
            degrees = "tensor, context and fsdp"
            raise ValueError(f"{degrees} divide model=gpt only; with model={self.model}, use replicas instead")
        if self.layout.context > 1 and self.launch.device == "cuda":
            raise ValueError("context runs on CPUs only; set launch.device=cpu, or use context=1")
        self.layout.check(self.size.divided_sizes, self.batch, self.data.context)
        self.state_sharding.check(self.layout.copies, "replicas=2 or more")
        if self.data.tokenizer == "none":
            self.check_vocabulary(BYTE_VOCABULARY)
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

    def check_vocabulary(self, size: int) -> None:
        degree = self.layout.tensor
        if size % degree:
            valid = [divisor for divisor in list_divisors(size) if divisor <= degree]
            problem = f"tensor={degree} does not divide the vocabulary of {size} tokens evenly"
            raise ValueError(f"{problem}; use tensor={valid[-1]}, or another tokenizer")
