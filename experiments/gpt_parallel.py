"""A GPT on several ranks: tensor, sequence, sharded and replicated parallelism, each equal to a single process.

    python experiments/gpt_parallel.py                                         two replicas on this machine
    python experiments/gpt_parallel.py replicas=1                              a single process
    python experiments/gpt_parallel.py replicas=1 tensor=2 sequence=true       divided matrices and tokens
    python experiments/gpt_parallel.py replicas=1 fsdp=2                       sharded parameters
    make exp NAME=gpt_parallel NODES=2                                         on a cluster

A run takes about two minutes on 2 CPU cores. It trains on the source text of Python's standard library and ends with a
held-out cross-entropy below that of a bigram model. `data.root` selects another text.

`batch` is the number of samples of `data.context` bytes per step, over all ranks and microbatches. The loss is the mean
over all valid target tokens of the batch. If shards have different numbers of valid tokens, the mean of the ranks' mean
losses is another value. Each rank therefore divides the sum of its losses by the number of valid tokens of the whole
batch, which the ranks add up before the first backward pass.
"""

from __future__ import annotations

from common.api import Run, build_network, build_optimizer, score_test_set, start
from common.models.gpt import GPT
from common.models.model_file import load_initial_weights
from common.techniques.language_model.report import TextReport, add_bits_per_byte
from common.techniques.language_model.targets import mask_targets
from common.techniques.parallel_layout.parallel_model import ParallelModel, parallelize
from configs.gpt_parallel import Config

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


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
    load_initial_weights(network, cfg.initial.weights, cfg.runs)
    return network.to(run.device, run.dtype)


def evaluate(cfg: Config, run: Run, network: nn.Module, parallel: ParallelModel) -> dict[str, float]:
    """Return the loss of the held-out text in nats per token and in bits per byte, identical on every rank."""
    is_first = run.world.rank % cfg.layout.tensor == 0  # one of the ranks that process the same samples

    def predict(x: Tensor | None, _: int) -> Tensor | None:
        logits = parallel.join_logits(network(x))
        return logits if is_first else None

    return add_bits_per_byte(score_test_set(predict, run, shard=parallel.data_shard), run)


def main(cfg: Config, run: Run) -> None:
    network = build_model(cfg, run)
    parallel = parallelize(network, cfg.layout, run)
    optimizer = build_optimizer(network.parameters(), cfg.optim)
    batches = run.microbatches(cfg.accumulate, shard=parallel.data_shard)  # the list of microbatches of each step
    run.register(network, optimizer, batches, replicated=True)

    for step in run.steps(partial(evaluate, cfg, run, network, parallel)):
        optimizer.zero_grad()
        microbatches = mask_targets(step, batches, cfg.masked, cfg.seed)
        tokens = parallel.count_tokens(torch.stack([y for _, y in microbatches]))  # of the whole batch, per shard
        step_loss = torch.zeros((), dtype=run.dtype, device=run.device)
        for x, y in microbatches:
            loss = parallel.sum_loss(network(x), y) / tokens
            step_loss += loss.detach()
            loss.backward()  # adds to the gradients; with fsdp, it also averages them over the ranks
        parallel.average_gradients()  # over the replicas
        step.log(loss=step_loss)
        step.clip_gradients(network.parameters(), cfg.clip)
        optimizer.step()
    run.report(TextReport(run, cfg.prompt))


if __name__ == "__main__":
    start(main, Config)
