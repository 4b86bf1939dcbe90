"""Local SGD: every worker trains alone for several steps, then all workers average their progress.

    python experiments/local_sgd.py                                            two workers, an exchange every 8 steps
    python experiments/local_sgd.py processes_per_node=4 every=16 start=200    the first 200 steps as in DDP
    python experiments/local_sgd.py every=32 outer=nesterov outer_lr=0.7 optim.name=adamw optim.lr=0.001      DiLoCo
    python experiments/local_sgd.py communication=int8 delay=4                 a quarter of the bytes, overlapped
    make exp NAME=local_sgd NODES=4                                            on a cluster

A run takes about a minute on 2 CPU cores. Expect a test accuracy of 98 % on MNIST after one epoch. If MNIST is not
available, the built-in digits are used instead.

At the beginning of a round, all workers hold the same parameters x, the reference. Worker i takes `every` = H steps of
its own optimizer on its shard of each batch, without waiting for other workers. The workers then exchange their
differences d_i = x - x_i. The outer step uses the mean difference d to compute a new reference, from which all workers
continue:

    mean                  x <- x - outer_lr d           the mean of the x_i at outer_lr=1 (Stich 2018, arXiv 1805.09767)
    nesterov              m <- outer_momentum m + d,  x <- x - outer_lr (d + outer_momentum m)
                          (Douillard et al. 2023, arXiv 2311.08105; its workers use AdamW)

H steps therefore need one message of the size of the model instead of H messages. During the first `start` steps,
gradients are averaged as in DDP, because differences are large at the beginning (post-local SGD, Lin et al. 2018, arXiv
1808.07217). H is the number of optimizer steps that each worker takes; it is not a number of samples, and it is not
summed over workers. Evaluation and the saved model use the mean of the workers' parameters, but each worker continues
with its own parameters.

`communication` selects the compression of messages. The compression error is added to the worker's next difference
(error feedback, Basu et al. 2019, arXiv 1906.02367). With `delay` = D, workers keep training during the exchange and
take the outer step D steps later: x_i <- x + (x_i - x_i at the beginning of the exchange). No local step is lost or
applied twice (overlapped exchanges: Douillard et al. 2025, arXiv 2501.18512; Kale et al. 2025, arXiv 2502.12996).
"""

from __future__ import annotations

from common.api import ReportData, Run, UserError, build_optimizer, init_network, start
from common.system.seeds import derive_seed
from common.system.text import format_count
from common.techniques.local_sgd.exchange import Bf16Exchange, Exchange, Int8Exchange, TopkExchange
from common.techniques.local_sgd.powersgd import PowerSgdExchange
from common.techniques.local_sgd.state import LocalState
from common.techniques.local_sgd.worker import LocalWorker
from configs.local_sgd import Config

import torch
from torch import nn


def create_exchange(cfg: Config, network: nn.Module, workers: int) -> Exchange:
    """Create the exchange that cfg.communication selects.

    Workers exchange vectors that contain all parameters of the network.
    """
    parameters = list(network.parameters())
    vector = torch.cat([p.detach().flatten() for p in parameters])
    match cfg.communication:
        case "bf16":
            return Bf16Exchange(vector, workers)
        case "int8":
            return Int8Exchange(vector, workers, [p.numel() for p in parameters])
        case "topk":
            return TopkExchange(vector, workers, cfg.topk)
        case "powersgd":
            seed = derive_seed(cfg.seed, "powersgd")
            return PowerSgdExchange(vector, workers, [p.shape for p in parameters], cfg.powersgd_rank, seed)
    return Exchange(vector, workers)


def ends_round(cfg: Config, step: int, total: int) -> bool:
    """Return whether a step is the last one of a round.

    A round has `every` local steps; the last round of a run may have fewer.
    """
    local_steps = step - cfg.start
    return local_steps > 0 and (local_steps % cfg.every == 0 or step == total)


@torch.no_grad()
def take_outer_step(cfg: Config, worker: LocalWorker) -> None:
    """Finish the exchange, update the reference, and continue from the new reference."""
    mean_difference = worker.finish_exchange()
    if cfg.outer == "nesterov":
        worker.momentum.mul_(cfg.outer_momentum).add_(mean_difference)
        mean_difference = mean_difference + cfg.outer_momentum * worker.momentum
    worker.reference.sub_(mean_difference, alpha=cfg.outer_lr)
    worker.rebase_onto_reference()


def exchange_differences(cfg: Config, worker: LocalWorker, step: int, total: int) -> None:
    """Begin an exchange at the end of a round; take the outer step `delay` steps later."""
    is_last = step == total
    if worker.awaits_outer_step:
        is_due = step >= worker.exchange_step + cfg.delay
        if is_due or is_last:
            take_outer_step(cfg, worker)
    if ends_round(cfg, step, total):
        worker.begin_exchange(step)  # messages are sent while the next steps are computed
        if is_last or not cfg.delay:
            take_outer_step(cfg, worker)


def report_exchanges(cfg: Config, worker: LocalWorker, run: Run) -> ReportData:
    """Report the number of exchanges and the bytes that each worker sent in the run.

    The bytes include those of the synchronous steps.
    """
    exchanges, sent_bytes, _ = worker.counts.tolist()
    delay = f", applied {format_count(cfg.delay, 'step')} later" if cfg.delay else ""
    synchronous = f" after {format_count(cfg.start, 'synchronous step')}" if cfg.start else ""
    lines = {
        "outer step": f"{cfg.outer}, after every {format_count(cfg.every, 'step')}{delay}{synchronous}",
        "exchanges": f"{exchanges:,} in {format_count(run.total, 'step')}",
        "sent": f"{sent_bytes / 1e6:,.2f} MB by each worker, {sent_bytes / run.total / 1e3:,.1f} kB per step",
    }
    outcome = {"exchanges": exchanges, "bytes_sent": sent_bytes}
    return ReportData(lines, outcome, measured={"exchange_seconds": worker.seconds})


def check_rounds(cfg: Config, run: Run) -> None:
    """Raise UserError if the run has no full round of local steps.

    The settings alone do not determine the size of every data set.
    """
    try:
        cfg.check_rounds(run.total)
    except ValueError as error:
        raise UserError(str(error)) from None


def main(cfg: Config, run: Run) -> None:
    network = init_network(cfg, run.sample_shape, run.outputs)  # the weights are the same on every rank
    network.to(run.device, run.dtype)
    optimizer = build_optimizer(network.parameters(), cfg.optim)
    exchange = create_exchange(cfg, network, run.world.size)
    worker = LocalWorker(network, optimizer, run.ranks, exchange, cfg.momentum_of)
    run.register_state(LocalState(worker, optimizer, run.batches(shard=run.shard)))  # evaluates the workers' mean
    check_rounds(cfg, run)

    for step in run.steps():
        optimizer.zero_grad()
        loss = run.loss(network(step.x), step.y)  # mean over this worker's shard
        loss.backward()
        if step.number <= cfg.start:
            worker.average_gradients()
        # Each worker clips its own gradient, or the mean gradient of a synchronous step.
        step.clip_gradients(network.parameters(), cfg.regularization.clip)
        optimizer.step()
        if step.number == cfg.start:
            worker.set_reference_to_parameters()
        exchange_differences(cfg, worker, step.number, run.total)
        step.log(loss=loss)
    run.report(report_exchanges(cfg, worker, run))


if __name__ == "__main__":
    start(main, Config)
