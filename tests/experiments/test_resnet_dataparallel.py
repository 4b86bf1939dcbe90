"""The strategies of resnet_dataparallel equal one process; DataParallel on a single device is reported."""

from __future__ import annotations

import collections
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import cast

import pytest
import torch
import yaml
from PIL import Image
from torch import nn

from common.checkpoint import state_dicts
from common.config import config
from common.models import networks
from common.ranks.rendezvous import World
from common.runs.folder import read_json
from common.system.errors import UserError
from common.techniques.data_parallel import device_report, single_process_baseline
from configs.profile import Profile
from configs.resnet_dataparallel import Config
from configs.sweeps.resnet_dataparallel import list_points, summarize_runs
from experiments import resnet_dataparallel
from slurm.launch import experiment_sweep, submit
from slurm.launch.sweep_file import load_grid
from tests.harness.commands.processes import FinishedRun, Settings, run_experiment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.parity.dataparallel_cases import DATA_PARALLEL, train_run
from tests.harness.parity.driver import train_cases
from tests.harness.parity.reference import list_differences, list_loss_differences

SMALL = ("model=mlp", "batch=16", "launch.threads=1", "data.test_limit=100", "optim.warmup=0")


@pytest.mark.slow
def test_ddp_with_synchronised_norms_equals_one_process(cache: Path, tmp_path: Path) -> None:
    (single_process,) = train_cases(DATA_PARALLEL, tmp_path, cache, 1, ["strategy=single"]).values()
    assert len(single_process["losses"]) == 10
    assert len(single_process["state"]) == 122
    assert single_process["state"]["bn1.num_batches_tracked"] == 10
    cases = ["sync_batchnorm=true", "sync_batchnorm=false", "sync_batchnorm=true,zero1=true"]
    synchronised, separate, divided = train_cases(DATA_PARALLEL, tmp_path, cache, 2, cases).values()
    assert list_differences(synchronised, single_process) == []
    assert divided["losses"] == synchronised["losses"], "dividing the optimizer state changes no bit"
    # the comparison detects norms that use the local shard only, although one shard is empty
    assert list_loss_differences(separate, single_process)
    for tensor in separate["state"].values():
        assert tensor.isfinite().all()


def test_every_strategy_equals_one_process(cache: Path, tmp_path: Path) -> None:
    _, single_process = train_run(cache, tmp_path / "single", 10, "model=convnet", "strategy=single")
    ddp, sharded = train_run(cache, tmp_path / "ddp", 10, "model=convnet", "compare=false")
    assert list_differences(sharded, single_process) == []
    assert ddp.result["last_batch"] == [1, 0]
    assert ddp.result["devices"] == 2
    for functional in ("true", "false"):
        settings = ("model=convnet", "strategy=data_parallel", f"functional={functional}", "compare=true")
        completed, trained = train_run(cache, tmp_path / functional, 10, *settings)
        if torch.cuda.device_count() < 2:
            check_that_data_parallel_was_not_used(completed)
            assert trained["losses"] == single_process["losses"]
        assert trained["state"].keys() == single_process["state"].keys()


def check_that_data_parallel_was_not_used(completed: FinishedRun) -> None:
    """Check that a run of data_parallel on a single device says that it used the model unchanged."""
    assert "runs the model unchanged, like strategy=single" in completed.stdout
    assert "use strategy=ddp" in completed.stdout
    assert "speedup" not in completed.stdout
    result = completed.result
    assert result["devices"] == 1
    assert "efficiency" not in result
    assert not result["compare"]


INVALID_SETTINGS = {
    "strategy=data_parallel sync_batchnorm=true": "sync_batchnorm ... several processes ... strategy=ddp",
    "strategy=single zero1=true": "zero1 needs several processes, but strategy=single uses one; use strategy=ddp",
    "zero1=true processes_per_node=1": "use processes_per_node=2 or more, or omit zero1",
    "strategy=single processes_per_node=2": "use strategy=ddp, or omit processes_per_node",
    "strategy=data_parallel launch.nodes=2": "launch.nodes ... strategy=ddp",
    "functional=true": "functional=true applies to data_parallel only",
    "strategy=data_parallel dropout=0.1": "dropout=0.1 is not available ... use strategy=ddp or single",
    "batch=63": "batch=63 ... 2 ranks ... batch=62 or 64",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_are_refused(settings: str, message: str) -> None:
    with expect_refusal(message):
        config.load_config(Config, settings.split(), {})


@pytest.mark.parametrize("strategy", ["single", "data_parallel"])
def test_one_process_may_be_requested_for_strategies_that_use_one(strategy: str) -> None:
    assert config.load_config(Config, [f"strategy={strategy}", "processes_per_node=1"], {}).processes == 1


@pytest.mark.parametrize("ranks_per_node, written", [(1, 1), (4, 0)])
def test_one_process_is_submitted_regardless_of_the_ranks_per_node_of_a_profile(
    ranks_per_node: int, written: int
) -> None:
    """The ranks of the job would refuse more than one process."""
    settings = config.load_config(Config, ["strategy=single"])
    submitted = submit.resolve_processes_per_node(settings, Profile(processes=ranks_per_node))
    assert submitted.processes == 1
    assert yaml.safe_load(config.format_yaml(submitted))["processes_per_node"] == written


def test_samples_per_device_depend_on_the_strategy() -> None:
    chunks = Config(strategy="data_parallel")
    slices = Config(strategy="ddp")
    for count, devices, expected in ((5, 4, [2, 2, 1, 0]), (1, 4, [1, 0, 0, 0]), (64, 2, [32, 32]), (5, 2, [3, 2])):
        assert device_report.count_samples_per_device(chunks, count, devices) == expected
    assert device_report.count_samples_per_device(slices, 5, 4) == [2, 1, 1, 1]


def test_only_data_parallel_is_called_as_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resnet_dataparallel, "list_gpus", lambda world: [0, 1])
    cfg = Config(strategy="data_parallel", functional=True)
    model = nn.Linear(1, 1)
    world = cast(World, None)
    forward = resnet_dataparallel.choose_forward(cfg, model, world)
    assert isinstance(forward, partial)
    assert forward.keywords == {"device_ids": [0, 1]}
    for strategy in ("single", "ddp"):  # a run of data_parallel is compared with these
        assert resnet_dataparallel.choose_forward(replace(cfg, strategy=strategy), model, world) is model


def test_the_running_loss_is_the_mean_of_the_losses_and_steps_do_not_wait_for_it(
    digits: Settings, tmp_path: Path
) -> None:
    settings = ("compare=false", "loss_every=10", "data.train_limit=240", "epochs=2", "steps=25", "profile=4")
    completed = run_experiment("resnet_dataparallel", *digits, *SMALL, *settings, runs=tmp_path)
    printed = [float(number) for number in re.findall(r"running loss (\d+\.\d+)", completed.stdout)]
    expected = [fmean(completed.losses[:10]), fmean(completed.losses[15:20])]  # an epoch has 15 steps
    assert printed == pytest.approx(expected, abs=6e-4)

    trace = completed.folder.list_attempts()[0].attempt_folder / "trace-0.json"
    times = collections.defaultdict(list)
    for event in read_json(trace)["traceEvents"]:
        times[event.get("name")].append(event.get("ts"))
    loss_times = times["aten::cross_entropy_loss"]
    wait_times = times["aten::item"]
    assert len(loss_times) == 4
    waits_between_losses = [time for time in wait_times if time < max(loss_times)]
    assert not waits_between_losses, "a loop that prints each loss waits in every step"


def test_the_compared_strategies_take_turns_and_are_drawn(digits: Settings, tmp_path: Path) -> None:
    completed = run_experiment("resnet_dataparallel", *digits, *SMALL, "launch.device=cpu", "steps=15", runs=tmp_path)
    result = completed.result
    assert list(result["compare"]) == ["single, 1 thread", "single, 2 threads", "ddp"]
    for rates in result["compare"].values():
        assert len(rates) == single_process_baseline.COMPARE_ROUNDS
        assert min(rates) > 0
    expected = ["comparing the strategies in alternating rounds; with compare=false, a run ends here"]
    for number in (1, 2, 3):
        expected += [f"comparison, round {number} of 3: {name}" for name in result["compare"]]
    printed = [line for line in completed.stdout.splitlines() if line.startswith(("comparison, ", "comparing the "))]
    assert printed == expected
    speedup = fmean(result["compare"]["ddp"]) / fmean(result["compare"]["single, 1 thread"])
    assert result["efficiency"] == pytest.approx(speedup / 2)
    assert "GPUs found: 0; DataParallel runs the model unchanged" in completed.stdout
    figure = completed.folder.path / "compare.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.as_uri() in completed.stdout
    assert len(result["memory"]) == 2
    assert min(result["memory"].values()) > 50e6
    assert result["imbalance"]["memory"] >= 0
    assert result["imbalance"]["before_backward"] >= 0


def save_images(folder: Path, colour: str, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (8, 8), colour).save(folder / f"{number}.png")


def test_a_run_with_fewer_images_than_a_batch_trains_without_a_comparison(tmp_path: Path) -> None:
    for colour in ("red", "blue"):
        save_images(tmp_path / "train" / colour, colour, 10)
        save_images(tmp_path / "val" / colour, colour, 2)
    images = ("data.name=imagefolder", f"data.root={tmp_path}", f"data.cache={tmp_path / 'sets'}", "data.image_size=8")
    settings = ("launch.device=cpu", "batch=64", "epochs=2")
    completed = run_experiment("resnet_dataparallel", *images, *SMALL, *settings, runs=tmp_path / "runs")
    assert completed.result["state"] == "finished"
    assert completed.result["compare"] == {}
    assert len(completed.losses) == 2
    assert completed.result["last_batch"] == [10, 10]
    assert re.search(
        r"comparison +skipped: the training set has 20 samples, fewer than one batch of 64", completed.stdout
    )


@pytest.mark.slow
def test_a_sweep_runs_each_strategy(digits: Settings, tmp_path: Path) -> None:
    settings = ("launch.device=cpu", "sweep=true", "repeats=1", "steps=15")
    completed = run_experiment("resnet_dataparallel", *digits, *SMALL, *settings, runs=tmp_path)
    (folder,) = (tmp_path / "sweeps").iterdir()
    cells = read_json(folder / "sweep.json")["cells"]
    assert [cell["values"]["strategy"] for cell in cells] == ["single", "ddp"]
    assert (folder / "strategies.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"single  [\d,]+ samples/s, 1 run\n", completed.stdout)
    assert "data_parallel  " in completed.stdout


@pytest.mark.parametrize(
    "gpus, strategies, device",
    [(0, ["single", "ddp"], None), (1, ["single", "ddp"], "cpu"), (2, ["single", "data_parallel", "ddp"], None)],
)
def test_a_sweep_compares_on_one_kind_of_device(gpus: int, strategies: list[str], device: str | None) -> None:
    cells = list_points(Config(), gpus)
    assert [cell["strategy"] for cell in cells] == strategies
    assert {cell.get("launch.device") for cell in cells} == {device}


SETTINGS_OF_ONE_STRATEGY = [
    "processes_per_node=4",
    "launch.nodes=2",
    "sync_batchnorm=true",
    "zero1=true",
    "dropout=0.1",
    "recompute=blocks",
    "strategy=data_parallel functional=true",
]


@pytest.mark.parametrize("gpus", [0, 4])
@pytest.mark.parametrize("settings", SETTINGS_OF_ONE_STRATEGY)
def test_a_sweep_omits_settings_that_other_strategies_refuse(settings: str, gpus: int) -> None:
    arguments = [*settings.split(), "sweep=true", "repeats=1"]
    cfg = config.load_config(Config, arguments, {})
    points = experiment_sweep.plan_points(load_grid("resnet_dataparallel"), "resnet_dataparallel", cfg, arguments, gpus)
    point_settings = {point.values["strategy"]: point.settings for point in points}
    is_refused = "dropout" in settings or "recompute" in settings
    assert ("data_parallel" in point_settings) is (gpus > 0 and not is_refused)
    ddp = replace(cfg, strategy="ddp", compare=False, functional=False)
    ddp_point = cast(Config, point_settings["ddp"])
    assert replace(ddp_point, log=cfg.log, grid=cfg.grid) == ddp, "ddp keeps its settings"


def test_a_sweep_names_the_setting_without_which_data_parallel_would_be_compared() -> None:
    summary = summarize_runs(config.load_config(Config, ["dropout=0.1"], {}), 2, [])
    assert summary.lines["data_parallel"].endswith("to compare it, omit dropout=0.1")
    assert "GPUs found: 0" in summarize_runs(Config(), 0, []).lines["data_parallel"]


def build_small_resnet() -> networks.ResNet:
    return networks.ResNet("resnet18", (28, 28), 10, width=4)


def test_a_model_saved_by_a_wrapper_is_loaded() -> None:
    saved = build_small_resnet()
    model = build_small_resnet()
    wrapped = nn.DataParallel(saved).state_dict()
    for name in wrapped:
        assert name.startswith("module.")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert not all(torch.equal(tensor, wrapped[f"module.{name}"]) for name, tensor in tensors)
    state_dicts.load_tensors(tensors, wrapped)
    for name, tensor in tensors:
        assert torch.equal(tensor, saved.state_dict()[name])
    with pytest.raises(UserError, match=r"the checkpoint has no tensor conv1\.weight; it was saved"):
        state_dicts.load_tensors(tensors, nn.DataParallel(nn.Linear(2, 2)).state_dict())


def test_the_optimizer_state_of_a_wrapped_model_is_loaded() -> None:
    model = build_small_resnet()
    parameters = list(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = {f"module.{name}": {"momentum_buffer": torch.full_like(p, 3)} for name, p in parameters}
    state_dicts.load_optimizer_state(optimizer, parameters, saved)
    for parameter in model.parameters():
        assert (optimizer.state[parameter]["momentum_buffer"] == 3).all()
