"""Rules that involve several settings of the group `launch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_launch(launch: Mapping[str, Any]) -> None:
    """Raise ValueError for a combination of settings that no backend supports.

    `launch` contains the values of the settings by name, without the name of the group.
    """
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
    builtin_defaults = {"algorithm": "ring", "transport": "auto", "tls": False}
    for name, default in builtin_defaults.items():
        value = launch[name]
        if value != default:
            setting = f"launch.{name}={str(value).replace('True', 'true')}"
            raise ValueError(f"{setting} requires launch.backend=builtin; add this setting or omit launch.{name}")
