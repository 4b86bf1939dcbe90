"""Copy of a tied table of token vectors on the rank of the last stage, where the output layer uses it.

The rank of the first stage holds the table, its optimizer state and its part of checkpoints. The rank of the last stage
receives the values of the table before each step and evaluation, and returns the gradient of its copy after the last
backward pass. Megatron-LM adds the gradients with an all-reduce instead, and both ranks update their tables. Both ways
send the same number of bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from common.techniques.parallel_layout.data_ranks import get_local_tensor
from common.techniques.parallel_layout.mesh_ranks import MeshRanks


class TableCopy:
    """The exchange of a table's values and gradients between two ranks of a pipeline.

    Only these two ranks use it: of `ranks`, `first` holds the table and `last` holds the copy. Ranks with sharded
    tables exchange their shards.
    """

    def __init__(self, ranks: MeshRanks, first: int, last: int) -> None:
        self.ranks = ranks
        self.first = first
        self.last = last
        self.sending: dist.Work | None = None

    def connect(self, embedding: nn.Module) -> None:
        """Exchange the parameter `weight` of a layer, after it was sharded."""
        self.table: Any = embedding.weight

    def start_update(self) -> None:
        """Start sending the values of the table on the first rank. The last rank receives them.

        Call `finish_update` before the values change.
        """
        if self.ranks.index == self.first:
            self.sending = dist.isend(get_local_tensor(self.table), group=self.ranks.group, group_dst=self.last)
        else:
            self.table.grad = None
            dist.recv(get_local_tensor(self.table), group=self.ranks.group, group_src=self.first)

    def finish_update(self) -> None:
        """Wait until the values are sent."""
        if self.sending is not None:
            self.sending.wait()
            self.sending = None

    def return_gradient(self) -> None:
        """Add the gradient of the copy on the last rank to the gradient of the table on the first rank."""
        if self.ranks.index == self.last:
            dist.send(get_local_tensor(self.table.grad), group=self.ranks.group, group_dst=self.first)
        else:
            gradient = get_local_tensor(self.table.grad)
            received = torch.empty_like(gradient)
            dist.recv(received, group=self.ranks.group, group_src=self.last)
            gradient += received
