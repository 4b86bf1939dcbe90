"""Compiled models compute the same as others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands.processes import Settings, run_experiment


@pytest.mark.drawn
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("g++"), reason="NOT TESTED: there is no C++ compiler (apt-get install g++)")
def test_a_compiled_model_computes_the_same(tmp_path: Path, digits: Settings) -> None:
    quick = (*digits, "model=mlp", "steps=3", "optim.warmup=0", "processes_per_node=1", "precision=fp32")
    quick += ("accumulate=1", "data.test_limit=64", "eval_batch=64")  # one shape of a batch to compile for
    compiler_cache = tmp_path / "compiled"
    # without helper processes, each of which would import torch
    env: dict[str, Any] = {"TORCHINDUCTOR_CACHE_DIR": str(compiler_cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # does not test which vector instructions the compiler supports
    completed = run_experiment("amp_accum", *quick, "compile=true", runs=tmp_path / "fast", timeout=500, **env)
    assert list(compiler_cache.rglob("*.so")), "nothing was compiled"
    without_compiler = run_experiment("amp_accum", *quick, runs=tmp_path / "plain")
    assert completed.losses == pytest.approx(without_compiler.losses, rel=1e-4)
