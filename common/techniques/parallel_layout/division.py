"""Division of a GPT among the ranks of a mesh."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from common.system.errors import UserError
from common.techniques.parallel_layout.parallel_model import MESH_DIMS, ParallelModel
from common.training.run import Run
from configs.layout import Layout


def parallelize(
    model: nn.Module, layout: Layout, run: Run, autocast: AbstractContextManager[Any] | None = None
) -> ParallelModel:
    """Divide a model among the ranks of a run, and return what a training step needs.

    The model must have the same parameters on all ranks. Only a GPT can be divided; any other model can have replicas.
    The layers of the model are replaced, and those of other stages are deleted. Parameters keep their names, and become
    DTensors if they are divided. Build the optimizer afterward. `autocast` is the context of forward passes. The mesh
    has the dimensions `replicas`, `stages`, `fsdp`, `context` and `tensor`; ranks that differ only in the last one are
    neighbors. Raises UserError if context parallelism is not available on the device.
    """
    autocast = autocast or nullcontext()
    if layout.ranks == 1:
        return ParallelModel(model, layout, None, autocast)
    if layout.context > 1 and run.device.type != "cpu":
        raise UserError(f"context={layout.context} runs on CPUs only; set launch.device=cpu, or use context=1")
    sizes = (layout.replicas, layout.stage_ranks, layout.fsdp, layout.context, layout.tensor)
    mesh = init_device_mesh(run.device.type, sizes, mesh_dim_names=MESH_DIMS)
    model_class = ParallelModel
    if layout.stages > 1:
        from common.techniques.parallel_layout.pipeline_model import PipelineModel  # a technique that few runs use

        model_class = PipelineModel
    parallel = model_class(model, layout, mesh, autocast)
    parallel.divide(run)
    return parallel
