"""Rules for the settings of the group `launch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.batch_plan import list_divisors

BACKEND_SETUPS = {"builtin": "common.backend.setup"}
"""Module that sets up each communication backend that torch does not contain; see common/ranks/backend_setup."""
BUILTIN_DEFAULTS = {"algorithm": "ring", "transport": "auto", "tls": False}
"""Settings that only the built-in backend has, with their default values."""


def check_launch(launch: Mapping[str, Any], ranks: int, *, can_mix_devices: bool) -> None:
    """Raise ValueError for settings that do not fit an experiment with this number of ranks.

    `launch` contains the values of the settings by name, without the name of the group. `can_mix_devices` states
    whether ranks on GPUs and ranks on CPUs can take part in the same run.
    """
    nodes = launch["nodes"]
    if ranks % nodes:
        hosts = list_divisors(ranks)
        problem = f"{ranks} ranks cannot be divided evenly among launch.nodes={nodes}"
        raise ValueError(f"{problem}; valid numbers of hosts are {hosts}")
    check_backend(launch)
    if launch["mixed"] and not can_mix_devices:
        raise ValueError("this experiment needs devices of one type; omit launch.mixed=true")


def check_backend(launch: Mapping[str, Any]) -> None:
    """Raise ValueError for a combination of settings that no backend supports."""
    device = launch["device"]
    backend = launch["backend"]
    if backend == "builtin" and device == "cuda":
        raise ValueError(
            "launch.backend=builtin runs on CPUs only; omit launch.device=cuda, or omit launch.backend to use nccl"
        )
    if launch["mixed"] and (device != "auto" or backend != "auto"):
        setting = f"launch.device={device}" if device != "auto" else f"launch.backend={backend}"
        raise ValueError(f"launch.mixed=true determines the devices and uses the gloo backend; omit {setting}")
    if backend == "builtin":
        return
    for name, default in BUILTIN_DEFAULTS.items():
        value = launch[name]
        if value != default:
            setting = f"launch.{name}={str(value).replace('True', 'true')}"
            raise ValueError(f"{setting} requires launch.backend=builtin; add this setting or omit launch.{name}")
