"""The config of a run is final once it is checked; values that the run chooses are stored in resolved.yaml."""

from __future__ import annotations

import sys
from pathlib import Path

from common.config import config
from common.runs.folder import RunFolder
from configs.mnist_pipeline import Config
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.processes import make_environment


def test_values_that_a_run_chooses_are_stored_beside_the_config(tmp_path: Path, cache: Path) -> None:
    quick = ("steps=3", "data.test_limit=100", f"data.cache={cache}", f"runs={tmp_path / 'runs'}", "launch.threads=1")
    automatic = ("balance=time", "launch.backend=builtin", "launch.algorithm=auto", "data.download_timeout=0")
    argv = [sys.executable, "-m", "tests.harness.runs.final_config", *quick, *automatic]
    env = make_environment(DATA_ROOT=str(tmp_path))  # without MNIST
    completed = execution.execute_command(argv, env=env, timeout=120, status=0)
    assert "config unchanged on all ranks: [True, True]" in completed.stdout

    (path,) = (tmp_path / "runs").iterdir()
    resolved = config.read_config_file(path / "resolved.yaml")
    assert list(resolved) == ["data.name", "launch.algorithm", "split"]
    assert resolved["data.name"] == "digits" == RunFolder(path).result["data"]
    assert resolved["launch.algorithm"] in completed.stdout
    assert resolved["split"] in (["fc2"], ["fc3"])

    for option in (f"--config={path / 'config.yaml'}", f"--resume={path}"):
        cfg = config.load_config(Config, [option], {})
        assert [cfg.data.name, cfg.launch.algorithm, cfg.pipeline.split] == list(resolved.values())
        assert config.find_changes(path, cfg) == {}
    compared = in_process_calls.call_verb("compare", "--where=data.name=digits launch.algorithm!=auto", cwd=tmp_path)
    assert "finished" in compared.stdout, compared.stderr
