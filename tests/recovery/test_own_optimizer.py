"""A run with an optimizer and a decay of one's own: trained, resumed when the files have changed, and refused."""

from __future__ import annotations

from pathlib import Path

from tests.harness.own_data import write_example
from tests.harness.own_optimizer import BREACHES, write_own
from tests.harness.processes import run
from tests.harness.registry import REPLICATED
from tests.harness.resuming import check_that_it_goes_on


def test_a_run_keeps_optimizer_and_decay_of_the_contributing_page(tmp_path: Path, quick: tuple[str, ...]) -> None:
    files = write_example(tmp_path, "lion.py"), write_example(tmp_path, "halving.py")
    own = f"optim.name={files[0]}:Lion", "optim.lr=0.001", f"optim.decay={files[1]}:halve"
    settings = (*quick, *own, "optim.decayed=matrices", "optim.weight_decay=0.1", *REPLICATED.spread(2))
    completed = run(REPLICATED.name, *settings, runs=tmp_path / "runs")
    assert completed.status == 0, completed.err
    assert completed.losses[-1] < 0.9 * completed.losses[0]
    kept = sorted((completed.folder.path / "code" / "own").iterdir())
    assert [path.read_text() for path in kept] == [path.read_text() for path in files[::-1]]
    settings = (completed.folder.path / "config.yaml").read_text()
    for file in files:
        file.write_text("another file by now")
    goes_on = check_that_it_goes_on(REPLICATED, completed, "an optimizer of one's own", tmp_path / "resumed")
    assert (goes_on.path / "config.yaml").read_text() == settings


def test_a_run_refuses_a_class_that_would_lose_its_state(tmp_path: Path, digits: tuple[str, ...]) -> None:
    breach = BREACHES["state elsewhere"]
    settings = (*digits, f"optim.name={write_own(tmp_path, breach)}", *REPLICATED.smallest)
    completed = run(REPLICATED.name, *settings, runs=tmp_path / "runs")
    (message,) = [line for line in completed.err.splitlines() if line.startswith("error: ")]
    assert completed.status == 2
    assert breach.told in message
    assert "Traceback" not in completed.out + completed.err
    assert not list((tmp_path / "runs").iterdir()), "nothing is left of a run that was refused before its first step"
