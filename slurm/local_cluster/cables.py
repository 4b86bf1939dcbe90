"""Simulation of slow cables: tc(8) sets the data rate and delay at both ends of each cable.

A token bucket (tc-tbf(8)) limits the rate. The kernel module netem (tc-netem(8)), which some kernels lack, adds the
delay. Packets between two hosts pass through two cables: the cable of the sender and the cable of the receiver.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import NamedTuple

from common.system.errors import UserError
from slurm.local_cluster.slurm_conf import find_program

RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DELAY_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MIN_RATE = 100e3  # bits per second
MAX_RATE = 100e9
MIN_DELAY = 1e-6  # seconds
MAX_DELAY = 1.0
BUCKET_SECONDS = 0.005  # maximum duration of a burst at the data rate
MIN_BUCKET_BYTES = 4096
QUEUE_TIME = "400ms"  # maximum time that a packet waits in the token bucket's queue before it is dropped
QUEUE_PACKETS = "100000"  # maximum number of packets in the netem queue; further packets are dropped


class Shape(NamedTuple):
    """Data rate and delay of a cable. Both apply to each direction."""

    rate: float = 0.0
    """Data rate in bits per second; 0 means unlimited."""
    delay: float = 0.0
    """Delay of each packet in seconds."""

    @property
    def bucket(self) -> int:
        """Maximum size of a burst in bytes."""
        return max(MIN_BUCKET_BYTES, int(self.rate / 8 * BUCKET_SECONDS))

    def describe(self) -> str:
        """Return the rate and delay with their units, or `-` if neither is set."""
        rate = format_number_with_unit(self.rate, RATE_UNITS) if self.rate else ""
        delay = format_number_with_unit(self.delay, DELAY_UNITS) if self.delay else ""
        return f"{rate} {delay}".strip() or "-"


def parse_rate_and_delay(rate: str, delay: str) -> Shape:
    """Parse a rate such as `200mbit` and a delay such as `5ms`. Raises UserError.

    An empty string means an unlimited rate or no delay.
    """
    return Shape(
        parse_number_with_unit(
            "RATE", rate, RATE_UNITS, MIN_RATE, MAX_RATE, "from 100kbit to 100gbit, such as 200mbit"
        ),
        parse_number_with_unit("DELAY", delay, DELAY_UNITS, MIN_DELAY, MAX_DELAY, "from 1us to 1s, such as 5ms"),
    )


def parse_number_with_unit(
    name: str, text: str, units: dict[str, float], low: float, high: float, expected: str
) -> float:
    """Parse a number with a unit. An empty string means 0.

    Raises UserError if the number is not between `low` and `high`.
    """
    if not text:
        return 0.0
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)([a-z]+)", text)
    number = float(match[1]) * units.get(match[2], 0) if match else 0.0
    if not low <= number <= high:
        raise UserError(f"{name} must be a number with a unit, {expected} (got {text!r})")
    return number


def format_number_with_unit(number: float, units: dict[str, float]) -> str:
    """Format a number with the largest unit in which it is at least 1."""
    fitting = [unit for unit in units if number >= units[unit] * (1 - 1e-9)]
    unit = max(fitting, key=units.__getitem__)
    return f"{number / units[unit]:g}{unit}"


def check_shaping_support(shape: Shape) -> None:
    """Raise UserError if this machine cannot simulate cables with this rate and delay."""
    if not (shape.rate or shape.delay):
        return
    if not find_program("tc"):
        raise UserError("RATE and DELAY require tc; on Debian or Ubuntu, run apt-get install iproute2")
    if shape.rate:
        check_kernel_module("RATE", "tbf", Shape(rate=1e6))
    if shape.delay:
        check_kernel_module("DELAY", "netem", Shape(delay=1e-3))


def check_kernel_module(setting: str, module: str, probe: Shape) -> None:
    """Raise UserError if the kernel lacks a module that tc requires.

    The check sets the rate and delay of `probe` on a device in a new network namespace, which is then deleted.
    """
    user = ["--user", "--map-root-user"] if os.getuid() else []
    for command in list_tc_commands("lo", probe):
        process = run_program("unshare", *user, "--net", *command)
        if process.returncode:
            raise UserError(
                f"{setting} requires the kernel module sch_{module}, which is missing ({process.stderr.strip()}); "
                f"run modprobe sch_{module} as root, or omit {setting}"
            )


def list_tc_commands(device: str, shape: Shape) -> list[list[str]]:
    """Return the tc commands that limit the rate, and add the delay, of packets sent by a network device."""
    replace = ["tc", "qdisc", "replace", "dev", device]
    commands = []
    parent = ["root", "handle", "1:"]
    if shape.delay:
        commands.append([*replace, *parent, "netem", "delay", f"{shape.delay * 1e6:.0f}us", "limit", QUEUE_PACKETS])
        parent = ["parent", "1:1", "handle", "10:"]
    if shape.rate:
        rate = ["rate", f"{shape.rate:.0f}bit", "burst", f"{shape.bucket}b", "latency", QUEUE_TIME]
        commands.append([*replace, *parent, "tbf", *rate])
    return commands


def run_program(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program, and capture its standard output and standard error."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def shape_device(device: str, shape: Shape) -> None:
    """Set the rate and delay of packets sent by a network device in this network namespace. Raises UserError."""
    for command in list_tc_commands(device, shape):
        process = run_program(*command)
        if process.returncode:
            raise UserError(f"{' '.join(command)}: {process.stderr.strip()}")


def read_shapes() -> dict[str, Shape]:
    """Return the rate and delay of each network device in this network namespace, as reported by tc."""
    if not find_program("tc"):
        return {}
    process = subprocess.run(["tc", "-json", "qdisc", "show"], capture_output=True, text=True, check=True)
    shapes: dict[str, Shape] = {}
    for qdisc in json.loads(process.stdout):
        device = qdisc["dev"]
        shape = shapes.get(device, Shape())
        if qdisc["kind"] == "tbf":
            shape = shape._replace(rate=8.0 * qdisc["options"]["rate"])
        elif qdisc["kind"] == "netem":
            shape = shape._replace(delay=float(qdisc["options"]["delay"]["delay"]))
        shapes[device] = shape
    return shapes
