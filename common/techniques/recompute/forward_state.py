"""State that a forward pass of a block reads and changes, besides its inputs, parameters and torch's random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from common.models.sample_dropout import list_dropout_layers


class ForwardState:
    """The state of a block before a forward pass, with which a recomputation of this pass starts.

    It consists of the positions of the samples, which dropout layers take from a queue, and of the buffers, such as the
    running statistics of BatchNorm. torch restores its own random state.

    All buffers are copied. BatchNorm changes its statistics without a new version of the tensors, so that versions do
    not show which buffers a forward pass changes.
    """

    def __init__(self, block: nn.Module) -> None:
        self.positions = [(layer, layer.copy_positions()) for layer in list_dropout_layers([block])]
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
        """Each buffer's module, name and copy."""
        for module in block.modules():
            for name, buffer in module.named_buffers(recurse=False):
                self.buffers.append((module, name, buffer.clone()))
        self.is_restored = False
        """Whether a recomputation uses this state at the moment."""

    def list_copies(self) -> list[Tensor]:
        """Return the copies of the buffers."""
        return [copy for _, _, copy in self.buffers]

    @contextlib.contextmanager
    def restore(self) -> Iterator[None]:
        """Restore the state for a recomputation. Afterward, the state is the same as before."""
        with contextlib.ExitStack() as stack:
            for layer, positions in self.positions:
                stack.enter_context(layer.use_positions(positions))
            for module, name, copy in self.buffers:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, copy)
            self.is_restored = True
            stack.callback(setattr, self, "is_restored", False)
            yield
