"""The strategies of resnet_dataparallel: equal to one process, and honest where there is only one device."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import cast

import pytest
import torch
from PIL import Image
from torch import nn

from common.checkpoint import state_dicts
from common.config import config
from common.models import networks
from common.ranks.rendezvous import World
from common.system.errors import UserError
from common.techniques.data_parallel import device_report, single_process_baseline
from configs.resnet_dataparallel import Config
from configs.sweeps.resnet_dataparallel import list_points
from experiments import resnet_dataparallel
from tests.harness.cases import train_cases
from tests.harness.dataparallel_parity import train_run
from tests.harness.processes import run
from tests.harness.reference import differences

FEW = ("model=mlp", "batch=16", "launch.threads=1", "data.test_limit=100", "optim.warmup=0")


def test_ddp_with_synchronised_norms_equals_one_process(cache: Path, tmp_path: Path) -> None:
    (expected,) = train_cases("dataparallel_parity", tmp_path, cache, 1, ["strategy=single"]).values()
    assert len(expected["losses"]) == 10 and len(expected["state"]) == 122
    assert expected["state"]["bn1.num_batches_tracked"] == 10
    norms = ["sync_batchnorm=true", "sync_batchnorm=false"]
    synced, apart = train_cases("dataparallel_parity", tmp_path, cache, 2, norms).values()
    assert differences(synced, expected) == []
    # the check sees norms that look at their own share only, with a process that has none
    assert any("losses" in difference for difference in differences(apart, expected))
    assert all(value.isfinite().all() for value in apart["state"].values())


def test_every_strategy_equals_one_process_and_data_parallel_on_one_device_says_so(cache: Path, tmp_path: Path) -> None:
    _, expected = train_run(cache, tmp_path / "single", 10, "model=convnet", "strategy=single")
    ddp, shared = train_run(cache, tmp_path / "ddp", 10, "model=convnet", "compare=false")
    assert differences(shared, expected) == []
    assert ddp.result["last_batch"] == [1, 0] and ddp.result["devices"] == 2
    for functional in ("true", "false"):
        words = ("model=convnet", "strategy=data_parallel", f"functional={functional}", "compare=true")
        done, found = train_run(cache, tmp_path / functional, 10, *words)
        result = done.result
        if torch.cuda.device_count() < 2:
            assert "runs the model unchanged, like strategy=single" in done.out and "use strategy=ddp" in done.out
            assert result["devices"] == 1 and "efficiency" not in result and not result["compare"]
            assert "speedup" not in done.out
            assert found["losses"] == expected["losses"]
        assert found["state"].keys() == expected["state"].keys()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["strategy=data_parallel", "sync_batchnorm=true"], ["sync_batchnorm", "several processes", "strategy=ddp"]),
        (["strategy=single", "processes_per_node=2"], ["processes_per_node", "strategy=ddp"]),
        (["strategy=data_parallel", "launch.nodes=2"], ["launch.nodes", "strategy=ddp"]),
        (["functional=true"], ["functional=true applies to data_parallel only"]),
        (["batch=63"], ["batch=63", "2 ranks", "batch=62 or 64"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load_config(Config, words, {})
    assert all(part in str(caught.value) for part in parts), caught.value


def test_shares_are_those_of_the_strategies() -> None:
    chunks, slices = Config(strategy="data_parallel"), Config(strategy="ddp")
    for count, devices, expected in ((5, 4, [2, 2, 1, 0]), (1, 4, [1, 0, 0, 0]), (64, 2, [32, 32]), (5, 2, [3, 2])):
        assert device_report.count_samples_per_device(chunks, count, devices) == expected
    assert device_report.count_samples_per_device(slices, 5, 4) == [2, 1, 1, 1]


def test_only_data_parallel_is_called_as_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnet_dataparallel, "list_gpus", lambda world: [0, 1])
    cfg, model, world = Config(strategy="data_parallel", functional=True), nn.Linear(1, 1), cast(World, None)
    called = resnet_dataparallel.choose_forward(cfg, model, world)
    assert isinstance(called, partial) and called.keywords == {"device_ids": [0, 1]}
    for other in ("single", "ddp"):  # the sides that a run of data_parallel compares itself with
        assert resnet_dataparallel.choose_forward(replace(cfg, strategy=other), model, world) is model


def test_the_running_loss_is_the_mean_of_the_losses_and_nobody_waits_for_it(
    digits: tuple[str, ...], tmp_path: Path
) -> None:
    few = ("compare=false", "loss_every=10", "data.train_limit=240", "epochs=2", "steps=25", "profile=4")
    done = run("resnet_dataparallel", *digits, *FEW, *few, runs=tmp_path)
    assert done.status == 0, done.err
    told = [float(value) for value in re.findall(r"running loss (\d+\.\d+)", done.out)]
    assert told == pytest.approx([fmean(done.losses[:10]), fmean(done.losses[15:20])], abs=6e-4)  # epochs of 15 steps
    events = json.loads((done.folder.list_attempts()[0].attempt_folder / "trace-0.json").read_text())["traceEvents"]
    names = ("aten::cross_entropy_loss", "aten::item")
    losses, waits = ([event["ts"] for event in events if event.get("name") == name] for name in names)
    # a loop that printed each loss would wait in every step; the metrics do now and then
    assert len(losses) == 4 and sum(at < max(losses) for at in waits) < 4


def test_the_sides_of_the_comparison_take_turns_and_are_drawn(digits: tuple[str, ...], tmp_path: Path) -> None:
    done = run("resnet_dataparallel", *digits, *FEW, "launch.device=cpu", "steps=15", runs=tmp_path)
    assert done.status == 0, done.err
    result = done.result
    assert list(result["compare"]) == ["single, 1 thread", "single, 2 threads", "ddp"]
    assert all(
        len(values) == single_process_baseline.COMPARE_ROUNDS and min(values) > 0
        for values in result["compare"].values()
    )
    told = ["comparing the strategies in alternating rounds; with compare=false, a run ends here"]
    told += [f"comparison, round {number} of 3: {side}" for number in (1, 2, 3) for side in result["compare"]]
    assert [line for line in done.out.splitlines() if line.startswith(("comparison, ", "comparing the "))] == told
    one, *_, both = (fmean(values) for values in result["compare"].values())
    assert result["efficiency"] == pytest.approx(both / one / 2)
    assert "GPUs found: 0; DataParallel runs the model unchanged" in done.out
    drawn = done.folder.path / "compare.png"
    assert drawn.read_bytes().startswith(b"\x89PNG") and drawn.as_uri() in done.out
    assert len(result["memory"]) == 2 and min(result["memory"].values()) > 50e6
    assert result["imbalance"]["memory"] >= 0 and result["imbalance"]["before_backward"] >= 0


def test_fewer_images_than_a_batch_are_trained_on_and_not_compared(tmp_path: Path) -> None:
    for part, count in (("train", 10), ("val", 2)):
        for colour in ("red", "blue"):
            (tmp_path / part / colour).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8), colour).save(tmp_path / part / colour / f"{number}.png")
    images = ("data.name=imagefolder", f"data.root={tmp_path}", f"data.cache={tmp_path / 'sets'}", "data.image_size=8")
    done = run(
        "resnet_dataparallel", *images, *FEW, "launch.device=cpu", "batch=64", "epochs=2", runs=tmp_path / "runs"
    )
    assert done.status == 0, done.err
    assert done.result["state"] == "finished" and done.result["compare"] == {}
    assert len(done.losses) == 2 and done.result["last_batch"] == [10, 10]
    assert re.search(r"comparison +skipped: the training set has 20 samples, fewer than one batch of 64", done.out)


def test_a_sweep_runs_each_strategy(digits: tuple[str, ...], tmp_path: Path) -> None:
    done = run(
        "resnet_dataparallel", *digits, *FEW, "launch.device=cpu", "sweep=true", "repeats=1", "steps=15", runs=tmp_path
    )
    assert done.status == 0, done.err
    (folder,) = (tmp_path / "sweeps").iterdir()
    cells = json.loads((folder / "sweep.json").read_text())["cells"]
    assert [cell["values"]["strategy"] for cell in cells] == ["single", "ddp"]
    assert (folder / "strategies.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"single  [\d,]+ samples/s, 1 run\n", done.out) and "data_parallel  " in done.out


@pytest.mark.parametrize(
    ("gpus", "strategies", "device"),
    [(0, ["single", "ddp"], None), (1, ["single", "ddp"], "cpu"), (2, ["single", "data_parallel", "ddp"], None)],
)
def test_a_sweep_compares_on_one_kind_of_device(gpus: int, strategies: list[str], device: str | None) -> None:
    cells = list_points(Config(), gpus)
    assert [cell["strategy"] for cell in cells] == strategies
    assert {cell.get("launch.device") for cell in cells} == {device}


def test_a_model_saved_by_a_wrapper_is_loaded_too() -> None:
    saved, ours = (networks.ResNet("resnet18", (28, 28), 10, width=4) for _ in range(2))
    wrapped = nn.DataParallel(saved).state_dict()
    assert all(name.startswith("module.") for name in wrapped)
    pairs = [*ours.named_parameters(), *ours.named_buffers()]
    assert not all(torch.equal(value, wrapped[f"module.{name}"]) for name, value in pairs)
    state_dicts.load_tensors(pairs, wrapped)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in pairs)
    with pytest.raises(UserError, match=r"the checkpoint has no tensor conv1\.weight; it was saved"):
        state_dicts.load_tensors(pairs, nn.DataParallel(nn.Linear(2, 2)).state_dict())
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    memory = {f"module.{name}": {"momentum_buffer": torch.full_like(p, 3)} for name, p in ours.named_parameters()}
    state_dicts.load_optimizer_state(optimizer, list(ours.named_parameters()), memory)
    assert all((optimizer.state[p]["momentum_buffer"] == 3).all() for p in ours.parameters())
