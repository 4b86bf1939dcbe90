"""A stop request while the pruned model is exported. Other stop requests: tests/recovery/test_notices.py."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.harness.commands.processes import WAIT_TIMEOUT, find_processes, wait_until
from tests.harness.experiments.registry import BY_NAME
from tests.harness.runs.long_runs import only_folder, train_long
from tests.harness.runs.resuming import resume, trained_steps


def test_a_stop_request_while_the_model_is_exported_loses_nothing(tmp_path: Path, quick: tuple[str, ...]) -> None:
    settings = (*quick, "export=true", "int8=true", "processes_per_node=1")
    site = tmp_path / "site"
    export_started = tmp_path / "export_started"
    runs = tmp_path / "runs"
    site.mkdir()
    # the process that the run starts to check the exported model creates a file, and then waits to be ended
    waiting = f"if '-c' in sys.orig_argv:\n    open({str(export_started)!r}, 'w')\n    signal.pause()\n"
    (site / "sitecustomize.py").write_text(f"import signal, sys\n{waiting}")
    with train_long("sparse_prune", *settings, runs=runs, PYTHONPATH=str(site)) as process:
        wait_until(lambda: export_started.exists() or process.poll() is not None, "the model is exported")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(WAIT_TIMEOUT)
    folder = only_folder(runs)
    assert process.returncode == 128 + signal.SIGINT, out + err
    assert "Traceback" not in err, out + err
    assert not find_processes(str(tmp_path))
    last_row = folder.read_metrics()[-1]
    resumed = resume(BY_NAME["sparse_prune"], folder, "export=false", "int8=false")
    assert resumed.returncode == 0, resumed.stderr
    assert folder.result["state"] == "finished"
    assert folder.result["scores"]["test_loss"] == last_row["test_loss"]
    assert trained_steps(folder) == list(range(1, 31))
