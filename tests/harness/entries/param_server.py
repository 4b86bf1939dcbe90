"""Declarations of param_server for the shared tests."""

from __future__ import annotations

from configs.param_server import Config
from tests.harness.experiments.entry import SCORE_KEYS, Entry

ENTRY = Entry(
    name="param_server",
    own_technique="parameter_server",
    smallest=(*Config.smallest_settings, "model=mlp"),
    processes=2,
    produces=(*SCORE_KEYS, "pushes", "bytes_received", "staleness_counts"),
    spread=lambda count: (f"processes_per_node={count}", f"servers={min(2, count)}", "model=mlp", "plot=false"),
    others=(("servers=3", "processes_per_node=3", "model=mlp", "optim.name=adam", "plot=false"),),
    page_settings=("batch=16", "steps=6", "plot=false"),
    elastic_campaign=("servers=1", "mode=sync", "plot=false", "optim.name=adam", "optim.lr=0.01"),
    cluster_settings=(
        *("data.name=imagefolder", "data.image_size=8", "data.block=1", "model=mlp", "servers=2", "plot=false"),
        *("batch=16", "optim.base_batch=16", "epochs=6"),
    ),
    # Each host has a worker; the first host also has a server.
    check_four_hosts=lambda result: result["pushes"] == [4 * 12],
)
