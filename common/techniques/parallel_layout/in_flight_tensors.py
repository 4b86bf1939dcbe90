"""Memory of the activations of all microbatches that are in flight in a pipeline at the same time."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from common.techniques.parallel_layout.storage_addresses import find_address, list_parameter_addresses


class InFlightTensors:
    """The storages that autograd holds in a step, without parameters. Tokens are counted without their storage."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.hooks = saved_tensors_hooks(self.hold, lambda held: held.tensor)
        self.uses: Counter[int] = Counter()
        """Number of saved tensors that use each storage, by its address."""
        self.current_bytes = 0
        self.bytes = 0
        """Size of all storages together, when it is largest."""

    def start(self) -> None:
        """Record the next saved tensors. The hooks need no preparation."""

    def hold(self, tensor: Tensor) -> HeldTensor:
        """Record a saved tensor until autograd frees it."""
        return HeldTensor(tensor, self)

    def add(self, address: int, size: int) -> None:
        """Count one more use of a storage, or of tokens, of `size` bytes."""
        self.uses[address] += 1
        if self.uses[address] == 1:
            self.current_bytes += size
            self.bytes = max(self.bytes, self.current_bytes)

    def remove(self, address: int, size: int) -> None:
        """Count one use less."""
        self.uses[address] -= 1
        if not self.uses[address]:
            self.current_bytes -= size


class HeldTensor:
    """A tensor that autograd holds from the forward pass until the backward pass has used it."""

    def __init__(self, tensor: Tensor, in_flight: InFlightTensors) -> None:
        self.tensor = tensor.detach()  # an output of a node would otherwise keep its own node alive
        self.in_flight = in_flight
        self.address, self.size = find_address(tensor)
        self.is_counted = self.address not in list_parameter_addresses(in_flight.model)
        if self.is_counted:
            in_flight.add(self.address, self.size)

    def __del__(self) -> None:
        if self.is_counted:
            self.in_flight.remove(self.address, self.size)
