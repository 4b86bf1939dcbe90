"""Pipeline parallelism: each rank holds one or several stages, which consist of consecutive layers of a GPT.

The executor, the schedules and the messages are those of `common.techniques.pipeline`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.models.gpt import GPT, Block, TiedHead
from common.ranks.rendezvous import World
from common.runs.result import Report
from common.techniques.parallel_layout import stage_formulas
from common.techniques.parallel_layout.mesh_ranks import MeshRanks
from common.techniques.parallel_layout.model_shape import TABLE, Layers, ParameterSize, Shape
from common.techniques.parallel_layout.parallel_model import MESH_DIMS, ComputeLoss, Microbatch, ParallelModel
from common.techniques.parallel_layout.stage_formulas import RankStages
from common.techniques.parallel_layout.table_copy import TableCopy
from common.techniques.pipeline import api as pipeline
from common.training.evaluate import score_test_set
from common.training.run import Run


class StageExecutor(pipeline.ScheduleExecutor):
    """Executor of the stages of a GPT, whose parameters may be sharded (FSDP2).

    The gradients of sharded parameters are reduced once per step, in the last backward of each stage. `autocast` is the
    context of forward passes. `reshard` states whether parameters are freed after a backward that is not the last.
    `layers` contains the names of the layers of each stage.
    """

    def __init__(
        self,
        autocast: AbstractContextManager[Any],
        reshard: bool,
        layers: list[list[str]],
        *arguments: Any,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.layers = layers
        self.autocast = autocast
        self.reshard = reshard
        self.backwards: Counter[int] = Counter()
        """Number of backwards of each sharded stage in the current step."""

    def compute_stage(self, stage: int, x: Tensor) -> Tensor:
        """Return the output of a stage of this rank."""
        with self.autocast:
            return super().compute_stage(stage, x)

    def prepare_backward(self, stage: int) -> None:
        """Let the last backward of a sharded stage reduce the gradients of the step."""
        module: Any = self.local_stages[stage]
        if not hasattr(module, "set_requires_gradient_sync"):  # added by fully_shard
            return
        self.backwards[stage] += 1
        is_last = self.backwards[stage] == self.count
        if is_last:
            del self.backwards[stage]
        module.set_requires_gradient_sync(is_last)
        module.set_reshard_after_backward(is_last or self.reshard)


class PipelineModel(ParallelModel):
    """A model whose layers are divided among the ranks of the dimension `stages`."""

    def divide(self, run: Run) -> None:
        """Divide the model among the ranks of the mesh, and connect the ranks of each pipeline."""
        assert self.mesh is not None and isinstance(self.model, GPT)
        self.pipeline_ranks = MeshRanks(self.mesh["stages"])
        self.pipeline_world = run.world.make_subgroup(dist.get_process_group_ranks(self.pipeline_ranks.group))
        holders = self.mesh.mesh.select(MESH_DIMS.index("stages"), self.pipeline_ranks.index)
        self.holders = run.world.make_subgroup(holders.flatten().tolist())
        self.settings = self.layout.make_pipeline_config(run.training_cfg.batch_plan.microbatches)
        if self.settings.microbatches == 1 and run.world.is_main:
            notice = "all stages but one are idle at any time, because a step has one microbatch"
            print(f"{notice}; use accumulate=4 or more", flush=True)
        self.plan = pipeline.make_schedule(self.settings)
        self.placement = pipeline.list_stage_ranks(self.plan)

        self.divide_layers_and_tokens()
        all_stages = pipeline.split_into_stages(self.model, choose_stage_starts(self.model, self.layout.stages))
        layer_names = [list(dict(stage.named_children())) for stage in all_stages]
        self.stages: dict[int, nn.Sequential] = {}
        for stage, rank in enumerate(self.placement):
            if rank == self.pipeline_ranks.index:
                self.stages[stage] = all_stages[stage]
        self.table_copy = self._copy_table(self.model)
        if self.layout.fsdp > 1:
            self.shard_parameters(list(self.stages.values()))
            for module in self.stages.values():
                prefetch_within_stage(module)
        if self.table_copy is not None:
            self.table_copy.connect(self.model.embedding)
        self.model.keep_layers(self._list_kept_layers())
        self.executor = self._build_executor(self.model, layer_names, run)
        run.set_up_step_meter([self.layers], self.executor.shared_memory_bytes)

    def _copy_table(self, model: GPT) -> TableCopy | None:
        """Return the exchange of a tied table, whose copy becomes a parameter of the last stage only.

        Return None on ranks without the table, or if the first and the last stage are on the same rank.
        """
        first = self.placement[0]
        last = self.placement[-1]
        self.copied: dict[str, ParameterSize] = {}
        if not isinstance(model.head, TiedHead) or first == last or self.pipeline_ranks.index not in (first, last):
            return None
        if self.pipeline_ranks.index == last:
            dims = model.list_shard_dims()[TABLE]
            self.copied = {TABLE: ParameterSize(tuple(model.embedding.weight.shape), dims)}
            model.head.register_table()
        return TableCopy(self.pipeline_ranks, first, last)

    def _list_kept_layers(self) -> set[str]:
        """Return the names of the layers that the optimizer trains and that checkpoints contain on this rank."""
        names: set[str] = set()
        for stage in self.stages.values():
            names.update(dict(stage.named_children()))
        return names - {"head"} if self.copied else names

    def _build_executor(self, model: GPT, layer_names: list[list[str]], run: Run) -> StageExecutor:
        tokens = run.sample_shape[0] // self.layout.context
        if self.layout.sequence:
            tokens //= self.layout.tensor
        boundary = torch.Size([tokens, model.recipe["arguments"]["width"]])
        return StageExecutor(
            self.autocast,
            self.layout.reshard,
            layer_names,
            self.plan,
            self.stages,
            [boundary] * self.layout.stages,
            self.pipeline_world,
            microbatches=self.settings.microbatches,
            size=run.training_cfg.batch_plan.microbatch,
            dtype=run.dtype,
        )

    @property
    def layers(self) -> nn.Module:
        """All layers that this rank computes, with the copy of a tied table."""
        return nn.ModuleList(self.stages.values())

    @property
    def peers(self) -> World | None:
        """Ranks that hold the same stages as this rank."""
        return self.holders

    def forward_backward(self, microbatches: Sequence[Microbatch], compute_loss: ComputeLoss) -> Tensor:
        """Compute the passes of all microbatches in the order of the schedule, and add the gradients.

        The ranks with the last stage compute the losses. They return the sum of their losses, multiplied by the number
        of ranks of a pipeline, and all other ranks return 0. The mean over all ranks is therefore the same as without
        stages.
        """
        if self.table_copy is not None:
            self.table_copy.start_update()
        inputs = [x for x, _ in microbatches]
        targets = [y for _, y in microbatches]
        total = self.executor.execute(inputs, targets, compute_loss, len(microbatches))
        if self.table_copy is not None:
            self.table_copy.finish_update()
        if total is None:
            return torch.zeros((), dtype=self.executor.dtype, device=self.pipeline_world.device)
        return total * self.layout.stage_ranks

    def average_gradients(self) -> None:
        """Add the gradients of both uses of a tied table. Then average the gradients over replicas and context."""
        if self.table_copy is not None:
            self.table_copy.return_gradient()
        super().average_gradients()

    def score(self, run: Run) -> dict[str, float]:
        """Return the test scores. All ranks must call this method."""
        if self.table_copy is not None:
            self.table_copy.start_update()
            self.table_copy.finish_update()
        return score_test_set(self.predict, run, shard=self.data_shard)

    def predict(self, x: Tensor | None, count: int) -> Tensor | None:
        """Return the logits [n, T, vocabulary] on the first of the ranks with the last stage and the same samples."""
        assert x is not None
        if not count:
            x = x.new_zeros(1, *x.shape[1:])  # all ranks of fsdp must take part
        if self.context_ranks is not None:
            x = self.context_ranks.select_tokens(x)
        output = self.executor.predict(x, len(x))
        logits = None if output is None else self.join_logits(output)
        return None if logits is None else logits[:count]

    def gather_reports(self, run: Run) -> list[Report]:
        """Return the report on the schedule and the idle shares. All ranks must call this method."""
        report = pipeline.PipelineReport.gather(
            self.executor, self.pipeline_world, self.settings, run.folder.path, "a GPT"
        )
        return [report]

    def predict_bytes(self, sizes: Mapping[str, ParameterSize], shape: Shape) -> dict[str, int]:
        """Return the bytes of this rank by category, and the bytes that it sends in a step, from formulas."""
        return stage_formulas.predict_bytes(sizes, shape, self.layout, self._describe_stages())

    def _describe_stages(self) -> RankStages:
        layers = {}
        messages = 0
        for stage, module in self.stages.items():
            names = dict(module.named_children())
            blocks = sum(isinstance(layer, Block) for layer in module.children())
            layers[stage] = Layers(blocks, has_embedding="embedding" in names, has_head="head" in names)
            for neighbor in (stage - 1, stage + 1):
                if neighbor in range(self.layout.stages) and neighbor not in self.stages:
                    messages += 1
        actions = self.plan[self.pipeline_ranks.index]
        return RankStages(layers, actions, messages, self.copied, sends_table=self.table_copy is not None)


def choose_stage_starts(model: GPT, stages: int) -> list[str]:
    """Return the names of the blocks that start a new stage, so that the stages need similar numbers of operations.

    The cost of a block is its number of weights, plus 2 T d for the products of queries, keys and values: a sixth of
    its operations per token. The output layer belongs to the last block, and the lookup in the table costs nothing.
    """
    width = model.recipe["arguments"]["width"]
    costs: dict[str, float] = {}
    for name, layer in model.named_children():
        if isinstance(layer, Block):
            weights = sum(parameter.numel() for parameter in layer.parameters() if parameter.dim() > 1)
            costs[name] = weights + 2 * model.context * width
    costs[list(costs)[-1]] += model.vocabulary * width
    return pipeline.balance_stages(costs, stages)


def prefetch_within_stage(stage: nn.Module) -> None:
    """Let each block of a sharded stage gather the parameters of the preceding block in the backward pass.

    By default, FSDP2 follows the order of the last forward passes, which may belong to another microbatch.
    """
    blocks: list[Any] = [layer for layer in stage.children() if isinstance(layer, Block)]
    root: Any = stage
    root.set_modules_to_backward_prefetch([blocks[-1]])
    blocks[0].set_modules_to_backward_prefetch([blocks[0]])  # nothing: its parameters are already gathered
    for preceding, block in pairwise(blocks):
        block.set_modules_to_backward_prefetch([preceding])
