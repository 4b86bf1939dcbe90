"""Parameter server: workers pull parameters and push gradients; servers store the parameters and update them.

    python experiments/param_server.py                                         two workers, the first also serves
    python experiments/param_server.py processes_per_node=4 servers=2 mode=async
    python experiments/param_server.py processes_per_node=4 mode=bounded staleness=5 compare=true
    make exp NAME=param_server NODES=4                                         on a cluster

Takes about a minute on 2 CPU cores. Expect 98 % test accuracy on MNIST after one epoch (without MNIST: on the built-in
digits).

The parameters are one vector, divided into one shard per server (Li et al. 2014, OSDI). Ranks 0 to servers - 1 each
serve one shard, in threads beside their own training, and every rank is a worker. A worker repeats:

    pull        get the newest values of all shards
    compute     the gradient of its share of the batch
    push        send each server its part of the gradient and wait until it is applied; in sync mode the servers
                apply it once all workers have pushed

A server updates its shard with a torch optimizer; each update creates a new version of the shard. The staleness of a
push is the number of versions between its pull and its application.

    sync        the pushes of all workers are applied together as their mean, the same step as in DDP
    async       each push is applied on arrival (Recht et al. 2011, arXiv 1106.5730, but with a lock per shard), and a
                worker takes the next unclaimed share of the data
    bounded     as async, but no push has a staleness above `staleness`: a server delays its answer to a worker for as
                long as that answer could make a push too stale (stale synchronous parallel, Ho et al. 2013)

In async and bounded mode a push is also weighted by its share of the batch, and `damp=true` divides its learning rate
by its staleness (Zhang et al. 2015, arXiv 1511.05950). Workers run ahead of each other until all ranks meet: to
evaluate, to collect metrics, and to agree on saving a checkpoint or stopping. At that point all pushes have been
applied; this state is evaluated and saved.
"""

from __future__ import annotations

from common.api import ReportData, Run, build_optimizer, ddp, networks, score_replicated, start
from common.checkpoint.served_state import ServedState
from common.distributed.parameter_server.report import ServerReport, gather_served
from common.distributed.parameter_server.server import StalenessPolicy
from common.distributed.parameter_server.worker import ServerWorker
from common.measure import plots
from common.runs.folder import write_json
from common.training.single_process_baseline import make_step_function, time_steps
from configs.param_server import Config

import torch
import torch.nn.functional as F
from torch import nn

DDP_STEPS = 20


def report_servers(cfg: Config, run: Run, worker: ServerWorker) -> ServerReport:
    """Report the work of the servers in this attempt; write their record and the plot if configured."""
    server = worker.server
    if server is not None and cfg.record:
        record = {"workers": run.world.size, "after_step": run.resumed_after, "events": server.events}
        write_json(run.folder.attempt_folder / f"served-{run.world.rank}.json", record)
    report = ServerReport(worker.policy, gather_served(run.world, server))
    if cfg.plot and report.staleness:  # only rank 0 has it
        heights = {str(staleness): (100 * share, 0.0) for staleness, share in report.compute_shares().items()}
        plots.draw_bars(run.folder.path / "staleness.png", heights, "% of the pushes, by staleness", title=cfg.mode)
    return report


def time_ddp(cfg: Config, run: Run) -> ReportData:
    """Time DDP steps with a new model and the same batches. All ranks call it after training."""
    network = build_network(cfg, run)
    step = make_step_function(run, ddp.wrap_ddp(network, run.device), network, run.shard)
    rate = cfg.batch / time_steps(step, run.device, DDP_STEPS)
    return ReportData({"with DDP": f"{rate:,.0f} samples/s"}, measured={"ddp_samples_per_second": rate})


def build_network(cfg: Config, run: Run) -> nn.Sequential:
    """Build the network with the same weights on every rank (all use one seed)."""
    return networks.build_network(cfg.model, run.sample_shape, run.classes).to(run.device, run.dtype)


def main(cfg: Config, run: Run) -> None:
    network = build_network(cfg, run)
    worker = ServerWorker(
        network,
        run.world,
        lambda shard: build_optimizer(shard, cfg.optim),
        servers=cfg.servers,
        policy=StalenessPolicy(cfg.mode, cfg.staleness, run.world.size),
        damp=cfg.damp,
        record=cfg.record,
    )
    optimizer = build_optimizer(network.parameters(), cfg.optim)  # holds the learning rate; servers take the steps
    loaded_shard = run.shard if cfg.mode == "sync" else (0, 1)  # (0, 1): whole batches, as any share may be claimed
    state = ServedState(worker, optimizer, run.batches(shard=loaded_shard))

    def evaluate() -> dict[str, float]:
        worker.fetch_parameters()  # until now this rank holds what it pulled for its last gradient
        return score_replicated(network, run)

    worker.start_serving(run.resume(state))
    for step in run.steps(state, evaluate):
        with step:
            losses = []
            staleness = []
            for x, y in worker.take_shares(step.number, step.x, step.y):  # in sync mode exactly this worker's share
                worker.pull(step.rate)
                network.zero_grad()
                loss = F.cross_entropy(network(x), y, reduction="sum") / (cfg.batch / run.world.size)
                loss.backward()
                staleness.append(float(worker.push()))
                losses.append(loss.detach())
            if losses:  # empty if the other workers have already processed the whole batch
                step.log(loss=torch.stack(losses).mean(), staleness=sum(staleness) / len(staleness))
            step.commit()  # with elastic=true: all ranks know that all servers have all pushes
            worker.take_prepared_step()
    worker.stop_serving()
    ddp_facts = [time_ddp(cfg, run)] if cfg.compare else []
    run.report(report_servers(cfg, run, worker), *ddp_facts)


if __name__ == "__main__":
    start(main, Config)
