"""Cases of backend_calls.py: reductions of every dtype, size and algorithm."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.backend import setup, torch_registration
from common.backend.algorithms import ALGORITHM_NAMES
from common.backend.arguments import COMBINE_FUNCTIONS, list_reducible_dtypes
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from tests.harness.ranks.backend_tensors import (
    HALF_DTYPES,
    SETTINGS,
    SIZES,
    assert_equal_bits,
    compute_reduction,
    draw_inputs,
    make_group,
)


def list_reductions() -> list[tuple[Any, torch.dtype]]:
    """Return every operation with every dtype that it supports."""
    reductions = []
    for op in COMBINE_FUNCTIONS:
        reductions += [(op, dtype) for dtype in list_reducible_dtypes(op)]
    return reductions


def assert_reduced(reduced: Tensor, expected: Tensor, label: object) -> None:
    """Compare exactly, but allow bfloat16 and float16 one unit in the last place, because products are rounded."""
    if reduced.dtype in HALF_DTYPES:
        torch.testing.assert_close(reduced, expected, rtol=torch.finfo(reduced.dtype).eps, atol=0, msg=str(label))
    else:
        assert torch.equal(reduced, expected), label


def check_reductions(world: World) -> None:
    """all_reduce, reduce and reduce_scatter of every dtype and size."""
    for op, dtype in list_reductions():
        for length in SIZES if dtype in (torch.float32, torch.bfloat16) else (1, 1000):
            check_reduce(world, op, dtype, length)
            check_reduce_scatter(world, op, dtype, length)


def check_reduce(world: World, op: Any, dtype: torch.dtype, length: int) -> None:
    inputs = draw_inputs((length,), dtype)
    expected = compute_reduction(inputs, op)
    reduced = inputs[world.rank].clone()
    dist.all_reduce(reduced, op)
    assert_reduced(reduced, expected, ("all_reduce", op, dtype, length))

    root = world.size - 1
    reduced = inputs[world.rank].clone()
    dist.reduce(reduced, root, op)
    expected_on_rank = expected if world.rank == root else inputs[world.rank]
    assert_reduced(reduced, expected_on_rank, ("reduce", op, dtype, length))


def check_reduce_scatter(world: World, op: Any, dtype: torch.dtype, length: int) -> None:
    blocks = draw_inputs((world.size, length), dtype)
    expected = compute_reduction(blocks, op)[world.rank]
    reduced = torch.empty(length, dtype=dtype)
    dist.reduce_scatter(reduced, list(blocks[world.rank]), op)
    assert_reduced(reduced, expected, ("reduce_scatter", op, dtype, length))
    dist.reduce_scatter_tensor(reduced.zero_(), blocks[world.rank], op)
    assert_reduced(reduced, expected, ("reduce_scatter_tensor", op, dtype, length))


def check_half_precision_sums(world: World) -> None:
    """Sums that float32 represents exactly are rounded once, and not at each addition."""
    for dtype in HALF_DTYPES:
        inputs = [torch.full((50,), 1.0 + rank / 64, dtype=dtype) for rank in range(world.size)]
        inputs[0] += 96
        exact = torch.stack(inputs).double().sum(0).to(dtype)
        reduced = inputs[world.rank].clone()
        dist.all_reduce(reduced)
        assert torch.equal(reduced, exact), dtype
        scattered = torch.empty(50, dtype=dtype)
        dist.reduce_scatter(scattered, [inputs[world.rank]] * world.size)
        assert torch.equal(scattered, exact), dtype


def check_reproducible_bits(world: World) -> None:
    """Sums of every algorithm and dtype have equal bits on all ranks and when repeated, also with NaN and inf."""
    ranks = list(range(world.size))
    gloo = make_group(ranks, backend="gloo")
    rank_info = RankInfo(size=world.size, local_size=world.size)
    transport = setup.make_transport_settings(rank_info, SETTINGS, world.hosts, "lo")
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
    for name in ALGORITHM_NAMES:
        torch_registration.register_backend(dataclasses.replace(transport, run="bits", algorithm=name))
        group = make_group(ranks, backend="builtin")
        for dtype, length in itertools.product(dtypes, (1, 5, 30_001)):
            label = (name, dtype, length)
            tensor = draw_with_nan(world.rank, dtype, length)
            first_sum = tensor.clone()
            dist.all_reduce(first_sum, group=group)
            second_sum = tensor.clone()
            dist.all_reduce(second_sum, group=group)
            assert_equal_bits([second_sum], [first_sum], (*label, "repeated"))

            gathered = [torch.empty_like(first_sum).view(torch.uint8) for _ in ranks]
            dist.all_gather(gathered, first_sum.view(torch.uint8), group=gloo)
            assert_equal_bits(gathered, [gathered[0]] * world.size, label)
            if dtype != torch.int64 and length >= 5 and world.size > 1:
                assert first_sum.isnan().any(), label
        dist.destroy_process_group(group)
    torch_registration.register_backend(transport)


def draw_with_nan(rank: int, dtype: torch.dtype, length: int) -> Tensor:
    """Draw the tensor of a rank. Floating-point tensors contain NaN or inf, and -inf."""
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(length, dtype=torch.float64, generator=generator).to(dtype)
    if dtype.is_floating_point:
        tensor[length // 2 :: 7] = float("nan") if rank % 2 else float("inf")
        tensor[length // 3 :: 11] = float("-inf")
    return tensor


CASES = {
    "reductions": check_reductions,
    "half_precision_sums": check_half_precision_sums,
    "reproducible_bits": check_reproducible_bits,
}
