"""Parameter server: workers pull parameters and push gradients; servers store the parameters and update them.

    python experiments/param_server.py                                         two workers; the first is also the server
    python experiments/param_server.py processes_per_node=4 servers=2 mode=async
    python experiments/param_server.py processes_per_node=4 mode=bounded staleness=5 compare=true
    make exp NAME=param_server NODES=4                                         on a cluster

A run takes about a minute on 2 CPU cores. Expect a test accuracy of 98 % on MNIST after one epoch. If MNIST is not
available, the built-in digits are used instead.

All parameters form one vector, which is divided into one shard per server (Li et al. 2014, OSDI). The first `servers`
ranks each serve one shard, in threads that run beside the training, and every rank is a worker. Each worker repeats
these operations:

    pull        get the newest values of all shards
    compute     compute the gradient of the worker's share of the batch
    push        send each server its part of the gradient, and wait until it is applied; in sync mode, servers apply
                gradients when all workers have pushed

A server updates its shard with a torch optimizer. Each update creates a new version of the shard. The staleness of a
push is the number of versions that are created between the worker's pull and the application of the push. The modes
are:

    sync        the mean of all workers' pushes is applied, which is the same step as in DDP
    async       each push is applied on arrival (Recht et al. 2011, arXiv 1106.5730, but with a lock per shard), and a
                worker takes the next unclaimed share of the data
    bounded     same as async, but no push has a staleness above `staleness`: a server delays its answer to a worker for
                as long as the answer could make a push too stale (stale synchronous parallel, Ho et al. 2013)

In async and bounded mode, the learning rate of each push is multiplied by its share of the batch, and `damp=true`
divides it by the staleness of the push (Zhang et al. 2015, arXiv 1511.05950). Workers can run ahead of each other
between synchronizations. All ranks synchronize to evaluate, to collect metrics, and to agree on saving a checkpoint or
stopping. At these points, all pushes have been applied, and the resulting state is evaluated and saved.
"""

from __future__ import annotations

from common.api import ReportData, Run, build_network, build_optimizer, start
from common.measure import plots
from common.models.sample_dropout import add_dropout
from common.runs.folder import write_json
from common.runs.result import Report
from common.techniques.data_parallel import ddp
from common.techniques.data_parallel.single_process_baseline import make_step_function, time_steps
from common.techniques.parameter_server.report import ServerReport, gather_server_counts
from common.techniques.parameter_server.server import StalenessPolicy
from common.techniques.parameter_server.state import register_worker
from common.techniques.parameter_server.worker import ParameterServerRank
from configs.param_server import Config

from torch import nn

DDP_STEPS = 20


def report_servers(cfg: Config, run: Run, worker: ParameterServerRank) -> list[Report]:
    """Report the work of the servers in this attempt and, with cfg.compare, the speed of DDP.

    If configured, this function also writes the processed requests (`record`) and plots the staleness (`plot`). All
    ranks must call this function after training.
    """
    server = worker.server
    if server is not None and cfg.record:
        record = {"workers": run.world.size, "after_step": run.resumed_after, "events": server.events}
        write_json(run.folder.attempt_folder / f"served-{run.world.rank}.json", record)
    report = ServerReport(worker.policy, gather_server_counts(run.world, server))
    shares = report.compute_staleness_shares()  # only rank 0 has them
    if cfg.plot and len(shares) > 1:
        heights = {str(staleness): (100 * share, 0.0) for staleness, share in shares.items()}
        plots.draw_bar_chart(run.folder.path / "staleness.png", heights, "% of pushes, by staleness", title=cfg.mode)
    return [report, time_ddp(cfg, run)] if cfg.compare else [report]


def time_ddp(cfg: Config, run: Run) -> ReportData:
    """Measure the samples/s of DDP steps with a new model.

    All ranks must call this function after training.
    """
    network = build_model(cfg, run)
    step = make_step_function(run, ddp.wrap_ddp(network, run.device), network, run.shard)
    rate = cfg.batch / time_steps(step, run.device, DDP_STEPS)
    return ReportData({"with DDP": f"{rate:,.0f} samples/s"}, measured={"ddp_samples_per_second": rate})


def build_model(cfg: Config, run: Run) -> nn.Module:
    """Build the model. All ranks use the same seed and therefore have equal weights."""
    network: nn.Module = build_network(cfg.model, run.sample_shape, run.outputs)
    return add_dropout(network, cfg.regularization.dropout, cfg.seed).to(run.device, run.dtype)


def create_worker(cfg: Config, run: Run, network: nn.Module) -> ParameterServerRank:
    """Create this rank's worker and, on the first `servers` ranks, a server with an optimizer for its shard."""
    return ParameterServerRank(
        network,
        run.ranks,
        lambda shard: build_optimizer(shard, cfg.optim),
        servers=cfg.servers,
        policy=StalenessPolicy(cfg.mode, cfg.staleness, run.world.size),
        damp=cfg.damp,
        record=cfg.record,
    )


def main(cfg: Config, run: Run) -> None:
    network = build_model(cfg, run)
    worker = create_worker(cfg, run, network)
    optimizer = build_optimizer(network.parameters(), cfg.optim)  # only provides the learning rate of a step
    # Outside of sync mode, each worker loads whole batches, because it may claim any share.
    batches = run.batches(shard=run.shard if cfg.mode == "sync" else (0, 1))
    register_worker(run, worker, optimizer, batches)  # serves from the first step to the last evaluation
    clip = cfg.regularization.clip

    for step in run.steps():
        with step:
            losses = []
            staleness = []
            # In sync mode, the only share is that of this worker.
            for x, y in worker.iterate_batch_shares(step.number, step.x, step.y):
                worker.pull(step.rate)
                network.zero_grad()
                loss = run.loss(network(x), y, reduction="sum") / (cfg.batch / run.world.size)
                loss.backward()
                if cfg.mode != "sync":  # each push is applied on its own
                    step.clip_gradients(network.parameters(), clip)
                staleness.append(float(worker.push()))
                losses.append(loss.detach())
            # A batch has one share per rank, so the mean of the sums over the ranks is the mean over the shares.
            step.log(loss=sum(losses), staleness=sum(staleness))
            if clip and cfg.mode == "sync":
                norm = worker.clip_prepared_step(clip)  # of the mean gradient, over all servers
                step.log_gradient_norm(norm)
            step.commit()  # with elastic=true, ranks agree that all servers have received all pushes
            worker.apply_prepared_step()
    run.report(*report_servers(cfg, run, worker))


if __name__ == "__main__":
    start(main, Config)
