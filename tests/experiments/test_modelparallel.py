"""resnet_modelparallel beyond what every experiment must do: settings, the measured cut, devices, report, sweep."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import re
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
from common.system.errors import UserError
from common.system.seeds import derive_seed
from common.techniques.pipeline import model_split, partition, report, schedules
from common.techniques.pipeline.schedules import Action, Span
from common.techniques.pipeline.single_process import SingleProcessPipeline
from configs.resnet_modelparallel import Config
from configs.sweeps import Average
from configs.sweeps.resnet_modelparallel import list_points, plot_times
from experiments import resnet_modelparallel
from tests.harness.processes import Done, run

NAME = "resnet_modelparallel"
SMALL = ("width=4", "batch=16", "steps=4", "plot=false", "data.image_size=16", "data.samples=160", "launch.threads=1")


def settings(*words: str) -> Config:
    return config.load_config(Config, words, environ={})


def train(tmp_path: Path, *words: str) -> Done:
    done = run(NAME, *SMALL, f"data.cache={tmp_path / 'cache'}", *words, runs=tmp_path / "runs")
    assert done.status == 0, done.err
    return done


# ---- settings


@pytest.mark.parametrize(
    ("words", "processes", "plan"),
    [
        (["mode=single"], 1, ("naive", "own", 1, 1)),
        (["mode=single", "split_size=16", "schedule=zero_bubble"], 1, ("naive", "own", 1, 4)),
        (["mode=naive"], 2, ("naive", "own", 2, 1)),
        (["mode=naive", "schedule=1f1b", "split_size=8"], 2, ("naive", "own", 2, 8)),
        (["mode=pipelined"], 2, ("gpipe", "own", 2, 4)),
        (["schedule=1f1b", "stages=4", "stages_per_process=2"], 2, ("1f1b", "own", 4, 4)),
        (["schedule=zero_bubble", "stages=3"], 3, ("zero_bubble", "torch", 3, 4)),
        (["schedule=1f1b", "engine=torch"], 2, ("1f1b", "torch", 2, 4)),
        (["devices=[cpu,cpu]"], 1, ("gpipe", "own", 2, 4)),
        (["devices=[cpu,cpu]", "mode=naive"], 1, ("naive", "own", 2, 1)),
        (["devices=[cuda:0,cuda:1]", "mode=single"], 1, ("naive", "own", 1, 1)),
    ],
)
def test_a_mode_is_a_schedule_and_its_microbatches(words: list[str], processes: int, plan: tuple[Any, ...]) -> None:
    cfg = settings(*words)
    found = cfg.make_pipeline_config()
    assert cfg.processes == processes
    assert (found.schedule, found.engine, found.stages, found.microbatches) == plan


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["split_size=5"], ["split_size=5", "1, 2, 4, 8, 16, 32, 64"]),
        (["split_size=65"], ["batch=64", "split_size=65"]),
        (["engine=own", "schedule=zero_bubble"], ["needs engine=torch"]),
        (["engine=torch", "schedule=1f1b", "stages=3", "split_size=32"], ["at least as many", "batch / split_size"]),
        (["split=[layer2_0]", "stages=3"], ["makes 2 stages", "split=[] to balance"]),
        (["devices=[gpu,gpu]"], ["gpu is not a valid device", "[cuda:0,cuda:1]"]),
        (["devices=[cpu]"], ["lists 1 devices for stages=2"]),
        (["devices=[cpu,cpu]", "schedule=1f1b"], ["supports only schedule=gpipe", "devices=[]"]),
        (["devices=[cpu,cpu]", "stages_per_process=2"], ["a single process on one host"]),
        (["data.name=vectors"], ["the model needs images", "model=toy"]),
        (
            ["model=toy", "data.name=vectors", "data.augment=crop"],
            ["data.augment=crop", "data.name=vectors has none", "omit data.augment"],
        ),
        (["channels_last=true", "width=8"], ["width=8", "1x1 convolutions", "width=16"]),
        (["loss=mse"], ["loss=mse", "model=resnet18", "use model=toy"]),
        (["sweep=true", "split_sizes=[8,x]"], ["split_sizes=[8,x]"]),
        (["sweep=true", "split_sizes=[]"], ["split_sizes=[]"]),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_remedy(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        settings(*words)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("words", "gpus", "devices"),
    [
        ([], 0, ["auto"]),
        ([], 1, ["cuda:0", "cuda:0"]),
        ([], 2, ["cuda:0", "cuda:1"]),
        (["stages=3"], 2, ["cuda:0", "cuda:1", "cuda:0"]),
        (["mode=naive"], 2, ["cuda:0", "cuda:1"]),
        (["mode=single"], 2, ["auto"]),
        (["schedule=1f1b"], 2, ["auto"]),
        (["engine=torch"], 2, ["auto"]),
        (["stages=4", "stages_per_process=2"], 2, ["auto"]),
        (["launch.nodes=2"], 2, ["auto"]),
        (["replicas=2"], 2, ["auto"]),
        (["launch.device=cpu"], 2, ["auto"]),
        (["devices=[]"], 2, []),
    ],
)
def test_one_process_takes_the_gpus_that_it_sees(words: list[str], gpus: int, devices: list[str]) -> None:
    cfg = settings(*words).adapt_to_gpus(gpus)
    assert cfg.devices == devices
    alone = devices not in ([], ["auto"]) or cfg.mode == "single"
    assert cfg.processes == (1 if alone else cfg.make_pipeline_config().processes * cfg.replicas)
    cfg.check()


def test_gpus_are_counted_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/dev") / name for name in names])
    monkeypatch.setattr(provenance, "read_package_version", lambda package: "2.15.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert provenance.count_visible_gpus() == 3
    masks = {"": 0, "1": 1, "0,1": 2, "-1": 0, "0,-1,1": 1, "0,,1": 1, " 0 , 1 ": 2, "GPU-a,GPU-b": 2, "0,1,2,3": 3}
    for mask, count in masks.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert provenance.count_visible_gpus() == count, mask
    monkeypatch.setattr(provenance, "read_package_version", lambda package: "2.15.0+cpu")
    assert provenance.count_visible_gpus() == 0, "a torch without CUDA sees none"


def test_what_does_not_fit_model_or_machine_is_told(tmp_path: Path) -> None:
    cases = {
        "split=[layer9_0]": "layer9_0 cannot begin a stage",
        "weights=/nowhere.pt": "weights=/nowhere.pt: no such file",
        "devices=[cpu,cuda:7] memory_cap=500": "cuda:7 does not exist",
        "stages=3 model=toy data.name=vectors": "stages=3 exceeds the 2 layers",
    }
    for word, words in cases.items():
        quick = (*SMALL, f"data.cache={tmp_path / 'cache'}", *word.split())
        done = run(NAME, *quick, runs=tmp_path / "runs")
        assert done.status == 2 and words in done.err and done.err.count("\n") <= 2, done.err


# ---- the smallest example: two layers, mean squared difference from random targets


def test_the_toy_learns_random_targets_in_two_stages_as_in_one(tmp_path: Path) -> None:
    words = ("model=toy", "data.name=vectors", "loss=mse", "dtype=float64", "steps=10", "optim.lr=0.1")
    split, single = (train(tmp_path / mode, *words, f"mode={mode}") for mode in ("pipelined", "single"))
    assert split.losses == pytest.approx(single.losses, abs=1e-9, rel=0)
    assert split.losses[-1] < 0.9 * split.losses[0]
    run = cast(Any, SimpleNamespace(classes=5))
    outputs, classes = torch.zeros(3, 5), torch.tensor([4, 0, 4])
    targets = torch.randn(5, 5, generator=torch.Generator().manual_seed(derive_seed(0, "targets")))
    found = resnet_modelparallel.build_loss(settings(*words), run)(outputs, classes)
    assert float(found) == pytest.approx(float((2 * targets[4].square().sum() + targets[0].square().sum()) / 15))


# ---- where the model is cut


@pytest.mark.parametrize("engine", ["own", "torch"])
def test_a_stage_without_weights_is_refused(engine: str) -> None:
    model = networks.ResNet("resnet18", (3, 8, 8), 3, width=2)
    cfg = settings("stages=3", "split=[pool,fc]", f"engine={engine}")
    run = cast(Any, SimpleNamespace(training_cfg=cfg, sample_shape=(3, 8, 8)))
    with pytest.raises(UserError, match="the stage that starts at layer pool has no trainable parameters"):
        model_split.split_model(cfg.make_pipeline_config(), model, run)


def test_the_cut_is_measured_once_and_stands_beside_the_configuration(tmp_path: Path) -> None:
    done = train(tmp_path, "stages=3")
    file = done.folder.path / "resolved.yaml"
    cut = config.read_config_file(file)["split"]
    assert cut == [names[0] for names in done.result["stages"][1:]] and len(cut) == 2
    lines, other = ("".join(f"- {name}\n" for name in names) for names in (cut, ["relu", "pool"]))
    text = file.read_text()
    assert lines in text
    file.write_text(text.replace(lines, other))  # where nobody would cut who measures
    again = run(NAME, "--config", str(done.folder.path / "config.yaml"), runs=tmp_path / "again")
    assert again.status == 0, again.err
    assert [names[0] for names in again.result["stages"]] == ["conv1", "relu", "pool"]
    assert again.losses == done.losses, "the same arithmetic wherever the cut is"


def test_runs_of_equal_microbatches_have_the_same_measured_cut(tmp_path: Path) -> None:
    sets = (f"data.cache={tmp_path / 'sets'}", "stages=3")
    first = train(tmp_path / "first", *sets)
    assert first.status == 0, first.err
    (known,) = (tmp_path / "sets" / "cuts").glob("*.json")
    content = json.loads(known.read_text())
    assert content["split"] == config.read_settings(first.folder.path)["split"]
    known.write_text(json.dumps(content | {"split": ["relu", "pool"]}))  # where nobody would cut who measures
    second = train(tmp_path / "second", *sets, "optim.lr=0.01")
    assert [names[0] for names in second.result["stages"]] == ["conv1", "relu", "pool"]
    other = train(tmp_path / "other", *sets, "split_size=8")
    assert other.status == 0, other.err
    assert len(list((tmp_path / "sets" / "cuts").glob("*.json"))) == 2
    known.write_text('{"split": 3, "key": {}}')
    train(tmp_path / "again", *sets)
    assert json.loads(known.read_text())["key"] == content["key"], "a damaged file is measured anew"


def test_a_start_with_other_settings_leaves_the_configuration_alone(tmp_path: Path) -> None:
    done = train(tmp_path, "checkpoint.every_steps=2")
    files = [done.folder.path / name for name in ("config.yaml", "resolved.yaml")]
    texts = [file.read_text() for file in files]
    (done.folder.path / "result.json").unlink()
    again = run(NAME, "--resume", str(done.folder.path), "stages=3", "split=[]", runs=tmp_path / "runs")
    assert again.status == 0, again.err
    assert len(done.result["stages"]) == 3 and [file.read_text() for file in files] == texts


# ---- one process with several devices


def in_one_process(
    stages: list[nn.Sequential], cfg: Config, devices: list[str] | None = None, dtype: torch.dtype = torch.float32
) -> SingleProcessPipeline:
    plan, schedule = cfg.batch_plan, cfg.make_pipeline_config().schedule
    sizes: Any = {"size": plan.microbatch, "microbatches": plan.microbatches, "dtype": dtype}
    how: Any = {"schedule": schedule, "pipelined": cfg.mode == "pipelined"}
    return SingleProcessPipeline(stages, nn.functional.cross_entropy, devices or cfg.devices, **sizes, **how)


def test_stages_sit_on_their_devices() -> None:
    """The meta device knows shapes and places without computing."""
    parts = partition.split_into_stages(networks.ResNet("resnet18", (3, 16, 16), 10, width=4), ["layer2_0", "layer3_0"])
    cfg = settings("stages=3", "batch=8", "split_size=2", "devices=[cpu,cpu,cpu]")
    placed = in_one_process(parts, cfg, ["cpu", "meta", "meta"])
    kinds = [{value.device.type for value in part.state_dict().values()} for part in placed.stages]
    assert kinds == [{"cpu"}, {"meta"}, {"meta"}]
    seen: list[tuple[int, str]] = []
    for number, part in enumerate(placed.stages):
        part.register_forward_pre_hook(lambda _, given, number=number: seen.append((number, given[0].device.type)))
    for forward in (placed.forward_naive, placed.forward_pipelined):
        placed.tracer.begin_step()
        seen.clear()
        out = forward(torch.zeros(8, 3, 16, 16))
        assert out.shape == (8, 10) and out.device.type == "meta"
        assert set(seen) == {(0, "cpu"), (1, "meta"), (2, "meta")}
    order = [number for number, _ in seen]
    assert order == [0, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 2], "the oldest microbatch goes first, and all stages work"


def test_both_devices_cpu_equal_the_model_in_one_piece() -> None:
    model = networks.Toy((10,), 5).double()
    twin = copy.deepcopy(model)
    cfg = settings("model=toy", "batch=20", "split_size=5", "devices=[cpu,cpu]")
    pipe = in_one_process(partition.split_into_stages(model, ["net2"]), cfg, dtype=torch.float64)
    x, y = torch.randn(20, 10).double(), torch.randint(5, (20,))
    loss = pipe.step(x, y)
    expected = nn.functional.cross_entropy(twin(x), y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    for mine, own in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, own.grad, rtol=0, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["naive", "pipelined"])
def test_every_action_of_one_process_is_stamped_once_and_in_order(mode: str) -> None:
    parts = partition.split_into_stages(networks.ResNet("resnet18", (3, 16, 16), 10, width=4), ["layer2_0", "layer3_0"])
    cfg = settings("stages=3", "batch=8", "split_size=2", "devices=[cpu,cpu,cpu]", f"mode={mode}")
    pipe = in_one_process(parts, cfg)
    for _ in range(2):
        pipe.step(torch.randn(8, 3, 16, 16), torch.randint(10, (8,)))
    pipe.predict(torch.randn(8, 3, 16, 16), 8)
    by_stage = pipe.collect_spans()
    assert [len(steps) for steps in by_stage] == [2, 2, 2]
    spans = {span.action: span for steps in by_stage for span in steps[1]}
    assert set(spans) == {Action(kind, s, m) for kind in "FB" for s in range(3) for m in range(4)}
    for (kind, stage, m), span in spans.items():
        assert span.end > span.start
        for need in schedules.find_dependencies(Action(kind, stage, m), 3):
            assert spans[need].end <= span.start, f"{need} before {span.action}"
    busy = sorted(spans.values(), key=lambda span: span.start)
    assert all(a.end <= b.start for a, b in itertools.pairwise(busy)), "one processor does one thing at a time"


# ---- report and plots


def test_the_report_tells_of_time_idleness_and_memory_and_draws_a_step(tmp_path: Path) -> None:
    done = train(tmp_path, "split_size=4", "plot=true")
    result, plot = done.result, done.folder.path / "timeline.png"
    assert result["ideal_bubble"] == pytest.approx(1 / 5), "(p - 1) / (m + p - 1) with p = 2, m = 4"
    assert len(result["idle_share"]) == 2 and all(0 < share < 1 for share in result["idle_share"])
    assert all(held > 50 * 2**20 for held in result["memory"].values()) and len(result["memory"]) == 2
    assert re.search(rf"^  timeline +{plot.as_uri()}$", done.out, re.MULTILINE), done.out
    title = "one step of resnet18, pipelined, batch 16, 2 ranks: gpipe (built-in engine), 2 stages, 4 microbatches"
    assert Image.open(plot).info["Title"] == title
    single = train(tmp_path / "single", "mode=single")
    assert single.result["ideal_bubble"] == 0 and not (single.folder.path / "timeline.png").exists()


def test_a_timeline_of_every_kind_of_work_is_drawn(tmp_path: Path) -> None:
    spans = [Span(Action(kind, 0, m), m + i / 4, m + i / 4 + 0.2) for m in range(12) for i, kind in enumerate("FBIW")]
    report.draw_timeline(tmp_path / "timeline.png", {"stage 0": spans, "stage 1": spans[:4]}, "title")
    assert (tmp_path / "timeline.png").stat().st_size > 5000
    assert report.PipelineReport(0.0, [], [], drawing=(tmp_path / "none.png", "")).draw_median_step() == {}


def test_a_sweep_leaves_runs_a_table_and_a_plot(tmp_path: Path) -> None:
    words = ("sweep=true", "repeats=1", "split_sizes=[4,8]")
    done = run(NAME, *SMALL, f"data.cache={tmp_path / 'cache'}", *words, runs=tmp_path / "runs", timeout=240)
    assert done.status == 0, done.err
    (folder,) = (tmp_path / "runs" / "sweeps").iterdir()
    with open(folder / "table.csv") as file:
        rows = list(csv.DictReader(file))
    modes = [(row["mode"], int(row["split_size"])) for row in rows]
    assert modes == [("single", 16), ("naive", 16), ("pipelined", 4), ("pipelined", 8)]
    assert all(float(row["step_seconds"]) > 0 for row in rows)
    assert (folder / "split_size.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "split_size.png").as_uri() in done.out
    assert len(json.loads((folder / "sweep.json").read_text())["cells"]) == 4
    assert len([path for path in (tmp_path / "runs").iterdir() if path.name.startswith(NAME)]) == 4
    shown = [line.split()[:2] for line in done.out.splitlines() if line.split()[:1] in (["naive"], ["pipelined"])]
    assert shown == [["naive", "16"], ["pipelined", "4"], ["pipelined", "8"]]


@pytest.mark.parametrize(
    ("words", "gpus", "device", "on_gpus"),
    [
        ([], 0, None, False),
        ([], 1, None, True),  # all stages are on it, in one process
        (["schedule=1f1b"], 1, "cpu", False),
        (["schedule=1f1b"], 2, None, True),
        (["stages=3", "engine=torch"], 2, "cpu", False),
        (["replicas=2"], 2, "cpu", False),
        (["replicas=2"], 4, None, True),
        (["replicas=2", "launch.nodes=2"], 2, "cpu", False),  # a sweep starts all processes here
        (["devices=[cpu,cpu]"], 2, "cpu", False),
        (["schedule=1f1b", "launch.device=cuda"], 1, None, False),  # as it was asked for: it will be told
        (["schedule=1f1b", "launch.device=cpu"], 1, None, False),
    ],
)
def test_a_sweep_runs_on_one_kind_of_device(words: list[str], gpus: int, device: str | None, on_gpus: bool) -> None:
    cfg = settings(*words)
    assert {cell.get("launch.device") for cell in list_points(cfg, gpus)} == {device}
    title = plot_times(cfg, gpus, {("pipelined", 8): Average(1.0, 0.0, 1)}).title
    assert ("single uses the threads of all" in title) is not on_gpus


def test_the_toy_learns_its_vectors(tmp_path: Path) -> None:
    words = ("model=toy", "data.name=vectors", "data.samples=2000", "steps=200", "epochs=10", "optim.lr=0.1")
    done = train(tmp_path, *words, "plot=false")
    assert done.result["test_accuracy"] > 0.7 and done.result["stages"] == [["net1"], ["net2"]]
