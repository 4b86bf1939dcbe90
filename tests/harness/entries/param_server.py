"""Declarations of param_server for the shared tests."""

from __future__ import annotations

from configs.param_server import Config
from tests.harness.experiments.entry import SCORE_KEYS, Entry

ENTRY = Entry(
    name="param_server",
    own_technique="parameter_server",
    smallest_settings=(*Config.smallest_settings, "model=mlp"),
    processes=2,
    result_keys=(*SCORE_KEYS, "pushes", "bytes_received", "staleness_counts"),
    make_rank_settings=lambda count: (
        f"processes_per_node={count}",
        f"servers={min(2, count)}",
        "model=mlp",
        "plot=false",
    ),
    resume_variants=(("servers=3", "processes_per_node=3", "model=mlp", "optim.name=adam", "plot=false"),),
    page_settings=("batch=16", "plot=false"),
    elastic_campaign_settings=("servers=1", "mode=sync", "plot=false", "optim.name=adam", "optim.lr=0.01"),
    cluster_settings=(
        *("data.name=imagefolder", "data.image_size=8", "data.block=1", "model=mlp", "servers=2", "plot=false"),
        *("batch=16", "optim.base_batch=16", "epochs=6"),
    ),
    # Each host has a worker; the first host also has a server.
    is_correct_on_four_hosts=lambda result: result["pushes"] == [4 * 12],
)
