"""Declarations of collectives for the shared tests."""

from __future__ import annotations

from configs.collectives import Config
from tests.harness.experiments.entry import Entry

ONE_SIDE = ("algorithms=[ring]", "transports=[memory]")  # only one algorithm and transport of the built-in backend

ENTRY = Entry(
    name="collectives",
    own_technique="collectives",
    smallest_settings=(*Config.smallest_settings, *ONE_SIDE),
    processes=2,
    result_keys=("points", "lines", "exact_results"),
    make_rank_settings=lambda count: (
        *Config.smallest_settings,
        *ONE_SIDE,
        f"processes_per_node={count}",
        "rounds=2000",
    ),
    page_settings=("sizes=[8,1K]", "plot=false"),
    is_correct_on_four_hosts=lambda result: min(min(point["interface_bytes"]) for point in result["points"]) > 0,
)
