"""Slow cables: the rate and the delay of both ends of each cable, by tc(8).

A rate is a token bucket (tc-tbf(8)), a delay netem's (tc-netem(8)), which not every kernel has. What two hosts send
each other passes two cables, that of the sender and that of the receiver.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import NamedTuple

from common.core.errors import UserError
from slurm.local_cluster.slurm_conf import find_program

RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SLOWEST, FASTEST = 100e3, 100e9  # bits per second
LONGEST = 1.0  # seconds of delay
BUCKET, SMALLEST_BUCKET = 0.005, 4096  # seconds of the rate that may pass at once, and bytes at least
QUEUE = "400ms"  # of the rate that waits before packets are dropped
PACKETS = "100000"  # that netem holds; more are dropped


class Shape(NamedTuple):
    """Rate and delay of a cable, in each direction."""

    rate: float = 0.0
    """Bits per second; 0 is as fast as the machine."""
    delay: float = 0.0
    """Seconds that each packet is held back."""

    @property
    def bucket(self) -> int:
        """Bytes that pass at once after a pause."""
        return max(SMALLEST_BUCKET, int(self.rate / 8 * BUCKET))

    def describe(self) -> str:
        """Return the rate and the delay as people write them; `-` where there is none."""
        rate = format_unit(self.rate, RATES) if self.rate else ""
        delay = format_unit(self.delay, DELAYS) if self.delay else ""
        return " ".join(filter(None, (rate, delay))) or "-"


def parse_shape(rate: str, delay: str) -> Shape:
    """Parse texts such as `200mbit` and `5ms`, empty ones as none. Raises UserError."""
    return Shape(
        parse_unit("RATE", rate, RATES, SLOWEST, FASTEST, "from 100kbit to 100gbit, such as 200mbit"),
        parse_unit("DELAY", delay, DELAYS, 1e-6, LONGEST, "from 1us to 1s, such as 5ms"),
    )


def parse_unit(name: str, text: str, units: dict[str, float], low: float, high: float, words: str) -> float:
    """Parse a number with its unit, empty text as 0. Raises UserError where it is not from `low` to `high`."""
    if not text:
        return 0.0
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([a-z]+)", text)
    value = float(match[1]) * units.get(match[2], 0) if match else 0.0
    if not low <= value <= high:
        raise UserError(f"{name}={text!r}: write a number with its unit, {words}")
    return value


def format_unit(value: float, units: dict[str, float]) -> str:
    """Write a number with the largest unit that leaves at least 1."""
    unit = max((u for u in units if value >= units[u] * (1 - 1e-9)), key=units.__getitem__)
    return f"{value / units[unit]:g}{unit}"


def check_shaping_support(shape: Shape) -> None:
    """Raise UserError where this machine cannot shape a cable so; nothing is changed."""
    if not (shape.rate or shape.delay):
        return
    if not find_program("tc"):
        raise UserError("RATE and DELAY need tc; on Debian or Ubuntu: apt-get install iproute2")
    user = ["--user", "--map-root-user"] if os.getuid() else []
    for name, wanted, module in (("RATE", Shape(rate=1e6), "tbf"), ("DELAY", Shape(delay=1e-3), "netem")):
        if not getattr(shape, name.lower()):
            continue
        tried = [["unshare", *user, "--net", *command] for command in list_tc_commands("lo", wanted)]
        done = [subprocess.run(command, capture_output=True, text=True, check=False) for command in tried]
        if any(each.returncode for each in done):
            raise UserError(
                f"{name} needs the kernel's {module}, which is not here ({done[0].stderr.strip()}): modprobe "
                f"sch_{module} as root where the kernel has it, or leave {name} out"
            )


def list_tc_commands(device: str, shape: Shape) -> list[list[str]]:
    """List the tc commands that shape what a network device sends."""
    commands, parent = [], ["root", "handle", "1:"]
    if shape.delay:
        commands.append([*parent, "netem", "delay", f"{shape.delay * 1e6:.0f}us", "limit", PACKETS])
        parent = ["parent", "1:1", "handle", "10:"]
    if shape.rate:
        rate = ["rate", f"{shape.rate:.0f}bit", "burst", f"{shape.bucket}b", "latency", QUEUE]
        commands.append([*parent, "tbf", *rate])
    return [["tc", "qdisc", "replace", "dev", device, *command] for command in commands]


def shape_device(device: str, shape: Shape) -> None:
    """Shape what a network device of this network namespace sends. Raises UserError."""
    for command in list_tc_commands(device, shape):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{' '.join(command)}: {done.stderr.strip()}")


def read_shapes() -> dict[str, Shape]:
    """Return how the devices of this network namespace are shaped, by the kernel's own account."""
    if not find_program("tc"):
        return {}
    done = subprocess.run(["tc", "-json", "qdisc", "show"], capture_output=True, text=True, check=True)
    found: dict[str, Shape] = {}
    for entry in json.loads(done.stdout):
        shape, options = found.get(entry["dev"], Shape()), entry.get("options", {})
        if entry["kind"] == "tbf":
            shape = shape._replace(rate=8.0 * options["rate"])
        elif entry["kind"] == "netem":
            shape = shape._replace(delay=float(options["delay"]["delay"]))
        found[entry["dev"]] = shape
    return found
