"""The W&B mode of a run: the requested mode, or offline without an account or a reachable host. Imports no torch.

Both are checked before wandb.init, because a failing online init takes a minute and a half.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.core import network
from common.core.errors import UserError, summarize_error
from common.core.text import read_or_empty
from configs.shared import Experiment

MODES = ("auto", "online", "offline", "disabled")
NO_ACCOUNT = "no W&B account is configured"
DEFAULT_HOSTS = ("wandb.ai", "coreweave.com")
HOST_TIMEOUT = 3.0  # seconds for the W&B host to answer


def read_requested_mode(cfg: Experiment) -> str:
    """Return one of MODES, from WANDB_MODE or else wandb.mode. Raises UserError for an unknown WANDB_MODE."""
    mode = os.environ.get("WANDB_MODE") or cfg.wandb.mode
    mode = {"run": "online", "dryrun": "offline"}.get(mode, mode)  # older names of W&B
    if mode not in MODES:
        raise UserError(f"WANDB_MODE must be one of {', '.join(MODES)}, got {mode}; change or unset it")
    return mode


def find_missing_account() -> str:
    """Return why there can be no W&B account, or an empty string.

    Does not import wandb, which would slow training.

    Checks the places that wandb checks. An account found there may still be invalid.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return ""
    config_folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    local_folder = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
    folders = (Path(config_folder), local_folder)
    settings = [read_or_empty(str(folder.expanduser() / "settings")) for folder in folders]
    if any("api_key" in text for text in settings):
        return ""

    texts_with_hosts = " ".join([*settings, os.environ.get("WANDB_BASE_URL", "")])
    hosts = [*DEFAULT_HOSTS, *re.findall(r"https?://([^/\s]+)", texts_with_hosts)]
    netrc = os.environ.get("NETRC")
    for name in [netrc] if netrc else ["~/.netrc", "~/_netrc"]:
        text = read_or_empty(str(Path(name).expanduser()))
        if any(host in text for host in hosts) or "default" in text.split():
            return ""
    return NO_ACCOUNT


def choose_mode(requested_mode: str) -> tuple[str, str]:
    """Return online or offline, and the reason for offline.

    Takes at most a few times HOST_TIMEOUT.
    """
    import wandb

    if requested_mode == "offline":
        return "offline", ""
    try:
        settings = wandb.setup().settings
        if settings.mode != "online":
            return "offline", f"`wandb {settings.mode}` was set on this machine"
        if not wandb.login(prompt=False, verify=False):
            return "offline", NO_ACCOUNT
        problem = network.explain_unreachable_url(settings.base_url, HOST_TIMEOUT)
        if problem:
            return "offline", f"{settings.base_url} does not answer: {problem}"
        wandb.Api(timeout=round(HOST_TIMEOUT))  # raises unless the host accepts the key
    except Exception as error:  # noqa: BLE001 (an invalid key or unreadable netrc must not stop training)
        return "offline", f"W&B does not accept the account: {summarize_error(error)}"
    return "online", ""


def require_account() -> None:
    """Raise UserError unless there is a W&B account whose host answers."""
    os.environ.pop("WANDB_MODE", None)  # it applies to runs only
    mode, reason = choose_mode("online")
    if mode != "online":
        raise UserError(f"nothing sent to W&B: {reason}; run .venv/bin/wandb login or set WANDB_API_KEY")
