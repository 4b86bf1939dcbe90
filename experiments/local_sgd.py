"""Local SGD: every worker trains alone for some steps, and only then do all exchange what they have learned.

    python experiments/local_sgd.py                                            two workers, an exchange every 8 steps
    python experiments/local_sgd.py processes_per_node=4 every=16 start=200    the first 200 steps as DDP takes them
    python experiments/local_sgd.py every=32 outer=nesterov outer_lr=0.7 optim.name=adamw optim.lr=0.001      DiLoCo
    python experiments/local_sgd.py communication=int8 delay=4                 a quarter of the bytes, overlapped
    make exp NAME=local_sgd NODES=4                                            on a cluster

Takes about a minute on 2 CPU cores. Expect 98 % test accuracy on MNIST after one epoch (without MNIST: on the built-in
digits).

Worker i begins a round at the reference, the parameters x that all of them hold, and takes `every` = H steps of its
own optimizer on its shard of each batch, with nobody to wait for. Then the workers exchange their differences

    d_i = x - x_i,        and the outer step with their mean d makes the new reference, from which all go on:
    mean                  x <- x - outer_lr d           the mean of the x_i at outer_lr=1 (Stich 2018, arXiv 1805.09767)
    nesterov              m <- outer_momentum m + d,  x <- x - outer_lr (d + outer_momentum m)
                          (Douillard et al. 2023, arXiv 2311.08105; its workers use AdamW)

So H steps cost one message of the size of the model instead of H. In the first `start` steps gradients are averaged as
in DDP: differences are large at the beginning (post-local SGD, Lin et al. 2018, arXiv 1808.07217). H counts optimizer
steps, which all workers take together; it counts neither samples nor the steps of all workers added up. Evaluations
and the trained model are of the mean of the workers' parameters, who go on with their own.

`communication` makes the message smaller, and what it leaves out is added to the worker's next difference (error
feedback, Basu et al. 2019, arXiv 1906.02367). With `delay` = D workers go on while the exchange is under way, and take
the outer step D steps later: x_i <- x + (x_i - x_i at the beginning of the exchange), so that no step is lost or taken
twice (overlapped exchanges: Douillard et al. 2025, arXiv 2501.18512; Kale et al. 2025, arXiv 2502.12996).
"""

from __future__ import annotations

from common.api import Facts, Run, UserError, build_optimizer, init_network, score_replicated, start
from common.core.seeds import derive_seed
from common.core.text import format_count
from common.training.local_sgd.exchange import Bf16Exchange, Exchange, Int8Exchange, TopkExchange
from common.training.local_sgd.powersgd import PowerSgdExchange
from common.training.local_sgd.state import LocalState
from common.training.local_sgd.worker import LocalWorker
from configs.local_sgd import Config

import torch
import torch.nn.functional as F
from torch import nn


def choose_exchange(cfg: Config, network: nn.Module, workers: int) -> Exchange:
    """Return the exchange of vectors as long as the network's parameters that cfg.communication names."""
    parameters = list(network.parameters())
    like = torch.cat([p.detach().flatten() for p in parameters])
    match cfg.communication:
        case "bf16":
            return Bf16Exchange(like, workers)
        case "int8":
            return Int8Exchange(like, workers, [p.numel() for p in parameters])
        case "topk":
            return TopkExchange(like, workers, cfg.topk)
        case "powersgd":
            seed = derive_seed(cfg.seed, "powersgd")
            return PowerSgdExchange(like, workers, [p.shape for p in parameters], cfg.powersgd_rank, seed)
    return Exchange(like, workers)


def ends_round(cfg: Config, step: int, total: int) -> bool:
    """Return whether an exchange follows a step; the last round of a run may be shorter than `every`."""
    return step > cfg.start and ((step - cfg.start) % cfg.every == 0 or step == total)


@torch.no_grad()
def take_outer_step(cfg: Config, worker: LocalWorker) -> None:
    """Move the reference by the mean difference of the workers, and go on from there."""
    mean = worker.finish_exchange()
    if cfg.outer == "nesterov":
        worker.momentum.mul_(cfg.outer_momentum).add_(mean)
        mean = mean + cfg.outer_momentum * worker.momentum
    worker.reference.sub_(mean, alpha=cfg.outer_lr)
    worker.adopt_reference()


def exchange_differences(cfg: Config, worker: LocalWorker, step: int, total: int) -> None:
    """Begin the exchange of a round that is over, and take the outer step, `delay` steps later."""
    last = step == total
    if worker.awaits_outer_step and (last or step >= worker.sent_after + cfg.delay):
        take_outer_step(cfg, worker)
    if ends_round(cfg, step, total):
        worker.begin_exchange(step)  # messages are under way while the next steps are computed
        if last or not cfg.delay:
            take_outer_step(cfg, worker)


def report_exchanges(cfg: Config, worker: LocalWorker, run: Run) -> Facts:
    """Report the exchanges of the whole run, and what a worker sent for them and for the synchronous steps."""
    exchanges, sent, _ = worker.counts.tolist()
    synchronous = f" after {format_count(cfg.start, 'synchronous step')}" if cfg.start else ""
    delayed = f", {cfg.delay} later" if cfg.delay else ""
    shown = {
        "outer step": f"{cfg.outer}, after every {format_count(cfg.every, 'step')}{delayed}{synchronous}",
        "exchanges": f"{exchanges:,} in {format_count(run.total, 'step')}",
        "sent": f"{sent / 1e6:,.2f} MB by each worker, {sent / run.total / 1e3:,.1f} kB a step",
    }
    outcome = {"exchanges": exchanges, "bytes_sent": sent}
    return Facts(shown, outcome, measured={"exchange_seconds": worker.seconds})


def main(cfg: Config, run: Run) -> None:
    network = init_network(cfg, run.sample_shape, run.classes).to(run.device, run.dtype)  # the same on every rank
    optimizer = build_optimizer(network.parameters(), cfg.optim)
    worker = LocalWorker(network, optimizer, run.world, choose_exchange(cfg, network, run.world.size), cfg.momentum_of)
    state = LocalState(worker, optimizer, run.batches(shard=run.shard))
    run.resume(state)
    try:
        cfg.check_rounds(run.total)
    except ValueError as error:  # of a set whose size the settings do not tell
        raise UserError(str(error)) from None

    for step in run.steps(state, lambda: score_replicated(worker.build_average_network(), run)):
        with step:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(step.x), step.y)  # the mean over this worker's shard
            loss.backward()
            if step.number <= cfg.start:
                worker.average_gradients()
            optimizer.step()
            if step.number == cfg.start:
                worker.set_reference()
            exchange_differences(cfg, worker, step.number, run.total)
            step.log(loss=loss.detach())
    run.report(report_exchanges(cfg, worker, run))


if __name__ == "__main__":
    start(main, Config)
