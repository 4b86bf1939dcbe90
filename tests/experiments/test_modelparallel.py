"""resnet_modelparallel: settings, the measured split, devices, the report and the sweep."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image
from torch import nn

from common.config import config
from common.models import networks
from common.runs import provenance
from common.runs.folder import read_json
from common.system.errors import UserError
from common.system.seeds import derive_seed
from common.techniques.pipeline import model_split, partition, report, schedules, timeline_chart
from common.techniques.pipeline.schedules import Action, Span
from common.techniques.pipeline.single_process import SingleProcessPipeline
from configs.resnet_modelparallel import Config
from configs.sweeps import Average
from configs.sweeps.resnet_modelparallel import list_points, plot_times
from experiments import resnet_modelparallel
from tests.harness.commands.processes import FinishedRun, run_experiment
from tests.harness.commands.refusals import expect_refusal
from tests.harness.repository import ROOT

NAME = "resnet_modelparallel"
SMALL = ("width=4", "batch=16", "steps=4", "plot=false", "data.image_size=16", "data.samples=160", "launch.threads=1")


def load_settings(*settings: str) -> Config:
    return config.load_config(Config, settings, environ={})


def train(tmp_path: Path, *settings: str) -> FinishedRun:
    completed = run_experiment(NAME, *SMALL, f"data.cache={tmp_path / 'cache'}", *settings, runs=tmp_path / "runs")
    return completed


# ---- settings


MODES = [
    ("mode=single", 1, "naive own 1 1"),
    ("mode=single split_size=16 schedule=zero_bubble", 1, "naive own 1 4"),
    ("mode=naive", 2, "naive own 2 1"),
    ("mode=naive schedule=1f1b split_size=8", 2, "naive own 2 8"),
    ("mode=pipelined", 2, "gpipe own 2 4"),
    ("schedule=1f1b stages=4 stages_per_process=2", 2, "1f1b own 4 4"),
    ("schedule=zero_bubble stages=3", 3, "zero_bubble own 3 4"),
    ("schedule=1f1b engine=torch", 2, "1f1b torch 2 4"),
    ("devices=[cpu,cpu]", 1, "gpipe own 2 4"),
    ("devices=[cpu,cpu] mode=naive", 1, "naive own 2 1"),
    ("devices=[cuda:0,cuda:1] mode=single", 1, "naive own 1 1"),
]


@pytest.mark.parametrize("settings, processes, plan", MODES)
def test_a_mode_is_a_schedule_and_its_microbatches(settings: str, processes: int, plan: str) -> None:
    cfg = load_settings(*settings.split())
    pipeline = cfg.make_pipeline_config()
    assert cfg.processes == processes
    assert f"{pipeline.schedule} {pipeline.engine} {pipeline.stages} {pipeline.microbatches}" == plan


VECTORS = "model=toy data.name=vectors"
INVALID_SETTINGS = {
    "split_size=5": "split_size=5 ... 1, 2, 4, 8, 16, 32, 64",
    "split_size=65": "the 64 samples of a replica ... split_size=65",
    "schedule=dualpipev stages=4 stages_per_process=2 split_size=32": "at least 4 ... batch / replicas / split_size",
    "engine=torch schedule=1f1b stages=3 split_size=32": "use at least 3 ... batch / replicas / split_size",
    "split=[layer2_0] stages=3": "makes 2 stages ... split=[] to balance",
    "devices=[gpu,gpu]": "gpu is not a valid device ... [cuda:0,cuda:1]",
    "devices=[cpu]": "lists 1 devices for stages=2",
    "devices=[cpu,cpu] schedule=1f1b": "supports only schedule=gpipe ... devices=[]",
    "devices=[cpu,cpu] stages_per_process=2": "a single process on one host",
    "data.name=vectors": "needs images ... model=toy",
    f"{VECTORS} data.augment=crop": "data.augment=crop ... data.name=vectors has none ... omit data.augment",
    "channels_last=true width=8": "width=8 ... 1x1 convolutions ... width=16",
    "loss=mse": "loss=mse ... model=resnet18 ... use model=toy",
    "sweep=true split_sizes=[8,x]": "split_sizes=[8,x]",
    "sweep=true split_sizes=[]": "split_sizes=[]",
}


@pytest.mark.parametrize("settings, message", INVALID_SETTINGS.items())
def test_invalid_settings_are_refused_with_the_remedy(settings: str, message: str) -> None:
    with expect_refusal(message):
        load_settings(*settings.split())


DEVICES_BY_GPUS = [
    ("", 0, "auto"),
    ("", 1, "cuda:0 cuda:0"),
    ("", 2, "cuda:0 cuda:1"),
    ("stages=3", 2, "cuda:0 cuda:1 cuda:0"),
    ("mode=naive", 2, "cuda:0 cuda:1"),
    ("mode=single", 2, "auto"),
    ("schedule=1f1b", 2, "auto"),
    ("engine=torch", 2, "auto"),
    ("stages=4 stages_per_process=2", 2, "auto"),
    ("launch.nodes=2", 2, "auto"),
    ("replicas=2", 2, "auto"),
    ("launch.device=cpu", 2, "auto"),
    ("devices=[]", 2, ""),
]


@pytest.mark.parametrize("settings, gpus, devices", DEVICES_BY_GPUS)
def test_one_process_uses_all_visible_gpus(settings: str, gpus: int, devices: str) -> None:
    cfg = load_settings(*settings.split()).adapt_to_gpus(gpus)
    assert cfg.devices == devices.split()
    expected_processes = cfg.make_pipeline_config().processes * cfg.replicas
    if devices not in ("", "auto") or cfg.mode == "single":
        expected_processes = 1
    assert cfg.processes == expected_processes
    cfg.check()


def test_gpus_are_counted_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"]
    devices = [Path("/dev") / name for name in names]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: devices)
    monkeypatch.setattr(provenance, "read_package_version", lambda package: "2.15.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert provenance.count_visible_gpus() == 3
    counts = {"": 0, "1": 1, "0,1": 2, "-1": 0, "0,-1,1": 1, "0,,1": 1, " 0 , 1 ": 2, "GPU-a,GPU-b": 2, "0,1,2,3": 3}
    for mask, count in counts.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert provenance.count_visible_gpus() == count, mask
    monkeypatch.setattr(provenance, "read_package_version", lambda package: "2.15.0+cpu")
    assert provenance.count_visible_gpus() == 0, "a build of torch without CUDA uses no GPU"


def test_settings_that_do_not_fit_the_model_or_the_machine_are_refused(tmp_path: Path) -> None:
    cases = {
        "split=[layer9_0]": "layer9_0 cannot begin a stage",
        "weights=/nowhere.pt": "weights=/nowhere.pt: no such file",
        "devices=[cpu,cuda:7] memory_cap=500": "cuda:7 does not exist",
        "stages=3 model=toy data.name=vectors": "stages=3 exceeds the 2 layers",
    }
    for settings, message in cases.items():
        quick = (*SMALL, f"data.cache={tmp_path / 'cache'}", *settings.split())
        completed = run_experiment(NAME, *quick, runs=tmp_path / "runs", status=2)
        assert message in completed.stderr
        assert completed.stderr.count("\n") <= 2, completed.stderr


# ---- the smallest example: two layers, mean squared difference from random targets


def test_the_toy_learns_the_same_in_two_stages_as_in_one(tmp_path: Path) -> None:
    settings = ("model=toy", "data.name=vectors", "loss=mse", "dtype=float64", "steps=10", "optim.lr=0.1")
    pipelined = train(tmp_path / "pipelined", *settings, "mode=pipelined")
    single = train(tmp_path / "single", *settings, "mode=single")
    assert pipelined.losses == pytest.approx(single.losses, abs=1e-9, rel=0)
    assert pipelined.losses[-1] < 0.9 * pipelined.losses[0]


def test_the_loss_of_the_toy_is_the_squared_distance_from_random_targets() -> None:
    run = cast(Any, SimpleNamespace(outputs=5, train_set=SimpleNamespace(has_labels=True)))
    cfg = load_settings("model=toy", "data.name=vectors", "loss=mse")
    loss_function = resnet_modelparallel.build_loss(cfg, run)
    labels = torch.tensor([4, 0, 4])
    loss = loss_function(torch.zeros(3, 5), labels)

    generator = torch.Generator().manual_seed(derive_seed(0, "targets"))
    targets = torch.randn(5, 5, generator=generator)
    squares = targets.square()
    expected = squares[labels].mean()
    assert loss.item() == pytest.approx(expected.item())


# ---- where the model is split


def list_first_layers(completed: FinishedRun) -> list[str]:
    return [names[0] for names in completed.result["stages"]]


@pytest.mark.parametrize("engine", ["own", "torch"])
def test_a_stage_without_weights_is_refused(engine: str) -> None:
    model = networks.ResNet("resnet18", (3, 8, 8), 3, width=2)
    cfg = load_settings("stages=3", "split=[pool,fc]", f"engine={engine}")
    run = cast(Any, SimpleNamespace(training_cfg=cfg, load_first_inputs=lambda count: torch.zeros(count, 3, 8, 8)))
    with pytest.raises(UserError, match="the stage that starts at layer pool has no parameters"):
        model_split.split_model(cfg.make_pipeline_config(), model, run)


def make_repeated_layer() -> nn.Sequential:
    activation = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4), activation, nn.Linear(4, 3), activation)


def make_shared_parameter() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 192), nn.Linear(192, 192))
    model[2].weight = model[1].weight
    return model


UNSPLITTABLE_NETWORKS = [
    (make_repeated_layer, "the network uses a layer more than once; create a separate layer"),
    (make_shared_parameter, "layers of different stages share the parameter 2.weight; set split so that"),
]


@pytest.mark.parametrize("make_network, message", UNSPLITTABLE_NETWORKS)
def test_a_network_whose_stages_would_be_wrong_is_refused(
    make_network: Callable[[], nn.Sequential], message: str
) -> None:
    cfg = load_settings("stages=2", "split=[2]")
    run = cast(Any, SimpleNamespace(training_cfg=cfg, load_first_inputs=lambda count: torch.zeros(count, 3, 8, 8)))
    with pytest.raises(UserError, match=message):
        model_split.split_model(cfg.make_pipeline_config(), make_network(), run)


@pytest.mark.slow
def test_the_split_is_measured_once_and_stored_beside_the_config(tmp_path: Path) -> None:
    first = train(tmp_path, "stages=3")
    file = first.folder.path / "resolved.yaml"
    split = config.read_config_file(file)["split"]
    assert split == list_first_layers(first)[1:]
    assert len(split) == 2

    stored_lines = "".join(f"- {name}\n" for name in split)
    text = file.read_text()
    assert stored_lines in text
    file.write_text(text.replace(stored_lines, "- relu\n- pool\n"))  # no measurement chooses these layers
    config_file = first.folder.path / "config.yaml"
    repeated = run_experiment(NAME, "--config", str(config_file), runs=tmp_path / "again")
    assert list_first_layers(repeated) == ["conv1", "relu", "pool"]
    assert repeated.losses == first.losses, "losses do not depend on the split"


@pytest.mark.slow
def test_runs_of_equal_microbatches_have_the_same_measured_split(tmp_path: Path) -> None:
    settings = (f"data.cache={tmp_path / 'sets'}", "stages=3")
    first = train(tmp_path / "first", *settings)
    (file,) = (tmp_path / "sets/cuts").glob("*.json")
    content = read_json(file)
    assert content["split"] == config.read_settings(first.folder.path)["split"]

    changed_content = content | {"split": ["relu", "pool"]}  # no measurement chooses these layers
    file.write_text(json.dumps(changed_content))
    second = train(tmp_path / "second", *settings, "optim.lr=0.01")
    assert list_first_layers(second) == ["conv1", "relu", "pool"]

    train(tmp_path / "other", *settings, "split_size=8")
    assert len(list((tmp_path / "sets/cuts").glob("*.json"))) == 2

    file.write_text('{"split": 3, "key": {}}')
    train(tmp_path / "again", *settings)
    assert read_json(file)["key"] == content["key"], "a damaged file is replaced by a new measurement"


@pytest.mark.slow
def test_a_resume_with_other_settings_leaves_the_config_unchanged(tmp_path: Path) -> None:
    first = train(tmp_path, "checkpoint.every_steps=2")
    files = [first.folder.path / name for name in ("config.yaml", "resolved.yaml")]
    texts = [file.read_text() for file in files]
    folder = first.folder.path
    (folder / "result.json").unlink()
    run_experiment(NAME, "--resume", str(folder), "stages=3", "split=[]", runs=folder.parent)
    assert len(first.result["stages"]) == 3, "the result is that of the resumed run"
    assert [file.read_text() for file in files] == texts


# ---- one process with several devices


def split_small_resnet() -> list[nn.Sequential]:
    model = networks.ResNet("resnet18", (3, 16, 16), 10, width=4)
    return partition.split_into_stages(model, ["layer2_0", "layer3_0"])


def load_three_stage_settings(*settings: str) -> Config:
    return load_settings("stages=3", "batch=8", "split_size=2", "devices=[cpu,cpu,cpu]", *settings)


def build_pipeline(
    stages: list[nn.Sequential], cfg: Config, devices: list[str] | None = None, dtype: torch.dtype = torch.float32
) -> SingleProcessPipeline:
    return SingleProcessPipeline(
        stages,
        nn.functional.cross_entropy,
        devices or cfg.devices,
        size=cfg.batch_plan.microbatch,
        microbatches=cfg.batch_plan.microbatches,
        dtype=dtype,
        schedule=cfg.make_pipeline_config().schedule,
        pipelined=cfg.mode == "pipelined",
    )


def test_stages_are_placed_on_their_devices() -> None:
    """Tensors of the meta device have shapes and no values."""
    devices = ["cpu", "meta", "meta"]
    pipeline = build_pipeline(split_small_resnet(), load_three_stage_settings(), devices)
    for stage, kind in zip(pipeline.stages, devices, strict=True):
        for tensor in stage.state_dict().values():
            assert tensor.device.type == kind

    calls: list[tuple[int, str]] = []

    def record_calls(number: int, stage: nn.Module) -> None:
        def record_call(stage: nn.Module, inputs: tuple[torch.Tensor]) -> None:
            device = inputs[0].device
            calls.append((number, device.type))

        stage.register_forward_pre_hook(record_call)

    for number, stage in enumerate(pipeline.stages):
        record_calls(number, stage)
    for forward in (pipeline.forward_naive, pipeline.forward_pipelined):
        pipeline.tracer.begin_step()
        calls.clear()
        outputs = forward(torch.zeros(8, 3, 16, 16))
        assert outputs.shape == (8, 10)
        assert outputs.device.type == "meta"
        assert set(calls) == set(enumerate(devices))
    order = [number for number, _ in calls]
    assert order == [0, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 2], "the oldest microbatch comes first, and all stages work"


def test_two_stages_on_cpu_equal_the_unsplit_model() -> None:
    model = networks.Toy((10,), 5).double()
    unsplit = copy.deepcopy(model)
    cfg = load_settings("model=toy", "batch=20", "split_size=5", "devices=[cpu,cpu]")
    stages = partition.split_into_stages(model, ["net2"])
    pipeline = build_pipeline(stages, cfg, dtype=torch.float64)
    inputs = torch.randn(20, 10).double()
    labels = torch.randint(5, (20,))
    loss = pipeline.step(inputs, labels)
    expected = nn.functional.cross_entropy(unsplit(inputs), labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    for parameter, expected_parameter in zip(model.parameters(), unsplit.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected_parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["naive", "pipelined"])
def test_every_action_of_one_process_is_traced_once_and_in_order(mode: str) -> None:
    pipeline = build_pipeline(split_small_resnet(), load_three_stage_settings(f"mode={mode}"))
    images = torch.randn(8, 3, 16, 16)
    labels = torch.randint(10, (8,))
    for _ in range(2):
        pipeline.step(images, labels)
    pipeline.predict(images, 8)
    by_stage = pipeline.collect_spans()
    assert [len(steps) for steps in by_stage] == [2, 2, 2]

    spans: dict[Action, Span] = {}
    for steps in by_stage:
        spans |= {span.action: span for span in steps[1]}
    keys = itertools.product("FB", range(3), range(4))
    assert set(spans) == {Action(*key) for key in keys}
    for action, span in spans.items():
        assert span.end > span.start
        for dependency in schedules.find_dependencies(action, 3):
            assert spans[dependency].end <= span.start, f"{dependency} before {span.action}"
    ordered = sorted(spans.values(), key=lambda span: span.start)
    for span, following in itertools.pairwise(ordered):
        assert span.end <= following.start, "one process executes one action at a time"


# ---- report and plots


def test_the_report_contains_idle_time_and_memory_and_draws_a_step(tmp_path: Path) -> None:
    completed = train(tmp_path, "split_size=4", "plot=true")
    result = completed.result
    assert result["ideal_bubble"] == pytest.approx(1 / 5), "(p - 1) / (m + p - 1) with p = 2, m = 4"
    assert len(result["idle_share"]) == 2
    for share in result["idle_share"]:
        assert 0 < share < 1
    assert len(result["memory"]) == 2
    assert min(result["memory"].values()) > 50 * 2**20

    plot = completed.folder.path / "timeline.png"
    assert re.search(rf"^  timeline +{plot.as_uri()}$", completed.stdout, re.MULTILINE), completed.stdout
    title = "one step of resnet18, pipelined, batch 16, 2 ranks: gpipe (built-in engine), 2 stages, 4 microbatches"
    assert Image.open(plot).info["Title"] == title


def test_a_run_of_one_stage_has_no_timeline(tmp_path: Path) -> None:
    single = train(tmp_path / "single", "mode=single")
    assert single.result["ideal_bubble"] == 0
    assert not (single.folder.path / "timeline.png").exists()


def test_a_timeline_of_every_kind_of_action_is_drawn(tmp_path: Path) -> None:
    spans = []
    for microbatch in range(12):
        for position, kind in enumerate("FBIW"):
            action = Action(kind, 0, microbatch)
            start = microbatch + position / 4
            spans.append(Span(action, start, start + 0.2))
    plot = tmp_path / "timeline.png"
    timeline_chart.draw_timeline(plot, {"stage 0": spans, "stage 1": spans[:4]}, "title")
    assert plot.stat().st_size > 5000

    empty_report = report.PipelineReport(0.0, [], [], drawing=(tmp_path / "none.png", ""))
    assert empty_report.draw_median_step() == {}


@pytest.mark.parametrize("settings", ["mode=pipelined", "mode=single"])
def test_a_microbatch_with_a_single_value_per_channel_is_refused(settings: str, tmp_path: Path) -> None:
    small = (*SMALL, f"data.cache={tmp_path / 'cache'}", "data.image_size=8", "batch=4", "split_size=1")
    completed = run_experiment(NAME, *small, settings, runs=tmp_path / "runs", status=2)
    assert "error: BatchNorm requires more than one value per channel" in completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.mark.slow
def test_a_sweep_creates_runs_a_table_and_a_plot(tmp_path: Path) -> None:
    settings = (*SMALL, f"data.cache={tmp_path / 'cache'}", "sweep=true", "repeats=1", "split_sizes=[4,8]")
    completed = run_experiment(NAME, *settings, runs=tmp_path / "runs", timeout=240)
    (folder,) = (tmp_path / "runs/sweeps").iterdir()
    with open(folder / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == ["single", "naive", "pipelined", "pipelined"]
    assert [row["split_size"] for row in rows] == ["16", "16", "4", "8"]
    for row in rows:
        assert float(row["step_seconds"]) > 0

    plot = folder / "split_size.png"
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert plot.as_uri() in completed.stdout
    assert len(read_json(folder / "sweep.json")["cells"]) == 4
    assert len(list((tmp_path / "runs").glob(f"{NAME}*"))) == 4
    assert re.search(r"^ *single .*% +- +\d+$", completed.stdout, re.MULTILINE), "one stage has no idle share"
    printed = re.findall(r"^ *(naive|pipelined) +(\d+) ", completed.stdout, re.MULTILINE)
    assert printed == [("naive", "16"), ("pipelined", "4"), ("pipelined", "8")]


SWEEP_DEVICES = [
    ("", 0, None, False),
    ("", 1, None, True),  # all stages are on it, in one process
    ("schedule=1f1b", 1, "cpu", False),
    ("schedule=1f1b", 2, None, True),
    ("stages=3 engine=torch", 2, "cpu", False),
    ("replicas=2", 2, "cpu", False),
    ("replicas=2", 4, None, True),
    ("replicas=2 launch.nodes=2", 2, "cpu", False),  # a sweep starts all processes on this host
    ("devices=[cpu,cpu]", 2, "cpu", False),
    ("schedule=1f1b launch.device=cuda", 1, None, False),  # kept as set; the runs report the error
    ("schedule=1f1b launch.device=cpu", 1, None, False),
]


@pytest.mark.parametrize("settings, gpus, device, on_gpus", SWEEP_DEVICES)
def test_a_sweep_runs_on_one_kind_of_device(settings: str, gpus: int, device: str | None, on_gpus: bool) -> None:
    cfg = load_settings(*settings.split())
    cells = list_points(cfg, gpus)
    assert {cell.get("launch.device") for cell in cells} == {device}
    times = {("pipelined", 8): Average(1.0, 0.0, 1)}
    title = plot_times(cfg, gpus, times, {}).title
    assert ("single uses the threads of all" in title) is not on_gpus


IDEAL_SCHEDULES = [
    "schedule=1f1b",
    "schedule=interleaved_1f1b stages_per_process=2",
    "schedule=zbv stages_per_process=2",
]


@pytest.mark.parametrize("settings", IDEAL_SCHEDULES)
def test_an_ideal_pipeline_takes_as_long_as_the_simulated_schedule(settings: str) -> None:
    cfg = load_settings("stages=4", "batch=32", "split_size=4", *settings.split())
    pipeline = cfg.make_pipeline_config()
    plan = schedules.SCHEDULES[pipeline.schedule](pipeline.processes, pipeline.stages, pipeline.microbatches)
    spans = schedules.simulate_schedule(plan, pipeline.stages)
    work_seconds = sum(map(schedules.sum_span_durations, spans))
    times = {("naive", 32): Average(work_seconds, 0.0, 1), ("pipelined", 4): Average(9.0, 0.0, 1)}
    bubbles = {("pipelined", 4): Average(schedules.compute_bubble(spans), 0.0, 1)}
    (((size, milliseconds, _),),) = plot_times(cfg, 0, times, bubbles).computed.values()
    assert size == 4
    assert milliseconds == pytest.approx(1e3 * schedules.compute_makespan(spans))


def test_the_toy_learns_its_vectors(tmp_path: Path) -> None:
    settings = ("model=toy", "data.name=vectors", "data.samples=2000", "steps=200", "epochs=10", "optim.lr=0.1")
    completed = train(tmp_path, *settings, "plot=false")
    assert completed.result["test_accuracy"] > 0.7
    assert completed.result["stages"] == [["net1"], ["net2"]]


TOKEN_NETWORK = """from torch import nn


class Net(nn.Sequential):
    def __init__(self, shape, outputs):
        super().__init__(nn.Embedding(outputs, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs))
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["own", "torch"])
def test_a_custom_network_for_tokens_is_trained_as_a_pipeline(engine: str, tmp_path: Path) -> None:
    """The first stage gets integers, and the other stages get float tensors."""
    file = tmp_path / "net.py"
    file.write_text(TOKEN_NETWORK)
    text = ("data.name=text", f"data.root={ROOT}/common/training/loop.py", f"data.cache={tmp_path / 'sets'}")
    settings = (f"model={file}:Net", "data.context=8", f"engine={engine}", "batch=16", "steps=3", "optim.warmup=0")
    completed = run_experiment("mnist_pipeline", *text, *settings, "log.progress=none", runs=tmp_path / "runs")
    assert len(completed.losses) == 3
