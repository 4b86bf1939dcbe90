"""Division of blocks into stages, and the memory of the microbatches that a schedule has in flight."""

from __future__ import annotations

from common.models.gpt import GPT
from common.techniques.parallel_layout import activation_formulas, stage_formulas
from common.techniques.parallel_layout.model_shape import Layers, Shape
from common.techniques.parallel_layout.pipeline_model import choose_stage_starts
from common.techniques.parallel_layout.stage_formulas import RankStages
from common.techniques.pipeline.api import make_schedule
from configs.layout import Layout
from configs.pipeline import PipelineConfig

MICROBATCHES = 6
SHAPE = Shape(
    width=8,
    layers=4,
    heads=2,
    key_value_heads=2,
    hidden=16,
    is_gated=True,
    vocabulary=32,
    context=4,
    samples=3,
    microbatches=MICROBATCHES,
    dropout=False,
    element_bytes=4,
)
BLOCK = Layers(1, has_embedding=False, has_head=False)


def list_starts(layers: int, vocabulary: int, stages: int) -> list[str]:
    model = GPT(16, vocabulary, width=32, layers=layers, heads=4)
    return choose_stage_starts(model, stages)


def test_stages_have_equal_numbers_of_blocks_if_the_output_layer_is_small() -> None:
    assert list_starts(4, 16, 2) == ["block2"]
    assert list_starts(6, 16, 3) == ["block2", "block4"]


def test_the_last_stage_has_fewer_blocks_if_the_output_layer_is_large() -> None:
    block_weights = 4 * 32**2 + 3 * 32 * 85  # attention and feed-forward
    large_vocabulary = 2 * block_weights // 32
    starts = list_starts(6, large_vocabulary, 2)
    assert starts == ["block4"]


def predict_peak(schedule: str, rank: int) -> int:
    """Return the memory of in-flight microbatches of one of four ranks, as a number of microbatches."""
    settings = PipelineConfig(schedule=schedule, stages=4, microbatches=MICROBATCHES)
    actions = make_schedule(settings)[rank]
    stages = RankStages({rank: BLOCK}, actions, boundary_messages=0, copied={}, sends_table=False)
    peak = stage_formulas.predict_activations_in_flight(SHAPE, Layout(), stages)["activations"]
    size = activation_formulas.predict_activation_bytes(SHAPE, Layout(), BLOCK)
    assert peak % size == 0
    return peak // size


def list_peaks(schedule: str) -> str:
    """Return the numbers of microbatches of all ranks as text."""
    peaks = [predict_peak(schedule, rank) for rank in range(4)]
    return " ".join(map(str, peaks))


def test_the_schedule_determines_the_microbatches_in_flight() -> None:
    assert list_peaks("naive") == "1 1 1 1"
    assert list_peaks("gpipe") == "6 6 6 6"
    assert list_peaks("1f1b") == "4 3 2 1"
    assert list_peaks("zero_bubble") == "4 4 4 4", "the last ranks postpone the gradients of weights"


def test_the_parts_of_a_model_need_the_memory_of_the_model() -> None:
    first = Layers(1, has_head=False)
    last = Layers(1, has_embedding=False)
    parts = 0
    for layers in (first, BLOCK, BLOCK, last):
        parts += activation_formulas.predict_activation_bytes(SHAPE, Layout(), layers)
    assert parts == activation_formulas.predict_activation_bytes(SHAPE, Layout())
