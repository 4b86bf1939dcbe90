"""Settings of experiments/collectives.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import format_nearest_multiples
from configs.optional import RanksPerNode
from configs.shared import between

OPS = ("sendrecv", "broadcast", "all_reduce", "reduce_scatter", "all_gather")
DTYPES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}  # bytes of a number
ALGORITHMS = ("ring", "halving_doubling", "tree", "star", "sharded_star", "two_level")
TRANSPORTS: dict[str, Literal["network", "auto"]] = {"network": "network", "memory": "auto", "tls": "network"}
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
LARGEST = 2**30  # bytes


@dataclass
class Config(RanksPerNode):
    """Settings of the measurement of collectives. Settings of data, model and optimizer mean nothing here."""

    trains: ClassVar[bool] = False

    ops: list[str] = field(default_factory=lambda: list(OPS))
    """Operations: some of sendrecv (every rank sends to the next one of a ring), broadcast, all_reduce, reduce_scatter,
    all_gather."""
    dtypes: list[str] = field(default_factory=lambda: ["float32"])
    """Types of the numbers: some of float32, float64, float16, bfloat16, int32, int64."""
    sizes: list[str] = field(default_factory=lambda: ["4", "4K", "64K", "1M", "4M", "25M"])
    """Bytes of the vector, with K, M and G for powers of 1024; of reduce_scatter and all_gather the longer one, rounded
    up to equal shards. A line is fitted to two sizes or more."""
    algorithms: list[str] = field(default_factory=lambda: ["ring", "star"])
    """All-reduce algorithms of the built-in backend, on CPUs: some of ring, halving_doubling, tree, star, sharded_star,
    two_level; [] leaves that backend out. One of your own: launch.backend=builtin launch.algorithm=FILE.py:function."""
    transports: list[str] = field(default_factory=lambda: ["network", "memory"])
    """What the built-in backend sends through: network is sockets, in the clear; memory is shared by the ranks of a
    host, and between hosts it is the network, as the table says then; tls is encrypted sockets, with
    launch.backend=builtin launch.tls=true."""
    rounds: int = between(1, 100_000, 10)
    """How often everything is measured, all sides in turn; times are medians over the rounds."""
    plot: bool = True
    """Draw time against size with the fitted lines."""

    def total_steps(self, epoch_steps: int) -> int:
        """Return the steps of the run: each is one point in one round, and `epoch_steps` points make a round."""
        return min(self.steps or self.rounds * epoch_steps, self.rounds * epoch_steps)

    def list_bytes(self) -> list[int]:
        """Return the sizes in bytes, ascending. Raises ValueError."""
        found = set()
        for text in self.sizes or [""]:
            parts = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text)
            size = int(parts[1]) * UNITS[parts[2]] if parts else 0
            if not 1 <= size <= LARGEST:
                raise ValueError(f"sizes=[{text}]: write bytes from 1 to 1G, such as 4, 64K or 25M")
            found.add(size)
        return sorted(found)

    def check(self) -> None:
        super().check()
        check_names("ops", self.ops, OPS)
        check_names("dtypes", self.dtypes, list(DTYPES))
        check_names("algorithms", self.algorithms or ["ring"], ALGORITHMS)
        check_names("transports", self.transports, list(TRANSPORTS))
        for size in self.list_bytes():
            for name in self.dtypes:
                if size % DTYPES[name]:
                    remedy = f"use {format_nearest_multiples(size, DTYPES[name])}"
                    raise ValueError(f"sizes=[{size}]: a number of {name} has {DTYPES[name]} bytes; {remedy}")
        if "tls" in self.transports and not self.launch.tls:
            remedy = "add launch.backend=builtin launch.tls=true, or leave tls out"
            raise ValueError(f"transports=[tls] encrypts with the certificate of the run; {remedy}")
        if self.processes < 2:
            raise ValueError("one rank has nobody to send to; use processes_per_node=2")


def check_names(setting: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError unless a list setting holds some of the known names, each of them once."""
    wrong = [name for name in given if name not in known or given.count(name) > 1]
    if wrong or not given:
        raise ValueError(f"{setting}=[{','.join(dict.fromkeys(wrong))}]: use some of {', '.join(known)}, each once")
