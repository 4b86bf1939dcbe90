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
    words = (*quick, *own, "optim.decayed=matrices", "optim.weight_decay=0.1", *REPLICATED.spread(2))
    done = run(REPLICATED.name, *words, runs=tmp_path / "runs")
    assert done.status == 0, done.err
    assert done.losses[-1] < 0.9 * done.losses[0]
    kept = sorted((done.folder.path / "code" / "own").iterdir())
    assert [path.read_text() for path in kept] == [path.read_text() for path in files[::-1]]
    settings = (done.folder.path / "config.yaml").read_text()
    for file in files:
        file.write_text("another file by now")
    goes_on = check_that_it_goes_on(REPLICATED, done, "an optimizer of one's own", tmp_path / "resumed")
    assert (goes_on.path / "config.yaml").read_text() == settings


def test_a_run_refuses_a_class_that_would_lose_its_state(tmp_path: Path, digits: tuple[str, ...]) -> None:
    breach = BREACHES["state elsewhere"]
    words = (*digits, f"optim.name={write_own(tmp_path, breach)}", *REPLICATED.smallest)
    done = run(REPLICATED.name, *words, runs=tmp_path / "runs")
    (message,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert done.status == 2 and breach.told in message and "Traceback" not in done.out + done.err
    assert not list((tmp_path / "runs").iterdir()), "nothing is left of a run that was refused before its first step"
