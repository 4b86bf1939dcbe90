"""Rules that involve several settings of the group `launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.shared import Launch


def check_launch(launch: Launch) -> None:
    """Raise ValueError for a combination of settings that no backend supports."""
    if launch.backend == "builtin" and launch.device == "cuda":
        raise ValueError(
            "launch.backend=builtin runs on CPUs only; omit launch.device=cuda, or omit launch.backend to use nccl"
        )
    if launch.mixed and (launch.device != "auto" or launch.backend != "auto"):
        setting = f"launch.device={launch.device}" if launch.device != "auto" else f"launch.backend={launch.backend}"
        raise ValueError(f"launch.mixed=true determines the devices and uses the gloo backend; omit {setting}")
    if launch.backend == "builtin":
        return
    builtin_defaults = {"algorithm": "ring", "transport": "auto", "tls": False}
    for name, default in builtin_defaults.items():
        value = getattr(launch, name)
        if value != default:
            setting = f"launch.{name}={str(value).replace('True', 'true')}"
            raise ValueError(f"{setting} requires launch.backend=builtin; add this setting or omit launch.{name}")
