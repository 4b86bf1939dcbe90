"""Runs with custom code of all kinds: trained, resumed and repeated after the files have changed, and refused."""

from __future__ import annotations

from pathlib import Path

from tests.harness.commands.processes import Settings, execute_verb, run_experiment
from tests.harness.custom_code.examples import write_example, write_recordings
from tests.harness.custom_code.optimizers import VIOLATIONS, write_optimizer
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.runs.resuming import check_resume


def test_a_run_keeps_all_examples_of_the_page(tmp_path: Path, quick: Settings) -> None:
    names = ("recordings.py", "halving.py", "focal.py", "residual.py", "lion.py")
    data_file, decay_file, loss_file, network_file, optimizer_file = files = [
        write_example(tmp_path, name) for name in names
    ]
    recordings = write_recordings(tmp_path / "recordings", 320)
    custom_code = (
        *(f"data.name={data_file}:load", f"data.root={recordings}", f"data.cache={tmp_path / 'sets'}"),
        *("data.workers=1", f"model={network_file}:ResidualNet", f"loss={loss_file}:focal_loss"),
        *(f"optim.name={optimizer_file}:Lion", "optim.lr=0.001", f"optim.decay={decay_file}:halve"),
    )
    settings = (
        *quick,
        "optim.decayed=matrices",
        "optim.weight_decay=0.1",
        *REPLICATED_ENTRY.make_rank_settings(2),
        *custom_code,
    )
    completed = run_experiment(REPLICATED_ENTRY.name, *settings, runs=tmp_path / "runs")
    assert completed.losses[-1] < 0.9 * completed.losses[0]
    copies = sorted((completed.folder.path / "code" / "own").iterdir())
    assert [copy.name.partition("-")[0] for copy in copies] == ["data.py", "decay", "loss", "model", "optimizer"]
    for copy, file in zip(copies, files, strict=True):
        assert copy.read_text() == file.read_text()

    config_text = (completed.folder.path / "config.yaml").read_text()
    for file in files:
        file.write_text("changed since the start")
    resumed_folder = check_resume(REPLICATED_ENTRY, completed, "custom code", tmp_path / "resumed")
    assert (resumed_folder.path / "config.yaml").read_text() == config_text

    for file in files:
        file.unlink()
    repetition = execute_verb("rerun", "--", str(completed.folder.path), status=0)
    assert "losses      bitwise equal in 30 steps" in repetition.stdout


def test_a_run_refuses_a_class_that_would_lose_its_state(tmp_path: Path, digits: Settings) -> None:
    breach = VIOLATIONS["state elsewhere"]
    settings = (*digits, f"optim.name={write_optimizer(tmp_path, breach)}", *REPLICATED_ENTRY.smallest_settings)
    completed = run_experiment(REPLICATED_ENTRY.name, *settings, runs=tmp_path / "runs", status=2)
    (message,) = [line for line in completed.stderr.splitlines() if line.startswith("error: ")]
    assert breach.message_part in message
    assert not list((tmp_path / "runs").iterdir()), "a run that is refused before step 1 leaves no folder"


def test_a_network_with_a_mask_and_the_child_module_is_resumed(tmp_path: Path, quick: Settings) -> None:
    """The mask contains infinity, and all names of the parameters begin like those of a wrapped model."""
    file = tmp_path / "net.py"
    file.write_text(
        "import math\nimport torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, shape, outputs):\n"
        "        super().__init__()\n"
        "        self.module = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))\n"
        "        self.module.register_buffer('mask', torch.full((3, 3), -torch.inf).triu(1))\n"
        "    def forward(self, x):\n"
        "        return self.module(x)\n"
    )
    settings = (*quick, *REPLICATED_ENTRY.make_rank_settings(2), f"model={file}:Net")
    completed = run_experiment(REPLICATED_ENTRY.name, *settings, runs=tmp_path / "runs")
    check_resume(REPLICATED_ENTRY, completed, "mask", tmp_path / "resumed")
