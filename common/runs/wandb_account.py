"""The W&B mode of a run: the one asked for, and offline where no account or host answers. Imports no torch.

Both are found out before wandb.init, because a failing online init takes a minute and a half.
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
HOSTS = ("wandb.ai", "coreweave.com")  # of accounts without a host of their own
REACH = 3.0  # seconds for the W&B host to answer


def read_requested_mode(cfg: Experiment) -> str:
    """Return one of MODES, from WANDB_MODE or else wandb.mode. Raises UserError for an unknown WANDB_MODE."""
    mode = os.environ.get("WANDB_MODE") or cfg.wandb.mode
    mode = {"run": "online", "dryrun": "offline"}.get(mode, mode)  # W&B's older names
    if mode not in MODES:
        raise UserError(f"WANDB_MODE={mode} is unknown; use {', '.join(MODES)}, or unset it")
    return mode


def find_missing_account() -> str:
    """Return why W&B can have no account here, or nothing. Does not import wandb, which would slow a run that trains.

    It looks where wandb looks. An account that it finds may still be of no use.
    """
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return ""
    configured = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    local = Path(os.environ.get("WANDB_DIR") or ".") / "wandb"
    settings = [read_or_empty(str(place.expanduser() / "settings")) for place in (Path(configured), local)]
    if any("api_key" in text for text in settings):
        return ""
    hosts = [*HOSTS, *re.findall(r"https?://([^/\s]+)", " ".join([*settings, os.environ.get("WANDB_BASE_URL", "")]))]
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for name in names:
        text = read_or_empty(str(Path(name).expanduser()))
        if any(host in text for host in hosts) or "default" in text.split():
            return ""
    return NO_ACCOUNT


def choose_mode(asked: str) -> tuple[str, str]:
    """Return online or offline, and the reason for offline. Takes at most a few times REACH, whatever the host does."""
    import wandb

    if asked == "offline":
        return "offline", ""
    try:
        settings = wandb.setup().settings
        if settings.mode != "online":
            return "offline", f"`wandb {settings.mode}` was set on this machine"
        if not wandb.login(prompt=False, verify=False):
            return "offline", NO_ACCOUNT
        silent = network.find_url_problem(settings.base_url, REACH)
        if silent:
            return "offline", f"{settings.base_url} does not answer: {silent}"
        wandb.Api(timeout=round(REACH))  # raises unless the host knows the key
    except Exception as error:  # noqa: BLE001 (a malformed or refused key, an unreadable netrc: train on)
        return "offline", f"W&B does not accept the account: {summarize_error(error)}"
    return "online", ""


def require_account() -> None:
    """Raise UserError, with the reason, unless there is a W&B account whose host answers."""
    os.environ.pop("WANDB_MODE", None)  # it is about runs
    mode, why = choose_mode("online")
    if mode != "online":
        raise UserError(
            f"nothing is sent to W&B: {why} (an account is named by .venv/bin/wandb login or WANDB_API_KEY)"
        )
