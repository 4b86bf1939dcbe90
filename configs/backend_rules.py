"""Rules for the settings of communication backends."""

from __future__ import annotations

from collections.abc import Mapping

BUILTIN_DEFAULTS = {"algorithm": "ring", "transport": "auto", "tls": False}
"""Settings that only the built-in backend has, with their default values."""


def check_backend(backend: str, device: str, *, mixed: bool, builtin_settings: Mapping[str, object]) -> None:
    """Raise ValueError for a combination of settings that no backend supports.

    `builtin_settings` contains the values of the settings in BUILTIN_DEFAULTS.
    """
    if backend == "builtin" and device == "cuda":
        raise ValueError(
            "launch.backend=builtin runs on CPUs only; omit launch.device=cuda, or omit launch.backend to use nccl"
        )
    if mixed and (device != "auto" or backend != "auto"):
        setting = f"launch.device={device}" if device != "auto" else f"launch.backend={backend}"
        raise ValueError(f"launch.mixed=true determines the devices and uses the gloo backend; omit {setting}")
    if backend == "builtin":
        return
    for name, value in builtin_settings.items():
        if value != BUILTIN_DEFAULTS[name]:
            setting = f"launch.{name}={str(value).replace('True', 'true')}"
            raise ValueError(f"{setting} requires launch.backend=builtin; add this setting or omit launch.{name}")
