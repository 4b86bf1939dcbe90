"""The W&B account is found without importing wandb, where wandb would find it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.runs.tracking import wandb_account
from tests.harness.commands.programs import list_loaded_modules

OTHER_HOST = {"WANDB_BASE_URL": "https://w.example.org"}


def format_netrc(host: str) -> str:
    return f"machine {host}\n login user\n password x\n"


ACCOUNTS = [
    (".netrc", format_netrc("github.com"), {}, False),
    (".netrc", format_netrc("api.wandb.ai"), {}, True),
    (".netrc", format_netrc("w.example.org"), {}, False),
    (".netrc", format_netrc("w.example.org"), OTHER_HOST, True),
    ("other", format_netrc("api.wandb.ai"), {"NETRC": "~/other"}, True),
    (".config/wandb/settings", "[default]\napi_key = x\n", {}, True),
    ("x", "", {"WANDB_API_KEY": "x"}, True),
    ("x", "", {"WANDB_IDENTITY_TOKEN_FILE": "/x"}, True),
]


@pytest.mark.parametrize("name, text, variables, is_found", ACCOUNTS)
def test_an_account_is_found_where_wandb_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, variables: dict[str, str], is_found: bool
) -> None:
    for variable in os.environ:
        if variable.startswith("WANDB_") or variable == "NETRC":
            monkeypatch.delenv(variable)
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for variable, setting in variables.items():
        monkeypatch.setenv(variable, setting)
    assert (wandb_account.find_missing_account() == "") == is_found


def test_the_account_is_found_without_importing_wandb() -> None:
    module = "common.runs.tracking.wandb_account"
    assert list_loaded_modules(f"{module}\n{module}.find_missing_account()", ["wandb"]) == []
