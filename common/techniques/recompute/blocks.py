"""Blocks of a network that compute their activations again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common.system.errors import UserError
from common.techniques.recompute.forward_state import ForwardState
from common.techniques.recompute.kept_operations import choose_policy, is_kept

if TYPE_CHECKING:
    from common.training.saved_tensors import SavedTensors

CHANGED_RESULT_TEXT = "cached during selective activation checkpoint has been mutated"
"""Part of torch's message about a result that was changed in place after torch has kept it."""


class RecomputedModule(nn.Module):
    """A block that keeps only its inputs for the backward pass. `change_blocks` adds this class to existing blocks.

    The backward pass computes the block again as soon as it needs one of its activations, and ends the recomputation
    after the last activation that it needs.
    """

    is_selective = False
    """Whether the results of expensive operations are kept too."""
    activation_observer: SavedTensors | None = None

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Compute the outputs of the block."""
        compute = super().forward
        if not torch.is_grad_enabled():
            return compute(*inputs, **options)
        state = ForwardState(self)
        if self.activation_observer is not None:
            self.activation_observer.count_kept(state.list_copies())
            compute = functools.partial(self._compute_observed, compute, state, self.activation_observer)
        contexts = functools.partial(self._make_contexts, state)
        return checkpoint(compute, *inputs, use_reentrant=False, context_fn=contexts, **HOOK_OPTIONS, **options)

    def _make_contexts(self, state: ForwardState) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a forward pass and of its recomputation."""
        if not self.is_selective:
            return contextlib.nullcontext(), state.restore()
        forward_context, recompute_context = create_selective_checkpoint_contexts(choose_policy)
        return forward_context, join_contexts(explain_changed_results(), state.restore(), recompute_context)

    def _compute_observed(
        self, compute: Any, state: ForwardState, observer: SavedTensors, *inputs: Any, **options: Any
    ) -> Any:
        context: AbstractContextManager[Any] = contextlib.nullcontext()
        if state.is_restored:
            context = observer.observe_recomputation()
        elif self.is_selective:
            context = observer.observe_kept_results(is_kept)
        with context:
            return compute(*inputs, **options)


@contextlib.contextmanager
def join_contexts(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter several contexts, one after another."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextlib.contextmanager
def explain_changed_results() -> Iterator[None]:
    """Raise UserError if a block has changed a result in place that is kept for its recomputation."""
    try:
        yield
    except RuntimeError as error:
        if CHANGED_RESULT_TEXT not in str(error):
            raise
        raise UserError(
            "recompute=selective: a block changes the result of a matrix product or convolution in place, such as "
            "with nn.ReLU(inplace=True); remove inplace=True, or use recompute=blocks"
        ) from None


def choose_hook_options() -> dict[str, Any]:
    """Return the option that keeps the results of expensive operations out of hooks for saved tensors.

    Recent versions of torch have this option, and warn about its future default. Earlier versions behave like this.
    """
    name = "respect_saved_tensors_hooks"
    return {name: False} if name in inspect.signature(checkpoint).parameters else {}


HOOK_OPTIONS = choose_hook_options()


def list_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a network.

    They are the elements of its attribute `blocks` or, for an nn.Sequential, its children that contain other layers.
    """
    blocks: Any = getattr(network, "blocks", None)
    if isinstance(blocks, nn.ModuleList | nn.Sequential | list | tuple):
        return [block for block in blocks if isinstance(block, nn.Module)]
    if isinstance(network, nn.Sequential):
        return [layer for layer in network if list(layer.children())]
    return []


def change_blocks(network: nn.Module, recompute: str) -> None:
    """Add `RecomputedModule` to the classes of the blocks of a network. Raises UserError if it has no blocks."""
    blocks = list_blocks(network)
    if not blocks:
        raise UserError(
            f"recompute={recompute}: the network {type(network).__name__} has no blocks; omit recompute, add an "
            "attribute `blocks` that lists them, or use an nn.Sequential with children that contain other layers"
        )
    for block in dict.fromkeys(blocks):  # the same block may be used several times
        kind: Any = make_recomputed_class(type(block), recompute == "selective")
        block.__class__ = kind


def make_recomputed_class(kind: type[nn.Module], is_selective: bool) -> type:
    """Return a subclass of a block's class whose forward pass is that of `RecomputedModule`.

    Replacing the class of a block, as `fully_shard` does, keeps the names of its parameters. It also lets copies of the
    block use their own parameters.
    """
    return type(f"Recomputed{kind.__name__}", (RecomputedModule, kind), {"is_selective": is_selective})
