"""Settings of collectives that may and may not change when a run is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import config
from common.config.config import load_config
from common.system.errors import UserError
from configs.collectives import Config
from tests.unit.config.conftest import create_run


def test_the_measured_operations_of_a_resumed_run_may_be_repeated_but_not_changed(tmp_path: Path) -> None:
    run = create_run(tmp_path, load_config(Config, ["ops=[sendrecv,all_reduce]"], {}))
    for text in ("[sendrecv,all_reduce]", "sendrecv, all_reduce"):
        resumed = load_config(Config, [f"--resume={run}", f"ops={text}"], {})
        assert config.find_changes(run, resumed) == {}
    message = r"^ops cannot change when a run is resumed: it was \[sendrecv,all_reduce\]; omit it or start a new run$"
    with pytest.raises(UserError, match=message):
        load_config(Config, [f"--resume={run}", "ops=[sendrecv]"], {})
