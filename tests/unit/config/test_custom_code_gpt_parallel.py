"""Settings of gpt_parallel that name files with custom code."""

from __future__ import annotations

from common.config import config, custom_code
from configs.gpt_parallel import Config


def test_a_schedule_that_a_single_stage_does_not_use_is_accepted() -> None:
    custom_code.check_custom_settings(config.load_config(Config, ["schedule=zbv"], {}))
