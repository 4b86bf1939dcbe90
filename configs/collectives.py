"""Settings for experiments/collectives.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import format_nearest_multiples
from configs.dataparallel import RanksPerNode
from configs.fields import between, flat
from configs.shared import Experiment

OPS = ("sendrecv", "broadcast", "all_reduce", "reduce_scatter", "all_gather")
DTYPES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}  # bytes per element
ALGORITHMS = ("ring", "halving_doubling", "tree", "star", "sharded_star", "two_level")
# value of launch.transport for each transport
TRANSPORTS: dict[str, Literal["network", "auto"]] = {"network": "network", "memory": "auto", "tls": "network"}
BYTES_PER_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MAX_VECTOR_BYTES = 2**30


@dataclass(frozen=True)
class Config(Experiment):
    """Settings for measuring collectives, which trains no model."""

    smallest_settings: ClassVar[tuple[str, ...]] = ("sizes=[4,1K]", "rounds=10", "plot=false")

    ranks: RanksPerNode = flat(RanksPerNode)
    ops: list[str] = field(default_factory=lambda: list(OPS))
    """Operations to measure: sendrecv (every rank sends to the next rank in a ring), broadcast, all_reduce,
    reduce_scatter and all_gather."""
    dtypes: list[str] = field(default_factory=lambda: ["float32"])
    """Element types to measure: float32, float64, float16, bfloat16, int32 and int64."""
    sizes: list[str] = field(default_factory=lambda: ["4", "4K", "64K", "1M", "4M", "25M"])
    """Vector sizes in bytes; the suffixes K, M and G stand for powers of 1024. For reduce_scatter and all_gather, the
    size is that of the longer vector, rounded up so that all shards are equal. With two or more sizes, the report
    includes a line that is fitted to the measured times."""
    algorithms: list[str] = field(default_factory=lambda: ["ring", "star"])
    """All-reduce algorithms of the built-in CPU backend to measure: ring, halving_doubling, tree, star, sharded_star
    and two_level. [] skips the built-in backend. To measure a custom algorithm, use launch.backend=builtin
    launch.algorithm=FILE.py:function."""
    transports: list[str] = field(default_factory=lambda: ["network", "memory"])
    """Transports of the built-in backend to measure. network uses unencrypted sockets. memory uses shared memory within
    a host and sockets between hosts; the result table shows which of the two was used. tls uses encrypted sockets and
    requires launch.backend=builtin launch.tls=true."""
    rounds: int = between(1, 100_000, 10)
    """Number of times to repeat the whole measurement. Reported times are medians over these rounds."""
    plot: bool = True
    """Plot the measured times against the vector sizes, with the fitted lines."""

    @property
    def processes(self) -> int:
        return self.ranks.count_ranks(self.launch.nodes)

    def compute_total_steps(self, epoch_steps: int) -> int:
        """Return the number of steps of the run.

        A step measures one point. A round measures all points and has `epoch_steps` steps.
        """
        total = self.rounds * epoch_steps
        return min(self.steps or total, total)

    def parse_sizes(self) -> list[int]:
        """Return the vector sizes in bytes in ascending order. Raises ValueError for an invalid size."""
        sizes = set()
        for text in self.sizes or [""]:  # an empty list raises ValueError, too
            match = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text)
            size = int(match[1]) * BYTES_PER_UNIT[match[2]] if match else 0
            if not 1 <= size <= MAX_VECTOR_BYTES:
                raise ValueError(f"sizes=[{text}]: each size must be from 1 to 1G bytes, such as 4, 64K or 25M")
            sizes.add(size)
        return sorted(sizes)

    def check(self) -> None:
        super().check()
        check_list_setting("ops", self.ops, OPS)
        check_list_setting("dtypes", self.dtypes, list(DTYPES))
        check_list_setting("algorithms", self.algorithms or ["ring"], ALGORITHMS)  # an empty list is valid
        check_list_setting("transports", self.transports, list(TRANSPORTS))
        for size in self.parse_sizes():
            for name in self.dtypes:
                width = DTYPES[name]
                if size % width:
                    remedy = f"use {format_nearest_multiples(size, width)}"
                    raise ValueError(f"sizes=[{size}] must be a multiple of the {width} bytes of one {name}; {remedy}")
        if "tls" in self.transports and not self.launch.tls:
            raise ValueError(
                "transports=[tls] requires the certificate that a run with launch.tls=true creates; "
                "add launch.backend=builtin launch.tls=true, or omit tls"
            )
        if self.processes < 2:
            raise ValueError("collectives require at least two ranks; use processes_per_node=2")


def check_list_setting(setting: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ValueError if a list setting is empty or contains an unknown or duplicate name."""
    invalid = [name for name in names if name not in allowed or names.count(name) > 1]
    if invalid or not names:
        text = ",".join(dict.fromkeys(invalid))
        raise ValueError(f"{setting}=[{text}] is invalid; use one or more of {', '.join(allowed)}, each at most once")
