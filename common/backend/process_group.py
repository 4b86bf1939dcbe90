"""Backend `builtin` of torch.distributed, with the methods that torch calls on a process group.

`BuiltinBackend` is a subclass of torch's `Backend`, not of `ProcessGroup`, because DeviceMesh, functional collectives,
FSDP2, and tensor parallelism need a process group that wraps a backend. If `BuiltinBackend` does not override a method,
torch raises an error that contains "does not support". Therefore, sparse tensors, one-sided communication (windows),
splitting and shrinking of groups, and monitored_barrier are not supported.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from common.backend.arguments import (
    check_dense,
    check_one_tensor_per_rank,
    check_same_size_and_type,
    get_only_element,
    read_reduction,
    split_equally,
    split_rows,
)
from common.backend.communicator import Communicator
from common.backend.messages import BackgroundReader, ReceiveWork, SendWork
from common.backend.worker import CollectiveExecutor, CollectiveWork
from common.ranks.links.outgoing import LINK_ERRORS, LinkError, LinkTimeout
from common.system.errors import RankTimeoutError

Tensors = list[Tensor]
Collective = Callable[..., None]
ArgumentLists = list[tuple[Any, ...]]
OptionalWork = CollectiveWork | None  # None if the collective is already complete

BACKEND_NAME = "builtin"
DEFAULT_TIMEOUT = datetime.timedelta(milliseconds=-1)  # value that torch passes for calls without timeout=
TAG_COUNT = 1 << 32


class BuiltinBackend(Backend):
    """Backend of one process group on one rank, with the methods that torch calls."""

    # These attributes replace properties of torch's class that would call the subclass again in an endless recursion.
    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    _supports_time_estimate = False

    def __init__(self, communicator: Communicator, members: Sequence[int], timeout: datetime.timedelta) -> None:
        """Create the backend. `members` contains the global rank of each member of the group."""
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator
        self.members = members
        self.timeout = timeout
        self.executor = CollectiveExecutor("collectives")
        self.readers = {rank: BackgroundReader(link) for rank, link in communicator.incoming.items()}

    def getBackendName(self) -> str:
        return BACKEND_NAME

    @property
    def options(self) -> Backend.Options:
        """Name and time limit of the backend."""
        return Backend.Options(BACKEND_NAME, self.timeout)

    # ---- reductions

    def allreduce(self, tensors: Tensors, opts: Any) -> OptionalWork:
        """Reduce a tensor over all ranks, in place."""
        return self.allreduce_coalesced([get_only_element(tensors)], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> OptionalWork:
        """Reduce several tensors over all ranks, in place."""
        op = read_reduction(opts, tensors)
        return self._run_collective(self.communicator.all_reduce, [(tensor, op) for tensor in tensors], tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> OptionalWork:
        """Reduce the tensors of all ranks into the tensor of the root rank."""
        tensor = get_only_element(tensors)
        op = read_reduction(opts, tensors)
        return self._run_collective(self.communicator.reduce, [(tensor, op, opts.rootRank)], tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> OptionalWork:
        """Reduce a list of tensors over all ranks, then scatter the results, one to each rank."""
        output = get_only_element(outputs)
        op = read_reduction(opts, outputs)
        blocks = check_one_tensor_per_rank(get_only_element(inputs), self.size())
        check_same_size_and_type(output, blocks[self.rank()])
        return self._run_collective(self.communicator.reduce_scatter, [(output, blocks, op)], outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> OptionalWork:
        """Reduce a tensor over all ranks, then scatter the result in equal parts."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> OptionalWork:
        """Reduce several tensors over all ranks, then scatter each result in equal parts."""
        op = read_reduction(opts, outputs)
        calls: ArgumentLists = []
        for output, tensor in zip(outputs, inputs, strict=True):
            calls.append((output, split_equally(tensor, self.size(), output), op))
        return self._run_collective(self.communicator.reduce_scatter, calls, outputs, opts)

    # ---- copies

    def broadcast(self, tensors: Tensors, opts: Any) -> OptionalWork:
        """Overwrite the tensors of all ranks with the tensor of the root rank."""
        tensor = get_only_element(tensors)
        check_dense(tensor)
        return self._run_collective(self.communicator.broadcast, [(tensor, opts.rootRank)], tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> OptionalWork:
        """Collect one tensor from each rank in a list on all ranks."""
        blocks = check_one_tensor_per_rank(get_only_element(outputs), self.size())
        tensor = get_only_element(inputs)
        check_same_size_and_type(blocks[self.rank()], tensor)
        return self._run_collective(self.communicator.all_gather, [(blocks, tensor)], outputs, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> OptionalWork:
        """Collect several tensors from each rank, so that `outputs[r]` contains the tensors of rank r."""
        if len(outputs) != self.size():
            raise ValueError(f"expected one output list for each of the {self.size()} ranks (got {len(outputs)})")
        for blocks in outputs:
            for block, tensor in zip(blocks, inputs, strict=True):
                check_same_size_and_type(block, tensor)
        calls: ArgumentLists = [(blocks, tensor) for *blocks, tensor in zip(*outputs, inputs, strict=True)]
        return self._run_collective(self.communicator.all_gather, calls, outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> OptionalWork:
        """Concatenate one tensor from each rank."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> OptionalWork:
        """Concatenate several tensors from each rank, each in a separate output tensor."""
        calls: ArgumentLists = []
        for output, tensor in zip(outputs, inputs, strict=True):
            calls.append((split_equally(output, self.size(), tensor), tensor))
        return self._run_collective(self.communicator.all_gather, calls, outputs, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> OptionalWork:
        """Collect one tensor from each rank in a list on the root rank."""
        tensor = get_only_element(inputs)
        blocks = self._check_blocks_of_root(outputs, tensor, opts.rootRank)
        return self._run_collective(self.communicator.gather, [(blocks, tensor, opts.rootRank)], outputs, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> OptionalWork:
        """Scatter a list of tensors from the root rank, one tensor to each rank."""
        output = get_only_element(outputs)
        blocks = self._check_blocks_of_root(inputs, output, opts.rootRank)
        return self._run_collective(self.communicator.scatter, [(output, blocks, opts.rootRank)], outputs, opts)

    def _check_blocks_of_root(self, lists: list[Tensors], tensor: Tensor, root: int) -> Sequence[Tensor]:
        """Return the list of tensors on the root rank, and an empty list on other ranks.

        Raises ValueError if the tensors in the list do not match `tensor`.
        """
        if self.rank() != root:
            check_dense(tensor)
            return []
        blocks = check_one_tensor_per_rank(get_only_element(lists), self.size())
        check_same_size_and_type(tensor, blocks[root])
        return blocks

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> OptionalWork:
        """Send each rank one tensor from the list of this rank, and receive one tensor from each rank."""
        output_blocks = check_one_tensor_per_rank(outputs, self.size())
        input_blocks = check_one_tensor_per_rank(inputs, self.size())
        check_same_size_and_type(output_blocks[self.rank()], input_blocks[self.rank()])
        return self._run_collective(self.communicator.all_to_all, [(outputs, inputs)], outputs, opts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> OptionalWork:
        """Send each rank a part of the rows of a tensor. The parts are equal unless `input_sizes` is given."""
        outputs = split_rows(output, self.size(), output_sizes)
        return self.alltoall(outputs, split_rows(tensor, self.size(), input_sizes), opts)

    def barrier(self, opts: Any) -> OptionalWork:
        """Wait until all ranks have called this method."""
        return self._run_collective(self.communicator.barrier, [()], [], opts)

    # ---- messages

    def send(self, tensors: Tensors, target: int, tag: int) -> SendWork:
        """Start sending a tensor."""
        tensor = get_only_element(tensors)
        check_dense(tensor)
        try:
            pending = self.communicator.send(tensor, target, tag % TAG_COUNT)
        except LINK_ERRORS as error:
            raise self._convert_error("send", error) from error
        return SendWork(pending, self._convert_error)

    def recv(self, tensors: Tensors, source: int, tag: int) -> ReceiveWork:
        """Start receiving a tensor. Messages with the same tag arrive in the order in which they were sent."""
        tensor = get_only_element(tensors)
        check_dense(tensor)
        try:
            block, expected = self.communicator.prepare_receive(tensor, source, tag % TAG_COUNT)
        except LINK_ERRORS as error:
            raise self._convert_error("recv", error) from error
        self.readers[source].read_in_background(expected)
        return ReceiveWork(self.communicator.incoming[source], block, expected, self._convert_error)

    def recv_anysource(self, tensors: Tensors, tag: int) -> NoReturn:
        """Raise NotImplementedError, because the sender of a message must be known."""
        raise NotImplementedError("builtin does not support receiving from any rank; call dist.recv(tensor, src=...)")

    # ---- closing

    def shutdown(self) -> None:
        """Close all connections immediately, so that pending calls fail. Any thread can call this method."""
        self._close_group(
            dist.DistNetworkError(f"the process group was destroyed on this rank{self._describe_group()}")
        )

    def abort(self) -> None:
        """Close all connections immediately, as `shutdown` does."""
        self.shutdown()

    def _close_group(self, error: BaseException) -> None:
        self.executor.close(error)
        for reader in self.readers.values():
            reader.close()
        self.communicator.close()

    def _run_collective(self, collective: Collective, calls: ArgumentLists, tensors: Any, opts: Any) -> OptionalWork:
        """Call a collective once per tuple of arguments.

        The collective fills `tensors`, which become the value of the future. The calling thread executes a synchronous
        collective itself if no other collective is pending.
        """
        if opts.timeout not in (DEFAULT_TIMEOUT, self.timeout):
            raise NotImplementedError(
                f"{collective.__name__}: builtin has one time limit per group; pass timeout= to init_process_group or "
                "new_group instead"
            )
        run = partial(self._run_or_close, collective, calls)
        if not opts.asyncOp and self.executor.run_in_caller_if_idle(run):
            return None
        work = self.executor.submit(CollectiveWork(run, tensors))
        if opts.asyncOp:
            return work
        work.wait()
        return None

    def _run_or_close(self, collective: Collective, calls: ArgumentLists) -> None:
        """Execute a collective, and close the group if an error occurs.

        The group cannot be used after an error, because its ranks may no longer execute the same collective.
        """
        try:
            for arguments in calls:
                collective(*arguments)
        except LINK_ERRORS as error:
            explained = self._convert_error(collective.__name__, error)
            self.executor.close(explained)
            if isinstance(error, LinkError):  # other ranks may also be waiting for the lost rank
                self._close_group(explained)
            raise explained from error
        except BaseException as error:
            reason = f"{collective.__name__} failed on this rank: {type(error).__name__}: {error}"
            self._close_group(dist.DistNetworkError(reason))
            raise

    def _convert_error(self, name: str, error: BaseException) -> BaseException:
        """Convert a link error to the error of a collective: a DistNetworkError or a RankTimeoutError."""
        message = f"{name}: {error}{self._describe_group()}"
        return RankTimeoutError(message) if isinstance(error, LinkTimeout) else dist.DistNetworkError(message)

    def _describe_group(self) -> str:
        """Return a note for the error messages of a subgroup, which numbers its ranks from 0.

        The note lists the global ranks of the subgroup, and is empty for the group of all ranks.
        """
        members = list(self.members)
        return "" if members == list(range(len(members))) else f" (rank numbers refer to the group of ranks {members})"
