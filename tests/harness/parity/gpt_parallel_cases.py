"""Method of gpt_parallel: a small GPT under any layout, with dropout and with targets that are not scored."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from common.checkpoint.state_dicts import gather_full_tensor
from common.data import loader
from common.data.prepare import PreparedDataset
from common.models.gpt import GPT, NOT_SCORED, ShardDims
from common.models.position_dropout import PositionDropout
from common.models.sample_dropout import list_dropout_layers
from common.runs.result import ReportData
from common.system.seeds import derive_seed
from common.techniques.language_model.targets import draw_ignored
from common.techniques.parallel_layout import layout_report, parallel_model, tensor_layers
from common.techniques.parallel_layout.attention_blocks import Attended
from common.techniques.parallel_layout.parallel_model import ParallelModel
from common.techniques.parallel_layout.pipeline_model import StageExecutor
from common.techniques.parallel_layout.tensor_layers import BranchNorm, TiedParallelHead
from common.training import gradient_norm
from common.training.hooks import StepHook
from common.training.loop import Step
from common.training.run import Run
from configs.gpt_parallel import Config, LayoutSettings
from configs.memory import StateSharding
from experiments import gpt_parallel
from tests.harness.parity import reference
from tests.harness.parity.method import (
    Outcome,
    ParityMethod,
    Replacement,
    change_result,
    collect_state,
    replace_attributes,
)
from tests.harness.repository import ROOT
from tests.harness.settings_text import split_settings

VOCABULARY = 256
STEPS = 20
INTERRUPTED_STEP = 5
"""Step after whose checkpoint a training is interrupted. With up to two microbatches, it is the last step of an epoch,
and the training is resumed with an evaluation."""
DELAY_SECONDS = 0.03
"""Additional time of a step on a slow rank."""
TEXT_FILE = ROOT / "common/training/loop.py"
SMALL_SETTINGS = """
    data.name=text data.context=16 data.train_limit=43 data.test_limit=21
    width=32 layers=2 heads=4 replicas=1 dropout=0.2 masked=0.3 batch=8 eval_batch=8
    optim.name=adamw optim.lr=0.01 optim.weight_decay=0.1 optim.decayed=matrices
    optim.warmup=5 optim.decay=cosine clip=1 epochs=5 seed=7
"""
"""An epoch has 5 batches and leaves out 3 of the 43 samples. 21 test samples are not a multiple of 2 or 4."""
SETTINGS = (*split_settings(SMALL_SETTINGS), f"data.root={TEXT_FILE}", f"steps={STEPS}")

MEMORY_TOLERANCES = {
    "parameters": 0,
    "peak_parameters": 0.05,
    "gradients": 0,
    "peak_gradients": 0,
    "optimizer": 0,
    "activations": 0.05,
    "peak_activations": 0.05,
}
"""Largest relative difference of measured bytes from a formula, by category."""
SENT_TOLERANCE = 0.01
SENT_NUMBERS_BYTES = 100
"""Limit for the messages that no formula counts: the norm of the gradients and the number of valid tokens."""


def list_formula_gaps(result: dict[str, Any]) -> list[str]:
    """Return the categories of memory and messages whose measurement is not the value of their formula."""
    gaps = []
    for name, tolerance in (MEMORY_TOLERANCES | {"sent": SENT_TOLERANCE}).items():
        if name == "peak_activations" and "peak_activations_bytes" not in result:
            continue  # only runs that recompute activations measure this peak
        measured = result[f"{name}_bytes"]
        formula = result[f"predicted_{name}_bytes"]
        uncounted = SENT_NUMBERS_BYTES if name == "sent" else 0
        if abs(measured - formula) > tolerance * formula + uncounted:
            gaps.append(f"{name}: {measured} bytes, {formula} by the formula")
    return gaps


def load_tokens(prepared: PreparedDataset, part: str, limit: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets int64 [N, T]."""
    inputs = torch.from_numpy(prepared.map_array(f"{part}_images")[:limit]).long()
    targets = torch.from_numpy(prepared.map_array(f"{part}_labels")[:limit]).long()
    return inputs, targets


def build_gpt(cfg: Any) -> nn.Module:
    size = cfg.size
    return GPT(
        cfg.data.context,
        VOCABULARY,
        width=size.width,
        layers=size.layers,
        heads=size.heads,
        key_value_heads=size.key_value_heads,
        hidden=size.hidden,
        activation=size.activation,
        tied=size.tied,
        dropout=cfg.dropout,
        seed=cfg.seed,
    ).double()


class FirstStep:
    """Observations of the first step on one rank."""

    def __init__(self) -> None:
        self.initial: dict[str, Tensor] = {}
        """Initial full parameters, by name."""
        self.gradients: dict[str, Tensor] = {}
        """Full gradients before clipping, by name."""
        self.mask = torch.empty(0)
        """Values [n, T, width] that the dropout layer of the embedding drops in this rank's samples and tokens."""

    def record_initial(self, parallel: ParallelModel) -> None:
        if not self.initial:
            state = collect_state([parallel.model])
            self.initial = {name: tensor.clone() for name, tensor in state.items()}

    def record_gradients(self, original: Any, step: Step, parameters: Any, max_norm: float) -> None:
        if not self.gradients:
            assert step.run.state is not None
            for name, parameter in step.run.state.parts[0].named_parameters():
                gradient: Any = parameter.grad
                self.gradients[name] = gather_full_tensor(gradient).clone()
        original(step, parameters, max_norm)

    def record_mask(self, original: Any, layer: PositionDropout, *arguments: Any) -> Tensor:
        mask: Tensor = original(layer, *arguments)
        if not len(self.mask):
            self.mask = mask
        return mask


def train(cfg: Config, run: Run) -> Outcome:
    """Train, and return the first steps of all ranks on rank 0.

    `before_backward` is the time of a rank from the start of a typical step to backward, if it was measured.
    """
    forget_meshes()
    first_step = FirstStep()
    with replace_attributes(
        change_result(gpt_parallel, "parallelize", first_step.record_initial),
        (Step, "clip_gradients", first_step.record_gradients),
        (PositionDropout, "draw_dropped", first_step.record_mask),
    ):
        gpt_parallel.main(cfg, run)
    times = run.times.summarize_steps() if run.times else None
    before_backward = times.before_backward if times else None
    observations = vars(first_step) | {"before_backward": before_backward}
    torch.save(observations, run.folder.path / f"first-step-{run.world.rank}.pt")
    torch.distributed.barrier()
    if not run.world.is_main:
        return {}
    files = [run.folder.path / f"first-step-{rank}.pt" for rank in range(run.world.size)]
    first_steps = [torch.load(file, weights_only=True) for file in files]
    return {"first_steps": first_steps}


def forget_meshes() -> None:
    """Clear torch's cache of DTensor operations.

    It contains the meshes of earlier cases, and equal meshes of later cases have process groups with other names.
    """
    _clear_sharding_prop_cache()


def train_reference(cfg: Any, model: nn.Module, prepared: PreparedDataset, _: tuple[int, ...]) -> Outcome:
    """Train in one process. The loss is the mean over the scored tokens of the whole batch."""
    inputs, targets = load_tokens(prepared, "train", cfg.data.train_limit)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    scales = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": scales, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1, weight_decay=cfg.optim.weight_decay)
    model.train()
    losses: list[float] = []
    norms: list[float] = []
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first_step: dict[str, Any] = {"initial": initial}
    for epoch in itertools.count():
        order = torch.from_numpy(loader.draw_sample_order(len(inputs), cfg.seed, epoch))
        microbatch = cfg.batch // cfg.accumulate
        used_samples = len(order) // microbatch * microbatch  # the last step of an epoch may have fewer microbatches
        for start in range(0, used_samples, cfg.batch)[: cfg.steps - len(losses)]:
            positions = range(start, min(start + cfg.batch, used_samples))
            for layer in list_dropout_layers([model]):
                layer.set_positions(epoch, [positions])
            samples = order[positions.start : positions.stop]
            mask_seed = derive_seed(cfg.seed, "masked", epoch)
            ignored = draw_ignored(positions, cfg.data.context, cfg.masked, mask_seed)
            scored_targets = targets[samples].masked_fill(ignored, NOT_SCORED)
            optimizer.zero_grad()
            logits = model(inputs[samples]).flatten(0, 1)
            loss = F.cross_entropy(logits, scored_targets.flatten())
            loss.backward()
            if not losses:
                first_step |= observe_gradients_and_mask(model, positions, cfg)
                token_losses = F.cross_entropy(logits.detach(), scored_targets.flatten(), reduction="none")
                first_step["inputs"] = inputs[samples]
                first_step["targets"] = targets[samples]
                first_step["is_scored"] = ~ignored
                first_step["losses"] = token_losses.view_as(ignored)
            norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
            norms.append(norm.item())
            rate = reference.compute_learning_rate(cfg.optim, len(losses), cfg.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            losses.append(loss.item())
        if len(losses) == cfg.steps:
            break
    scores = score(cfg, model, prepared)
    state = dict(model.named_parameters())
    return {"losses": losses, "norms": norms, "state": state, "scores": scores, "first_step": first_step}


def observe_gradients_and_mask(model: Any, samples: range, cfg: Any) -> dict[str, Any]:
    """Return the gradients, by name, and the values [N, T, width] that the embedding's dropout layer drops."""
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    mask = model.embedding.dropout.draw_dropped(samples, cfg.data.context, cfg.size.width)
    return {"gradients": gradients, "mask": mask}


def score(cfg: Any, model: nn.Module, prepared: PreparedDataset) -> dict[str, float]:
    test_inputs, test_targets = load_tokens(prepared, "test", cfg.data.test_limit)
    model.eval()
    with torch.no_grad():
        logits = model(test_inputs).flatten(0, 1)
    test_loss = F.cross_entropy(logits, test_targets.flatten())
    return {"test_loss": test_loss.item(), "test_samples": len(test_inputs)}


# ---- changes: each function gets the function that it replaces as first argument


class Interrupted(Exception):
    """Ends a training at its last checkpoint."""


class Interruption(StepHook):
    """Hook that interrupts a training after a checkpoint."""

    def between_steps(self, number: int) -> None:
        if number == INTERRUPTED_STEP:
            raise Interrupted


def resume_training(original: Any, cfg: Config, run: Run, **changes: Any) -> None:
    """Train with other settings until an interruption. Then resume with the settings of the case."""
    interrupted_cfg = dataclasses.replace(cfg, **changes)
    interrupted = Run(interrupted_cfg, run.folder, run.ranks, run.prepared)
    interrupted.add_hook(Interruption())
    with contextlib.suppress(Interrupted):
        original(interrupted.cfg, interrupted)
    interrupted.close()
    forget_meshes()
    original(cfg, run)
    assert run.resumed_after == INTERRUPTED_STEP


def resume_from_fsdp(original: Any, cfg: Config, run: Run) -> None:
    """Resume from a checkpoint of sharded parameters without tensor parallelism."""
    changes = {"layout_settings": LayoutSettings(fsdp=run.world.size), "state_sharding": StateSharding()}
    resume_training(original, cfg, run, **changes)


def resume_from_context(original: Any, cfg: Config, run: Run) -> None:
    """Resume from a checkpoint of ranks that divide the tokens only."""
    resume_training(original, cfg, run, layout_settings=LayoutSettings(context=run.world.size))


def resume_from_selective(original: Any, cfg: Config, run: Run) -> None:
    """Resume from a checkpoint of a training that recomputed only cheap operations."""
    memory = dataclasses.replace(cfg.memory, recompute="selective")
    resume_training(original, cfg, run, memory=memory)


def resume_from_stages(original: Any, cfg: Config, run: Run) -> None:
    """Resume from a checkpoint of pipeline stages."""
    resume_training(original, cfg, run, layout_settings=LayoutSettings(stages=run.world.size))


def use_network(original: Any, *arguments: Any, **options: Any) -> None:
    """Send messages between stages through the process group instead of shared memory."""
    original(*arguments, transport="network", **options)


def resume_from_zero1(original: Any, cfg: Config, run: Run) -> None:
    """Resume from a checkpoint of replicas that divide the optimizer state. On four ranks, they divide matrices too."""
    layout = LayoutSettings(tensor=run.world.size // 2, replicas=2)
    resume_training(original, cfg, run, layout_settings=layout, state_sharding=StateSharding(zero1=True))


def slow_down_last_rank(original: Any, *arguments: Any) -> Any:
    """Let the last rank need more time before its forward pass."""
    last_rank = torch.distributed.get_world_size() - 1
    if torch.distributed.get_rank() == last_rank:
        time.sleep(DELAY_SECONDS)
    return original(*arguments)


def divide_other_dims(original: Any, model: GPT) -> dict[str, ShardDims]:
    """State that sharded parameters divide the last dimension of each parameter."""
    ranks = {name: parameter.dim() for name, parameter in model.named_parameters()}
    return {name: dataclasses.replace(dims, fsdp=ranks[name] - 1) for name, dims in original(model).items()}


# ---- mistakes


def redraw_shards(original: Any, model: GPT, ranks: Any) -> None:
    """Draw the initial values of each shard on its rank, instead of slicing the initial values of the whole model."""
    original(model, ranks)
    torch.manual_seed(100 + ranks.index)
    dims = model.list_shard_dims()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if dims[name].tensor is not None:
                shard = tensor_layers.get_local_shard(parameter)
                shard.normal_(std=shard.std().item())


def forget_token_shards(parallel: ParallelModel) -> None:
    """Use the masks of the first tokens for all shards of the tokens."""
    for layer in list_dropout_layers([parallel.model]):
        assert isinstance(layer, PositionDropout)
        assert layer.token_positions is not None
        layer.set_token_positions(torch.arange(len(layer.token_positions)), layer.shards)


def use_different_masks(parallel: ParallelModel) -> None:
    """Use another mask on each rank, although all ranks hold the same tokens."""
    assert parallel.tensor_ranks is not None
    for layer in list_dropout_layers([parallel.model]):
        layer.seed += parallel.tensor_ranks.index


def use_equal_masks(original: Any, layer: PositionDropout, samples: range, tokens: int, width: int) -> Tensor:
    """Use the masks of the samples of rank 0 on all replicas."""
    offset = torch.distributed.get_rank() * len(samples)
    mask: Tensor = original(layer, range(samples.start - offset, samples.stop - offset), tokens, width)
    return mask


def restart_positions(parallel: ParallelModel) -> None:
    """Let each rank count the positions of its own tokens from 0."""
    assert isinstance(parallel.model, GPT)
    for block in parallel.model.blocks:
        positions = block.attention.positions
        assert positions is not None
        block.attention.divide_tokens(torch.arange(len(positions)), block.attention.attend)


def average_outputs(original: Any, attended: Attended, other: Attended) -> None:
    """Average the outputs of two blocks of keys, although their softmax has other sums."""
    original(attended, dataclasses.replace(attended, outputs=other.outputs))


def keep_partial_scale_gradients(original: Any, norm: BranchNorm, x: Tensor) -> Tensor:
    """Do not sum the gradient of the scales over the tokens of all ranks."""
    weight = tensor_layers.get_local_shard(norm.weight)
    return norm.ranks.start_branch(F.rms_norm(x, weight.shape, weight, norm.epsilon))


def untie_head(original: Any, head: TiedParallelHead, x: Tensor) -> Tensor:
    """Lose the gradient of the head's use of the table."""
    return F.linear(x, tensor_layers.get_local_shard(head.weight).detach())


def count_table_twice(original: Any, head: TiedParallelHead, x: Tensor) -> Tensor:
    """Count the gradient of the head's use of the table twice."""
    weight = tensor_layers.get_local_shard(head.weight)
    return F.linear(x, weight + weight - weight.detach())


def average_per_rank(original: Any, parallel: ParallelModel, logits: Tensor, targets: Tensor) -> Tensor:
    """Average the losses of each rank over its own scored tokens. The loss is the mean of the ranks' means."""
    count = (targets != NOT_SCORED).sum()
    total = count.clone()
    torch.distributed.all_reduce(total)
    mean_count = total / torch.distributed.get_world_size()
    return original(parallel, logits, targets) / count * mean_count


def clip_by_local_norm(original: Any, gradients: Any) -> Tensor:
    """Compute the norm of this rank's shards only."""
    return nn.utils.get_total_norm([tensor_layers.get_local_shard(gradient) for gradient in gradients])


def count_copies(original: Any, gradients: Any) -> Tensor:
    """Count gradients that every rank holds once per rank."""
    square = clip_by_local_norm(original, gradients).square()
    torch.distributed.all_reduce(square)
    return square.sqrt()


def ignore_tensor_shards(original: Any, gradients: Any) -> Tensor:
    """Let torch compute the norm of plain tensor shards under fully_shard. torch knows the dimension fsdp only."""
    shards = []
    for gradient in gradients:
        shard = tensor_layers.get_local_shard(gradient)
        shards.append(DTensor.from_local(shard, gradient.device_mesh["fsdp"], [Shard(0)]))
    norm: Any = nn.utils.get_total_norm(shards)
    total: Tensor = norm.full_tensor()
    return total


def replace_main(train_differently: Any) -> Sequence[Replacement]:
    """Return the replacement of the script's function `main`."""
    return [(gpt_parallel, "main", train_differently)]


def replace_norm(compute_differently: Any) -> Sequence[Replacement]:
    """Return the replacement of the norm of divided gradients."""
    return [(gradient_norm, "compute_sharded_norm", compute_differently)]


def change_layout(change: Callable[[ParallelModel], None]) -> Sequence[Replacement]:
    """Return the replacement that changes a model after it has been divided."""
    return [change_result(gpt_parallel, "parallelize", change)]


CHANGES: dict[str, Sequence[Replacement]] = {
    "resumed": replace_main(resume_training),
    "resumed_from_fsdp": replace_main(resume_from_fsdp),
    "resumed_from_context": replace_main(resume_from_context),
    "resumed_from_stages": replace_main(resume_from_stages),
    "over_network": [(StageExecutor, "__init__", use_network)],
    "resumed_from_zero1": replace_main(resume_from_zero1),
    "resumed_from_selective": replace_main(resume_from_selective),
    "slow_rank": [(gpt_parallel, "mask_targets", slow_down_last_rank)],
    "other_dims": [(GPT, "list_shard_dims", divide_other_dims)],
    "redraws_shards": [(tensor_layers, "divide_model", redraw_shards)],
    "forgets_token_shards": change_layout(forget_token_shards),
    "different_masks": change_layout(use_different_masks),
    "equal_masks": [(PositionDropout, "draw_dropped", use_equal_masks)],
    "restarts_positions": change_layout(restart_positions),
    "averages_outputs": [(Attended, "merge", average_outputs)],
    "partial_scales": [(BranchNorm, "forward", keep_partial_scale_gradients)],
    "unties_head": [(TiedParallelHead, "forward", untie_head)],
    "counts_table_twice": [(TiedParallelHead, "forward", count_table_twice)],
    "averages_per_rank": [(parallel_model.ParallelModel, "sum_loss", average_per_rank)],
    "local_norm": replace_norm(clip_by_local_norm),
    "counts_copies": replace_norm(count_copies),
    "ignores_tensor_shards": replace_norm(ignore_tensor_shards),
}
GPT_PARALLEL = ParityMethod(
    name="gpt_parallel_cases:GPT_PARALLEL",
    schema=Config,
    train=train,
    settings=SETTINGS,
    ranks_setting="",
    replacements=[
        (gpt_parallel, "TextReport", lambda original, run, prompt: ReportData({})),
        (layout_report, "PRODUCT_SIZES", {"cpu": 8}),  # the rate of large matrix products takes longer than a case
    ],
    changes=CHANGES,
    build_model=build_gpt,
    train_reference=train_reference,
)
