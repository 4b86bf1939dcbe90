"""The W&B account is found without importing wandb, where wandb would find it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.runs.tracking import wandb_account
from tests.harness.commands.programs import list_loaded_modules


def format_netrc(host: str) -> str:
    return f"machine {host}\n login user\n password x\n"


GITHUB, WANDB, OTHER = (format_netrc(host) for host in ("github.com", "api.wandb.ai", "w.example.org"))
ACCOUNTS = [
    (".netrc", GITHUB, "", False),
    (".netrc", WANDB, "", True),
    (".netrc", OTHER, "", False),
    (".netrc", OTHER, "WANDB_BASE_URL=https://w.example.org", True),
    ("other", WANDB, "NETRC=~/other", True),
    (".config/wandb/settings", "[default]\napi_key = x\n", "", True),
    ("x", "", "WANDB_API_KEY=x", True),
    ("x", "", "WANDB_IDENTITY_TOKEN_FILE=/x", True),
]


@pytest.mark.parametrize("name, text, variable, is_found", ACCOUNTS)
def test_an_account_is_found_where_wandb_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, variable: str, is_found: bool
) -> None:
    for inherited in os.environ:
        if inherited.startswith("WANDB_") or inherited == "NETRC":
            monkeypatch.delenv(inherited)
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv(*variable.split("="))
    assert (wandb_account.find_missing_account() == "") == is_found


def test_the_account_is_found_without_importing_wandb() -> None:
    module = "common.runs.tracking.wandb_account"
    assert list_loaded_modules(f"{module}\n{module}.find_missing_account()", ["wandb"]) == []


def test_a_requested_offline_mode_needs_no_account() -> None:
    assert wandb_account.choose_mode("offline") == ("offline", "")
