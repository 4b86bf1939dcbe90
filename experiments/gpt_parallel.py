"""A GPT under pipeline, tensor, sequence, context, sharded and replicated parallelism, each equal to a single process.

    python experiments/gpt_parallel.py                               two replicas on this machine
    python experiments/gpt_parallel.py replicas=1                    a single process
    python experiments/gpt_parallel.py tensor=2 sequence=true        divided matrices and tokens
    python experiments/gpt_parallel.py context=2                     divided tokens, also in attention
    python experiments/gpt_parallel.py fsdp=2                        sharded parameters
    python experiments/gpt_parallel.py stages=2 accumulate=4         layers divided into pipeline stages
    python experiments/gpt_parallel.py replicas=2 zero1=true         sharded optimizer state
    python experiments/gpt_parallel.py recompute=blocks              few activations are kept for backward
    make exp NAME=gpt_parallel NODES=2                               on a cluster

A run takes less than a minute on 2 CPU cores. It trains on the source text of Python's standard library and ends with a
held-out cross-entropy below that of a bigram model. `data.root` selects another text.

`batch` is the number of samples of `data.context` bytes per step, over all ranks and microbatches. The loss is the mean
over all valid target tokens of the batch. If shards have different numbers of valid tokens, the mean of the ranks' mean
losses is another value. Each rank therefore divides the sum of its losses by the number of valid tokens of the whole
batch, which the ranks add up before the first backward pass.
"""

from __future__ import annotations

from common.api import Run, build_network, build_optimizer, start
from common.models.gpt import GPT
from common.models.model_file import load_initial_weights
from common.techniques.language_model.report import TextReport, add_bits_per_byte
from common.techniques.language_model.targets import TokenCount, count_valid_tokens, mask_targets
from common.techniques.parallel_layout import parallelize
from common.techniques.parallel_layout.layout_report import LayoutReport
from common.techniques.recompute import recompute_blocks
from common.techniques.sharded_optimizer import divide_optimizer_state
from common.training.loop import Step
from configs.gpt_parallel import Config

from functools import partial
from typing import Any

import torch
from torch import Tensor


def build_model(cfg: Config, run: Run) -> Any:
    """Build the network and load its initial weights. The weights are the same on every rank."""
    network: Any
    if cfg.model == "gpt":
        size = cfg.size
        network = GPT(
            run.sample_shape[0],
            run.outputs,
            width=size.width,
            layers=size.layers,
            heads=size.heads,
            key_value_heads=size.key_value_heads,
            hidden=size.hidden,
            activation=size.activation,
            tied=size.tied,
            dropout=cfg.dropout,
            seed=cfg.seed,
        )
    else:
        network = build_network(cfg.model, run.sample_shape, run.outputs)
    network = network.to(run.device, run.dtype)
    load_initial_weights(network, cfg.initial.weights, cfg.runs)
    return network


def main(cfg: Config, run: Run) -> None:
    network = build_model(cfg, run)
    recompute_blocks(network, cfg.memory.recompute)  # discards activations, and computes them again in backward
    autocast = torch.autocast(run.device.type, torch.bfloat16, enabled=cfg.precision == "bf16")
    parallel = parallelize(network, cfg.layout, run, autocast)  # divides layers and parameters among the ranks
    if cfg.state_sharding.zero1:
        divide_optimizer_state(run, parallel.copies)  # each rank updates some parameters, and sends them
    optimizer = build_optimizer(network.parameters(), cfg.optim)
    batches = run.microbatches(cfg.accumulate, shard=parallel.data_shard)  # a list of microbatches for each step
    run.register(network, optimizer, batches, replicated=parallel.peers is None, peers=parallel.peers)
    meter = run.add_step_meter()  # measures memory and messages of the first step

    def evaluate() -> dict[str, float]:
        return add_bits_per_byte(parallel.score(run), run)

    def compute_loss(step: Step, valid_tokens: TokenCount, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a microbatch. The mean over all ranks is its part of the loss of the batch."""
        losses = parallel.sum_loss(logits, targets)
        if not cfg.layout.waits_in_forward:  # otherwise, the time would contain waiting for other ranks
            step.mark_backward()
        return losses * run.world.size / valid_tokens.wait()

    for step in run.steps(evaluate):
        optimizer.zero_grad()
        microbatches = parallel.select_tokens(mask_targets(step, batches, cfg.masked, cfg.seed))  # of this rank
        valid_tokens = count_valid_tokens(microbatches)  # of all ranks, while the first forward pass is computed
        loss = parallel.forward_backward(microbatches, partial(compute_loss, step, valid_tokens))
        parallel.average_gradients()  # over the replicas and the ranks of context
        step.log(loss=loss)
        step.clip_gradients(network.parameters(), cfg.clip)
        optimizer.step()
    layout_report = LayoutReport.gather(cfg, run, parallel, meter)
    run.report(TextReport(run, cfg.prompt), layout_report, *parallel.gather_reports(run))


if __name__ == "__main__":
    start(main, Config)
