"""Parameter server: workers pull parameters and push gradients, servers keep the parameters and take the steps.

    python experiments/param_server.py                                         two workers, the first also serves
    python experiments/param_server.py processes_per_node=4 servers=2 mode=async
    python experiments/param_server.py processes_per_node=4 mode=bounded staleness=5 compare=true
    make exp NAME=param_server NODES=4                                         on a cluster

Takes about a minute on 2 CPU cores. Expect 98 % test accuracy on MNIST after one epoch (without MNIST: on the built-in
digits).

The parameters are one vector, cut into as many shards as there are servers (Li et al. 2014, OSDI). Ranks 0 to
servers - 1 serve a shard each, in threads beside their own work, and every rank is a worker. A worker's turn:

    pull        get the newest values of all shards
    compute     the gradient of its share of the batch
    push        send the gradient, each server its part, and wait until it is applied, with sync until all are there

A server's step is that of torch's optimizer, and makes a new version of its shard. The staleness of a push is the
number of versions between its pull and its application.

    sync        the pushes of all workers are applied together, as their mean: the step that DDP takes
    async       each push is applied as it comes, at once (Recht et al. 2011, arXiv 1106.5730, though with a lock for
                each shard), and the worker takes whichever share of the data is next
    bounded     as async, but no push becomes staler than `staleness`: a server lets a worker wait for its answer as
                long as that answer could make a push too stale (stale synchronous parallel, Ho et al. 2013)

With async and bounded a push counts as its share of the batch, too, and `damp=true` divides its learning rate by its
staleness (Zhang et al. 2015, arXiv 1511.05950). Workers run ahead of each other until all ranks meet: for an
evaluation, to bring metrics together, or to agree whether to save a checkpoint or to stop. Then all pushes are applied,
and that is the state which is evaluated and saved.
"""

from __future__ import annotations

from common.api import Facts, Run, build_optimizer, ddp, networks, score_replicated, start
from common.checkpoint.served_state import ServedState
from common.distributed.parameter_server.report import ServerReport, gather_served
from common.distributed.parameter_server.server import Policy
from common.distributed.parameter_server.worker import Worker
from common.measure import plots
from common.runs.folder import write_json
from common.training.single_process_baseline import make_step_function, time_steps
from configs.param_server import Config

import torch
import torch.nn.functional as F

STEPS_OF_DDP = 20


def report_servers(cfg: Config, run: Run, worker: Worker) -> ServerReport:
    """Report what the servers have served since this attempt began; write their record and the plot if asked to."""
    server = worker.server
    if server is not None and cfg.record:
        facts = {"workers": run.world.size, "after_step": run.resumed_after, "events": server.events}
        write_json(run.folder.attempt / f"served-{run.world.rank}.json", facts)
    report = ServerReport(worker.policy, gather_served(run.world, server))
    if cfg.plot and report.staleness:  # on rank 0
        heights = {str(age): (100 * share, 0.0) for age, share in report.compute_shares().items()}
        plots.draw_bars(run.folder.path / "staleness.png", heights, "% of the pushes, by staleness", title=cfg.mode)
    return report


def time_ddp(cfg: Config, run: Run) -> Facts:
    """Time steps of DDP with a new model and the same batches. All ranks call it after training."""
    network = networks.build_network(cfg.model, run.sample_shape, run.classes).to(run.device, run.dtype)
    step = make_step_function(run, ddp.wrap_ddp(network, run.device), network, run.shard)
    rate = cfg.batch / time_steps(step, run.device, STEPS_OF_DDP)
    return Facts({"with DDP": f"{rate:,.0f} samples/s"}, measured={"ddp_samples_per_second": rate})


def main(cfg: Config, run: Run) -> None:
    network = networks.build_network(cfg.model, run.sample_shape, run.classes).to(run.device, run.dtype)
    worker = Worker(
        network,
        run.world,
        lambda shard: build_optimizer(shard, cfg.optim),
        servers=cfg.servers,
        policy=Policy(cfg.mode, cfg.staleness, run.world.size),
        damp=cfg.damp,
        record=cfg.record,
    )
    optimizer = build_optimizer(network.parameters(), cfg.optim)  # it gets the learning rate; servers take the steps
    loaded = run.shard if cfg.mode == "sync" else (0, 1)  # (0, 1): whole batches, as any share may be this worker's
    state = ServedState(worker, optimizer, run.batches(shard=loaded))

    def evaluate() -> dict[str, float]:
        worker.fetch_parameters()  # each rank has what it pulled for its last gradient
        return score_replicated(network, run)

    worker.start_serving(run.resume(state))
    for step in run.steps(state, evaluate):
        with step:
            losses, staleness = [], []
            for x, y in worker.take_shares(step.number, step.x, step.y):  # with sync this worker's own, and no other
                worker.pull(step.rate)
                network.zero_grad()
                loss = F.cross_entropy(network(x), y, reduction="sum") / (cfg.batch / run.world.size)
                loss.backward()
                staleness.append(float(worker.push()))
                losses.append(loss.detach())
            if losses:  # a slow worker may find that others have done all of a step
                step.log(loss=torch.stack(losses).mean(), staleness=sum(staleness) / len(staleness))
            step.commit()  # with elastic=true: all ranks know that all servers have all pushes
            worker.take_prepared_step()
    worker.stop_serving()
    compared = [time_ddp(cfg, run)] if cfg.compare else []
    run.report(report_servers(cfg, run, worker), *compared)


if __name__ == "__main__":
    start(main, Config)
