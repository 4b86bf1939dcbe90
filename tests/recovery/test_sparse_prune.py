"""A stop request while the pruned model is exported. Other stop requests: tests/recovery/test_notices.py."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.harness.commands.processes import WAIT_TIMEOUT, Settings, find_processes, get_only_run, wait_until
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.runs.long_runs import start_long_run
from tests.harness.runs.resuming import list_trained_steps, resume_run


def test_a_stop_request_while_the_model_is_exported_loses_nothing(tmp_path: Path, quick: Settings) -> None:
    settings = (*quick, "export=true", "int8=true", "processes_per_node=1")
    site = tmp_path / "site"
    export_started = tmp_path / "export_started"
    runs = tmp_path / "runs"
    site.mkdir()
    # the process that the run starts to check the exported model creates a file, and then waits to be ended
    waiting = f"if '-c' in sys.orig_argv:\n    open({str(export_started)!r}, 'w')\n    signal.pause()\n"
    (site / "sitecustomize.py").write_text(f"import signal, sys\n{waiting}")
    with start_long_run("sparse_prune", *settings, runs=runs, PYTHONPATH=str(site)) as process:
        wait_until(lambda: export_started.exists() or process.poll() is not None, "the model is exported")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(WAIT_TIMEOUT)
    folder = get_only_run(runs)
    assert process.returncode == 128 + signal.SIGINT, out + err
    assert "Traceback" not in err, out + err
    assert not find_processes(str(tmp_path))
    last_row = folder.read_metrics()[-1]
    resume_run(ENTRY_BY_NAME["sparse_prune"], folder, "export=false", "int8=false")
    assert folder.result["state"] == "finished"
    assert folder.result["scores"]["test_loss"] == last_row["test_loss"]
    assert list_trained_steps(folder) == list(range(1, 31))
