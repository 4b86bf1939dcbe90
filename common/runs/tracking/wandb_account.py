"""Choose the W&B mode of a run. This module does not import torch.

A run uses the requested mode, or offline mode if there is no account or the W&B host is unreachable. The account and
the host are checked before wandb.init, because a failing online init takes 90 seconds.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.system import network
from common.system.errors import UserError, summarize_error
from common.system.text import read_text_or_empty
from configs.shared import Experiment

MODES = ("auto", "online", "offline", "disabled")
NO_ACCOUNT = "no W&B account is configured"
DEFAULT_HOSTS = ("wandb.ai", "coreweave.com")
HOST_TIMEOUT = 3.0  # seconds to wait for a response from the W&B host


def read_requested_mode(cfg: Experiment) -> str:
    """Return the mode set by WANDB_MODE or, if unset, by wandb.mode. Raises UserError if WANDB_MODE is invalid."""
    mode = os.environ.get("WANDB_MODE") or cfg.wandb.mode
    mode = {"run": "online", "dryrun": "offline"}.get(mode, mode)  # names in older versions of W&B
    if mode not in MODES:
        raise UserError(f"WANDB_MODE must be one of {', '.join(MODES)}, got {mode}; change or unset it")
    return mode


def find_missing_account() -> str:
    """Return a message if no W&B account is configured, or an empty string if an account was found.

    This function checks the same files and environment variables as wandb, but does not import wandb, because the
    import would slow down training. An account that was found may still be invalid.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return ""
    config_folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    local_folder = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
    folders = (Path(config_folder), local_folder)
    settings = [read_text_or_empty(str(folder.expanduser() / "settings")) for folder in folders]
    if any("api_key" in text for text in settings):
        return ""

    texts_with_hosts = " ".join([*settings, os.environ.get("WANDB_BASE_URL", "")])
    hosts = [*DEFAULT_HOSTS, *re.findall(r"https?://([^/\s]+)", texts_with_hosts)]
    netrc = os.environ.get("NETRC")
    for name in [netrc] if netrc else ["~/.netrc", "~/_netrc"]:
        text = read_text_or_empty(str(Path(name).expanduser()))
        if any(host in text for host in hosts) or "default" in text.split():
            return ""
    return NO_ACCOUNT


def choose_mode(requested_mode: str) -> tuple[str, str]:
    """Return the mode, online or offline, and the reason for offline mode.

    This function takes at most a small multiple of HOST_TIMEOUT.
    """
    import wandb

    if requested_mode == "offline":
        return "offline", ""
    try:
        settings = wandb.setup().settings
        if settings.mode != "online":
            return "offline", f"W&B is set to {settings.mode} mode on this machine"
        if not wandb.login(prompt=False, verify=False):
            return "offline", NO_ACCOUNT
        problem = network.explain_unreachable_url(settings.base_url, HOST_TIMEOUT)
        if problem:
            return "offline", f"{settings.base_url} does not respond: {problem}"
        wandb.Api(timeout=round(HOST_TIMEOUT))  # raises an error unless the host accepts the API key
    except Exception as error:  # noqa: BLE001 (an invalid key or unreadable netrc must not stop training)
        return "offline", f"could not log in to W&B: {summarize_error(error)}"
    return "online", ""


def require_account() -> None:
    """Raise UserError if there is no W&B account or the W&B host does not respond."""
    os.environ.pop("WANDB_MODE", None)  # this variable applies only to runs
    mode, reason = choose_mode("online")
    if mode != "online":
        raise UserError(f"nothing was sent to W&B: {reason}; run .venv/bin/wandb login or set WANDB_API_KEY")
