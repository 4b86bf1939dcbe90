"""Settings for experiments/gpt_parallel.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, format_nearest_multiples, list_divisors
from configs.dataparallel import RanksPerNode
from configs.fields import at_least, between, custom_code, flat
from configs.layout import Layout
from configs.memory import Memory, StateSharding
from configs.networks import choose_hidden_width, network_field
from configs.pipeline import SPLIT_BACKWARD_SCHEDULES, MicrobatchError, PipelineConfig, list_recompute_refusals
from configs.shared import InitialWeights, TrainingExperiment
from configs.strategies import Refusal, Strategies

BYTE_VOCABULARY = 256
"""Number of different tokens of a text whose tokens are bytes."""
STRATEGIES = Strategies(
    degrees={
        "replicas": ({}, {"zero1": "true"}),
        "stages": (
            {"schedule": "1f1b"},
            {"schedule": "gpipe"},
            {"schedule": "zero_bubble"},
            {"schedule": "interleaved_1f1b", "stages_per_process": "2"},
            {"schedule": "zbv", "stages_per_process": "2"},
            {"schedule": "dualpipev", "stages_per_process": "2"},
        ),
        "fsdp": ({}, {"reshard": "false"}),
        "context": ({},),
        "tensor": ({}, {"sequence": "true"}),
    },
    # Eight blocks for up to eight stages. A pipeline of four ranks with two stages each needs eight microbatches. All
    # strategies have the same number of microbatches, so that their memory can be compared.
    options=({}, {"recompute": "blocks"}),
    run={
        "layers": "8",
        "batch": "32",
        "accumulate": "8",
        "steps": "8",
        "evaluate_every": "0",
        "data.context": "64",
        "data.test_limit": "64",
        "prompt": "d",
    },
)
GPT_ONLY = "tensor, context, fsdp and stages divide model=gpt only"
REFUSED = (
    *(
        Refusal(f"{degree}>1", "model!=gpt", GPT_ONLY, "use replicas instead, or model=gpt")
        for degree in ("tensor", "context", "fsdp", "stages")
    ),
    *(
        Refusal(
            "fsdp>1", f"schedule={schedule}",
            "schedule={schedule} cannot be combined with fsdp, because it splits backward passes",
            "use schedule=1f1b or interleaved_1f1b, or tensor instead of fsdp", third="stages>1",
        )
        for schedule in SPLIT_BACKWARD_SCHEDULES
    ),
    *list_recompute_refusals(has_schedule="stages>1"),
    Refusal(
        "dropout>0", "model!=gpt", "dropout={dropout} applies to model=gpt only",
        "omit dropout, or add dropout layers to the custom network",
    ),
    Refusal(
        "context>1", "launch.device=cuda", "context runs on CPUs only", "set launch.device=cpu, or use context=1"
    ),
    Refusal(
        "sequence=true", "tensor=1", "sequence=true divides the tokens among the ranks of tensor parallelism",
        "set tensor=2 or more, or omit sequence=true",
    ),
    Refusal(
        "reshard=false", "fsdp=1", "reshard=false applies to fsdp only",
        "set fsdp=2 or more, or omit reshard=false",
    ),
    Refusal(
        "precision=bf16", "dtype=float64", "precision=bf16 cannot be combined with dtype=float64",
        "omit precision, or omit dtype",
    ),
)  # fmt: skip
"""Combinations of settings that are refused. Sizes that a degree does not divide are refused by `Layout.check`."""


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

    def count_parameters(self, vocabulary: int) -> int:
        """Return the number of parameters of gpt with a vocabulary of this size."""
        sizes = self.divided_sizes
        key_value_width = sizes["key_value_heads"] * (self.width // self.heads)
        matrices = 3 if self.activation == "swiglu" else 2
        block = self.width * (2 * self.width + 2 * key_value_width + matrices * sizes["hidden"] + 2)
        tables = 1 if self.tied else 2
        return self.layers * block + self.width * (tables * vocabulary + 1)

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
    or srun started. Otherwise, `replicas`, `stages`, `fsdp`, `context` and `tensor` determine the number of ranks."""
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
    backward pass. With false, the parameters stay gathered until the block's backward pass (with stages, until the
    last backward pass of the step). This needs more memory and less communication."""
    stages: int = between(1, 64, 1)
    """Number of stages among which the blocks are divided, balanced by their computation (pipeline parallelism, arXiv
    1811.06965). The stages process different microbatches at the same time: `accumulate` is the number of
    microbatches."""
    stages_per_process: int = between(1, 64, 1)
    """Number of stages per rank. Stage s is placed on rank s modulo the number of ranks of a pipeline. zbv and
    dualpipev need two stages per rank: of p ranks, rank r holds the stages r and 2p - 1 - r."""
    schedule: str = custom_code(
        "1f1b", "schedule", "common.techniques.pipeline.custom_schedules:check_schedule_of_config"
    )
    """Pipeline schedule: naive, gpipe (arXiv 1811.06965), 1f1b (2006.09503), interleaved_1f1b (2104.04473), zero_bubble
    (ZB-H1, 2401.10241), zbv (2401.10241), dualpipev (2412.19437), or a custom schedule as FILE.py:function. The last
    three built-in schedules cannot be combined with fsdp. The setting has no effect with stages=1."""
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
        return self.stages // self.stages_per_process * self.fsdp * self.context * self.tensor

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
        if self.stages % self.stages_per_process:
            problem = f"stages={self.stages} is not divisible by stages_per_process={self.stages_per_process}"
            raise ValueError(f"{problem}; valid values of stages_per_process are {list_divisors(self.stages)}")
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
                stages=self.stages,
                stages_per_process=self.stages_per_process,
                schedule=self.schedule,
            )

        count = f"launch.nodes={nodes} x processes_per_node={self.processes_per_node} = {ranks}"
        degrees = f"fsdp={self.fsdp} x context={self.context} x tensor={self.tensor}"
        if self.stages > 1:
            per_process = f" / stages_per_process={self.stages_per_process}" if self.stages_per_process > 1 else ""
            degrees = f"stages={self.stages}{per_process} x {degrees}"
        if self.replicas:
            problem = f"the number of ranks, {count}, differs from replicas={self.replicas} x {degrees}"
            raise ValueError(f"{problem}; set replicas=0 or processes_per_node=0")
        multiple = math.lcm(nodes, self.ranks_per_replica) // nodes
        problem = f"the number of ranks, {count}, cannot be divided evenly by {degrees}"
        raise ValueError(f"{problem}; use processes_per_node={multiple} or a multiple of {multiple}")


@dataclass(frozen=True)
class Config(TrainingExperiment):
    """Settings for training a GPT."""

    rank_settings: ClassVar[str] = "replicas, stages, fsdp, context or tensor, whose product is the number of ranks"
    smallest_settings: ClassVar[tuple[str, ...]] = (
        *("data.name=text", "data.context=16", "width=16", "layers=2", "heads=2", "batch=16", "optim.warmup=0"),
    )
    strategies: ClassVar[Strategies] = STRATEGIES
    refused: ClassVar[tuple[Refusal, ...]] = REFUSED

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
    """Number of microbatches per optimizer step, which overlap if there are stages. `batch` is the number of samples of
    a step over all ranks. At the end of an epoch, only a partial microbatch is dropped, so that the last step of the
    epoch may have fewer microbatches."""
    masked: float = between(0, 0.95, 0)
    """Fraction of the target tokens, chosen at random, that are excluded from the loss, as when only the answers of a
    dialogue are trained. Samples, ranks and microbatches then have different numbers of valid tokens. An evaluation
    counts all tokens."""
    prompt: str = "def "
    """Text that the trained model continues in the final table."""
    clip: float = between(0, 1e6, 1)
    """Maximum gradient norm; 0 disables clipping. The norm is the Euclidean norm over the gradients of all parameters,
    for the whole batch."""
    layout_settings: LayoutSettings = flat(LayoutSettings)
    initial: InitialWeights = flat(InitialWeights)
    memory: Memory = flat(Memory)
    state_sharding: StateSharding = flat(StateSharding)

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

    @property
    def estimated_parameters(self) -> float:
        """Number of parameters of gpt, or 0 for custom networks. The vocabulary of a tokenizer may be larger."""
        return self.size.count_parameters(BYTE_VOCABULARY) if self.model == "gpt" else 0

    @property
    def replicas_per_host(self) -> float:
        return self.layout.copies / self.launch.nodes

    def make_pipeline_config(self) -> PipelineConfig:
        """Return the settings of the pipeline."""
        return self.layout.make_pipeline_config(self.accumulate)

    def check(self) -> None:
        super().check()
        if self.data.name != "text":
            raise ValueError(f"gpt_parallel trains on text (got data.name={self.data.name}); use data.name=text")
        self.layout.check(self.size.divided_sizes, self.batch, self.accumulate, self.data.context)
        self.state_sharding.check(self.layout.copies, "replicas=2 or more")
        if self.data.tokenizer == "none":
            self.check_vocabulary(BYTE_VOCABULARY)
        if self.loss != "cross_entropy":
            raise ValueError(f"loss={self.loss} is not available for text; omit loss")
        if self.model == "gpt":
            self.size.check()
        self.check_stages()

    def check_stages(self) -> None:
        """Raise ValueError if the blocks cannot be divided into stages, or if the schedule does not allow it."""
        layout = self.layout
        if layout.stages == 1:
            return
        if layout.stages > self.size.layers:
            problem = f"stages={layout.stages} exceeds layers={self.size.layers}, and each stage needs a block"
            raise ValueError(f"{problem}; use stages={self.size.layers}, or more layers")
        if layout.stage_ranks == 1:
            raise ValueError(
                f"stages_per_process={layout.stages_per_process} places all stages on one rank; use stages=1 "
                "stages_per_process=1, or more stages than stages_per_process"
            )
        try:
            self.make_pipeline_config().check_schedule()
        except MicrobatchError as error:
            raise ValueError(f"{error}; the number of microbatches is accumulate") from None

    def check_vocabulary(self, size: int) -> None:
        degree = self.layout.tensor
        if size % degree:
            valid = [divisor for divisor in list_divisors(size) if divisor <= degree]
            problem = f"tensor={degree} does not divide the vocabulary of {size} tokens evenly"
            raise ValueError(f"{problem}; use tensor={valid[-1]}, or another tokenizer")
