"""Every mode, schedule and engine equals the unsplit ResNet-18 fed the same microbatches, in float64, to 1e-9:
losses, parameters, BatchNorm's statistics and counters, evaluation; trained and evaluated in turns.

The ResNet has 8 channels and images of 16 pixels, but for one case of each kind with all 64 channels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.cases import train_cases
from tests.harness.parity import expected
from tests.harness.reference import differences

NAME = "resnet_modelparallel"
CUTS = {2: "[layer3_0]", 3: "[layer2_0,layer3_1]", 4: "[layer2_0,layer3_0,layer4_0]"}
TORCH = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
WIDE = "width=64,data.samples=13,batch=4,steps=3"  # an epoch of three steps
SIZES = {2: "mode=single,split_size=2", 8: "mode=single,split_size=8"}


def cut(stages: int) -> str:
    return f"stages={stages},split={CUTS[stages]}"


def cases(processes: int) -> dict[str, list[str]]:
    """What as many processes train, in one launch each."""
    if processes == 1:
        single_process = ["mode=single", "mode=single,split_size=8"]
        devices = {count: f"devices=[{','.join(['cpu'] * count)}]" for count in (2, 3)}
        single_process += [
            f"mode={mode},{names},{cut(n)}" for n, names in devices.items() for mode in ("naive", "pipelined")
        ]
        return {"devices": [*single_process, f"mode=naive,split_size=8,{devices[2]},{cut(2)}"]}
    built_in = [f"mode=naive,{cut(processes)}", f"mode=naive,split_size=8,{cut(processes)}"]
    built_in += [f"schedule={name},{cut(processes)}" for name in ("gpipe", "1f1b")]
    library = [f"engine=torch,schedule={name},{cut(processes)}" for name in TORCH]
    if processes == 3:
        return {"built_in": built_in, "library": library}
    rings = [f"schedule={name},stages_per_process=2,{cut(4)}" for name in ("gpipe", "interleaved_1f1b", "zero_bubble")]
    others = [*rings, f"transport=network,{cut(2)}", "stages=2,split=[relu]", "stages=2,balance=time"]
    return {"built_in": built_in, "library": library, "others": others}


@pytest.mark.parametrize(("processes", "kind"), [(n, kind) for n in (1, 2, 3) for kind in cases(n)])
def test_every_mode_equals_the_unsplit_resnet_fed_the_same_microbatches(
    processes: int, kind: str, tmp_path: Path, cache: Path
) -> None:
    wanted = cases(processes)[kind]
    trained = train_cases("parity", tmp_path, cache, processes, wanted, NAME)
    wrong = {
        name: differences(result, expected(cache, NAME, SIZES[8 if "split_size=8" in name else 2]))
        for name, result in trained.items()
    }
    assert not {name: found for name, found in wrong.items() if found}
    assert list(trained) == wanted


def test_a_resnet_of_full_width_equals_the_unsplit_one(tmp_path: Path, cache: Path) -> None:
    kinds = ["schedule=gpipe", "engine=torch,schedule=1f1b"]
    trained = train_cases("parity", tmp_path, cache, 2, [f"{WIDE},{kind},{cut(2)}" for kind in kinds], NAME)
    right = expected(cache, NAME, f"{WIDE},{SIZES[2]}")
    assert right["state"]["fc.weight"].shape == (10, 512)
    assert len(right["losses"]) == 3
    wrong = {name: differences(result, right) for name, result in trained.items()}
    assert len(wrong) == 2
    assert not {name: found for name, found in wrong.items() if found}


def test_microbatches_are_another_training_of_a_resnet_and_the_check_sees_it(cache: Path) -> None:
    """BatchNorm's statistics are a microbatch's; counters count microbatches."""
    two, eight = (expected(cache, NAME, SIZES[size]) for size in (2, 8))
    assert two["state"]["bn1.num_batches_tracked"] == 40
    assert eight["state"]["bn1.num_batches_tracked"] == 10
    wrong = differences(two, eight)
    assert any("losses" in settings for settings in wrong)
    assert any("running_var" in settings for settings in wrong)
