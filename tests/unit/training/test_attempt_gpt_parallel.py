"""Custom optimizers of gpt_parallel, whose ranks may update different parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config.config import load_config
from common.training.attempt import Attempt
from common.training.run import Run
from configs.gpt_parallel import Config
from tests.harness.commands.refusals import expect_refusal
from tests.harness.custom_code.optimizers import MIXING, write_optimizer

DIVIDED_UPDATES = {
    "replicas=2 zero1=true": "; use zero1=false",
    "stages=2": "; use stages=1",
    "replicas=2 stages=2 zero1=true": "; use zero1=false and stages=1",
}


@pytest.mark.parametrize("settings", ["replicas=2", *DIVIDED_UPDATES])
def test_an_optimizer_may_mix_parameters_only_if_every_rank_updates_all(
    settings: str, run: Run, tmp_path: Path
) -> None:
    optimizer = f"optim.name={write_optimizer(tmp_path, MIXING)}"
    cfg = load_config(Config, [*settings.split(), optimizer, "optim.weight_decay=0"], {})
    attempt = Attempt(run.folder, run.prepared, is_new=True)
    if settings in DIVIDED_UPDATES:
        with expect_refusal(f"{optimizer}: ", MIXING.message_part, DIVIDED_UPDATES[settings]):
            attempt.check_custom_optimizer(cfg, is_joining=False)
    else:
        attempt.check_custom_optimizer(cfg, is_joining=False)
