"""Method of gpt_parallel: a small GPT under any layout, with dropout and with targets that are not scored."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data import loader
from common.data.prepare import PreparedDataset
from common.models.gpt import GPT, NOT_SCORED
from common.models.position_dropout import PositionDropout
from common.models.sample_dropout import list_dropout_layers
from common.runs.result import ReportData
from common.system.seeds import derive_seed
from common.techniques.language_model.targets import draw_ignored
from common.techniques.parallel_layout import parallel_model, tensor_layers
from common.techniques.parallel_layout.attention_blocks import Attended
from common.techniques.parallel_layout.parallel_model import ParallelModel
from common.techniques.parallel_layout.tensor_layers import BranchNorm, TiedParallelHead
from common.training import gradient_norm
from configs.gpt_parallel import Config
from experiments import gpt_parallel
from tests.harness.parity import reference
from tests.harness.parity.method import Outcome, ParityMethod, change_result
from tests.harness.repository import ROOT

VOCABULARY = 256
STEPS = 20
SETTINGS = (
    "data.name=text",
    f"data.root={ROOT / 'common/training/loop.py'}",
    "data.context=16",
    "data.train_limit=43",  # 5 batches per epoch; 3 samples are left out
    "data.test_limit=21",  # not a multiple of 2 or 4
    "width=32",
    "layers=2",
    "heads=4",
    "replicas=1",
    "dropout=0.2",
    "masked=0.3",
    "batch=8",
    "eval_batch=8",
    "optim.name=adamw",
    "optim.lr=0.01",
    "optim.weight_decay=0.1",
    "optim.decayed=matrices",
    "optim.warmup=5",
    "optim.decay=cosine",
    "clip=1",
    "epochs=5",
    f"steps={STEPS}",
    "seed=7",
)


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
    for epoch in itertools.count():
        order = torch.from_numpy(loader.draw_sample_order(len(inputs), cfg.seed, epoch))
        full_batches = len(order) // cfg.batch
        for number in range(min(full_batches, cfg.steps - len(losses))):
            positions = range(number * cfg.batch, (number + 1) * cfg.batch)
            for layer in list_dropout_layers([model]):
                layer.set_positions(epoch, [positions])
            samples = order[positions.start : positions.stop]
            ignored = draw_ignored(positions, cfg.data.context, cfg.masked, derive_seed(cfg.seed, "masked", epoch))
            scored_targets = targets[samples].masked_fill(ignored, NOT_SCORED)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[samples]).flatten(0, 1), scored_targets.flatten())
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), cfg.clip).item())
            rate = reference.compute_learning_rate(cfg.optim, len(losses), cfg.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            losses.append(loss.item())
        if len(losses) == cfg.steps:
            break
    test_inputs, test_targets = load_tokens(prepared, "test", cfg.data.test_limit)
    model.eval()
    with torch.no_grad():
        test_loss = F.cross_entropy(model(test_inputs).flatten(0, 1), test_targets.flatten()).item()
    scores = {"test_loss": test_loss, "test_samples": len(test_inputs)}
    return {"losses": losses, "norms": norms, "state": dict(model.named_parameters()), "scores": scores}


# ---- mistakes


def redraw_shards(original: Any, model: GPT, ranks: Any) -> None:
    """Draw the initial values of each shard on its rank, instead of slicing the initial values of the whole model."""
    original(model, ranks)
    torch.manual_seed(100 + ranks.index)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                tensor_layers.get_local_shard(parameter).normal_(std=0.02)


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


def use_equal_masks(parallel: ParallelModel) -> None:
    """Use the same mask for the different samples of all ranks."""
    for layer in list_dropout_layers([parallel.model]):
        layer.set_positions = lambda epoch, microbatches: None  # type: ignore[method-assign]


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
    """Sum the gradient of the head's use of the table over the ranks, which hold different rows."""
    weight = tensor_layers.get_local_shard(head.weight)
    return F.linear(x, weight + weight - weight.detach())


def average_per_rank(original: Any, parallel: ParallelModel, logits: Tensor, targets: Tensor) -> Tensor:
    """Average the losses of each rank over its own scored tokens."""
    mean_count = 0.7 * targets.numel()  # only the weights of the ranks are wrong, not the size of the loss
    count = (targets != NOT_SCORED).sum()
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
    """Sum over the ranks of fsdp only, as torch's norm does if tensor shards are plain tensors under fully_shard."""
    square = clip_by_local_norm(original, gradients).square()
    torch.distributed.all_reduce(square, group=gradients[0].device_mesh.get_group("fsdp"))
    return square.sqrt()


MISTAKES = {
    "redraws_shards": [(tensor_layers, "divide_model", redraw_shards)],
    "forgets_token_shards": [change_result(gpt_parallel, "parallelize", forget_token_shards)],
    "different_masks": [change_result(gpt_parallel, "parallelize", use_different_masks)],
    "equal_masks": [change_result(gpt_parallel, "parallelize", use_equal_masks)],
    "restarts_positions": [change_result(gpt_parallel, "parallelize", restart_positions)],
    "averages_outputs": [(Attended, "merge", average_outputs)],
    "partial_scales": [(BranchNorm, "forward", keep_partial_scale_gradients)],
    "unties_head": [(TiedParallelHead, "forward", untie_head)],
    "counts_table_twice": [(TiedParallelHead, "forward", count_table_twice)],
    "averages_per_rank": [(parallel_model.ParallelModel, "sum_loss", average_per_rank)],
    "local_norm": [(gradient_norm, "compute_sharded_norm", clip_by_local_norm)],
    "counts_copies": [(gradient_norm, "compute_sharded_norm", count_copies)],
    "ignores_tensor_shards": [(gradient_norm, "compute_sharded_norm", ignore_tensor_shards)],
}
GPT_PARALLEL = ParityMethod(
    name="gpt_parallel_cases:GPT_PARALLEL",
    schema=Config,
    train=gpt_parallel.main,
    settings=SETTINGS,
    ranks_setting="",
    replacements=[(gpt_parallel, "TextReport", lambda original, run, prompt: ReportData({}))],
    changes=MISTAKES,
    build_model=build_gpt,
    train_reference=train_reference,
)
