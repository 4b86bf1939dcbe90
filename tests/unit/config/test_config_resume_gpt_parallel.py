"""Settings of gpt_parallel that may and may not change when a run is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import config
from common.config.config import load_config
from common.system.errors import UserError
from configs.gpt_parallel import Config
from tests.unit.config.conftest import create_run

FIXED_SETTINGS = (
    *("width=64", "layers=2", "heads=2", "key_value_heads=2", "hidden=64", "activation=gelu", "tied=false"),
    "data.context=64",
)


@pytest.mark.parametrize("change", FIXED_SETTINGS)
def test_the_network_of_a_resumed_run_cannot_change(change: str, tmp_path: Path) -> None:
    run = create_run(tmp_path, load_config(Config, [], {}))
    with pytest.raises(UserError, match=f"^{change.partition('=')[0]} cannot change when a run is resumed: it was"):
        load_config(Config, [f"--resume={run}", change], {})


@pytest.mark.parametrize("text", ["True", "true"])
def test_an_unchanged_setting_of_the_network_may_be_repeated(text: str, tmp_path: Path) -> None:
    run = create_run(tmp_path, load_config(Config, [], {}))
    resumed = load_config(Config, [f"--resume={run}", f"tied={text}"], {})
    assert config.find_changes(run, resumed) == {}


def test_the_file_of_a_resumed_run_may_be_named_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = create_run(tmp_path, load_config(Config, ["data.name=text", f"data.tokenizer={tmp_path}/tokens.json"], {}))
    for name in ("~/tokens.json", "tokens.json"):
        load_config(Config, [f"--resume={run}", f"data.tokenizer={name}"], {})
    with pytest.raises(UserError, match=r"data\.tokenizer cannot change"):
        load_config(Config, [f"--resume={run}", "data.tokenizer=other.json"], {})


def test_a_resumed_run_may_recompute_other_activations(tmp_path: Path) -> None:
    run = create_run(tmp_path, load_config(Config, ["recompute=blocks"], {}))
    resumed = load_config(Config, ["--resume", str(run), "recompute=selective"], {})
    assert resumed.memory.recompute == "selective"
    assert config.find_changes(run, resumed) == {"recompute": ("blocks", "selective")}

    file = run / "config.yaml"
    file.write_text(file.read_text().replace("recompute: blocks\n", ""))  # as in runs of older versions
    resumed = load_config(Config, ["--resume", str(run)], {})
    assert resumed.memory.recompute == "none"
