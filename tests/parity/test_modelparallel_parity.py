"""Every mode, schedule and engine equals the unsplit ResNet-18 with the same microbatches, in float64, to 1e-9.

Losses, parameters, BatchNorm statistics and counters, and scores are compared; training and evaluation alternate.
The ResNet has 8 channels and images of 16 pixels, except for one case of each kind with all 64 channels.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.harness.environment.randomness import draw_cases
from tests.harness.parity.driver import train_cases
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import list_differences, list_loss_differences
from tests.harness.parity.stage_cases import RESNET

CUTS = {2: "[layer3_0]", 3: "[layer2_0,layer3_1]", 4: "[layer2_0,layer3_0,layer4_0]"}
ONE_STAGE_PER_RANK = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
TWO_STAGES_PER_RANK = ("interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
WIDE = "width=64,data.samples=13,batch=4,steps=3"  # an epoch of three steps
SIZES = {2: "mode=single,split_size=2", 8: "mode=single,split_size=8"}


def cut(stages: int) -> str:
    return f"stages={stages},split={CUTS[stages]}"


def cases(processes: int) -> dict[str, list[str]]:
    """Return the cases of a number of processes. Each kind is trained in one launch."""
    if processes == 1:
        single_process = ["mode=single", "mode=single,split_size=8"]
        for count in (2, 3):
            devices = f"devices=[{','.join(['cpu'] * count)}],{cut(count)}"
            single_process += [f"mode=naive,{devices}", f"mode=pipelined,{devices}"]
        single_process.append(f"mode=naive,split_size=8,devices=[cpu,cpu],{cut(2)}")
        return {"devices": single_process}
    built_in = [f"mode=naive,{cut(processes)}", f"mode=naive,split_size=8,{cut(processes)}"]
    built_in += [f"schedule={name},{cut(processes)}" for name in ("gpipe", "1f1b", "zero_bubble")]
    library = [f"engine=torch,schedule={name},{cut(processes)}" for name in ONE_STAGE_PER_RANK]
    if processes == 3:
        return {"built_in": built_in, "library": library}
    rings = [f"schedule=gpipe,stages_per_process=2,{cut(4)}"]
    for engine, name in itertools.product(("own", "torch"), TWO_STAGES_PER_RANK):
        rings.append(f"engine={engine},schedule={name},stages_per_process=2,{cut(4)}")
    two_stages = [f"transport=network,{cut(2)}", "stages=2,split=[relu]", "stages=2,balance=time"]
    two_stages += [f"recompute=blocks,schedule=1f1b,{cut(2)}", f"recompute=selective,engine=torch,{cut(2)}"]
    return {"built_in": built_in, "library": library, "others": [*rings, *two_stages]}


LAUNCHES: list[tuple[int, str]] = []
for process_count in (1, 2, 3):
    LAUNCHES += [(process_count, kind) for kind in cases(process_count)]


@pytest.mark.parametrize(("processes", "kind"), draw_cases("modes", LAUNCHES, 2))
def test_every_mode_equals_the_unsplit_resnet_fed_the_same_microbatches(
    processes: int, kind: str, tmp_path: Path, cache: Path
) -> None:
    chosen_cases = cases(processes)[kind]
    outcomes = train_cases(RESNET, tmp_path, cache, processes, chosen_cases)
    assert list(outcomes) == chosen_cases
    for case, outcome in outcomes.items():
        unsplit = SIZES[8] if "split_size=8" in case else SIZES[2]
        reference_run = run_reference(RESNET, cache, unsplit)
        assert list_differences(outcome, reference_run) == [], case


@pytest.mark.drawn
def test_a_resnet_of_full_width_equals_the_unsplit_one(tmp_path: Path, cache: Path) -> None:
    wide_cases = [f"{WIDE},schedule=gpipe,{cut(2)}", f"{WIDE},engine=torch,schedule=1f1b,{cut(2)}"]
    outcomes = train_cases(RESNET, tmp_path, cache, 2, wide_cases)
    assert list(outcomes) == wide_cases
    unsplit = run_reference(RESNET, cache, f"{WIDE},{SIZES[2]}")
    assert unsplit["state"]["fc.weight"].shape == (10, 512)
    assert len(unsplit["losses"]) == 3
    for case, outcome in outcomes.items():
        assert list_differences(outcome, unsplit) == [], case


def test_the_check_sees_that_microbatches_change_the_training_of_a_resnet(cache: Path) -> None:
    """BatchNorm computes the statistics of a microbatch, and its counters count microbatches."""
    two = run_reference(RESNET, cache, SIZES[2])
    eight = run_reference(RESNET, cache, SIZES[8])
    assert two["state"]["bn1.num_batches_tracked"] == 40
    assert eight["state"]["bn1.num_batches_tracked"] == 10
    assert list_loss_differences(two, eight)
    assert any("running_var" in difference for difference in list_differences(two, eight))
