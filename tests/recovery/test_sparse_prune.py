"""A stop request while the pruned model is exported. tests/recovery/test_notices.py has the other stop requests."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.harness.long_runs import only_folder, train_long
from tests.harness.processes import PATIENCE, processes_of, wait_until
from tests.harness.registry import BY_NAME
from tests.harness.resuming import resume


def test_a_notice_while_the_model_is_exported_loses_nothing(tmp_path: Path, quick: tuple[str, ...]) -> None:
    settings = (*quick, "export=true", "int8=true", "processes_per_node=1")
    site = tmp_path / "site"
    begun = tmp_path / "begun"
    runs = tmp_path / "runs"
    site.mkdir()
    # the process that the run starts to check the exported model says so, and then waits to be ended
    waiting = f"if '-c' in sys.orig_argv:\n    open({str(begun)!r}, 'w')\n    signal.pause()\n"
    (site / "sitecustomize.py").write_text(f"import signal, sys\n{waiting}")
    with train_long("sparse_prune", *settings, runs=runs, PYTHONPATH=str(site)) as process:
        wait_until(lambda: begun.exists() or process.poll() is not None, "it exports")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(PATIENCE)
    folder = only_folder(runs)
    assert process.returncode == 128 + signal.SIGINT, out + err
    assert "Traceback" not in err, out + err
    assert not processes_of(str(tmp_path))
    before = folder.read_metrics()[-1]
    resumed = resume(BY_NAME["sparse_prune"], folder, "export=false", "int8=false")
    assert resumed.returncode == 0, resumed.stderr
    assert folder.result["state"] == "finished"
    assert folder.result["scores"]["test_loss"] == before["test_loss"]
    assert [row["global_step"] for row in folder.read_metrics() if "loss" in row] == list(range(1, 31))
