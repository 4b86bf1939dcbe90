"""The backend `builtin` of torch.distributed: what torch calls on a process group, on one rank.

It is a subclass of torch's `Backend`, not of `ProcessGroup`: DeviceMesh, functional collectives, FSDP2 and tensor
parallelism need the process group around it. Every call is honoured or raises; what is not overridden raises in torch
("does not support"): sparse tensors, windows, splitting and shrinking of groups, monitored_barrier.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from common.distributed.builtin.arguments import (
    check_blocks,
    check_dense,
    check_same_size_and_type,
    cut_equally,
    cut_rows,
    read_op,
    take_only_element,
)
from common.distributed.builtin.communicator import Communicator
from common.distributed.builtin.messages import Arriving, Attendant, Sent
from common.distributed.builtin.worker import Job, Worker
from common.distributed.transport.links import LinkError, LinkTimeout

NAME = "builtin"
UNSET = datetime.timedelta(milliseconds=-1)  # torch's time limit of a call that has none of its own
TAGS = 1 << 32


class BuiltinBackend(Backend):
    """Collectives and messages of one process group on one rank, as torch calls them."""

    # torch's own properties would ask the subclass again, without end
    supports_coalescing = supports_splitting = supports_shrinking = supports_reconfigure = supports_window = False
    _supports_time_estimate = False

    def __init__(self, communicator: Communicator, members: Sequence[int], timeout: datetime.timedelta) -> None:
        """`members` are the ranks in the run of those of this group."""
        super().__init__(communicator.rank, communicator.size)
        self.communicator, self.members, self.timeout = communicator, members, timeout
        self.worker = Worker("collectives")
        self.attendants = {rank: Attendant(link) for rank, link in communicator.incoming.items()}

    def getBackendName(self) -> str:
        return NAME

    @property
    def options(self) -> Backend.Options:
        """Name and time limit, as torch asks for them."""
        return Backend.Options(NAME, self.timeout)

    # ---- reductions

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Job | None:
        """Reduce a tensor in place."""
        return self.allreduce_coalesced([take_only_element(tensors)], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Job | None:
        """Reduce tensors in place."""
        op = read_op(opts, tensors)

        def run() -> None:
            for tensor in tensors:
                self.communicator.all_reduce(tensor, op)

        return self._run("all_reduce", run, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Job | None:
        """Reduce a tensor into that of one rank."""
        tensor, op, root = take_only_element(tensors), read_op(opts, tensors), opts.rootRank
        return self._run("reduce", lambda: self.communicator.reduce(tensor, op, root), tensors, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Job | None:
        """Reduce a list of tensors, one for each rank."""
        output, op = take_only_element(outputs), read_op(opts, outputs)
        blocks = self._check_blocks(take_only_element(inputs))
        check_same_size_and_type(output, blocks[self.rank()])
        return self._run("reduce_scatter", lambda: self.communicator.reduce_scatter(output, blocks, op), outputs, opts)

    def reduce_scatter_single(self, output: Tensor, value: Tensor, opts: Any) -> Job | None:
        """Reduce a tensor whose equal parts are for the ranks."""
        return self.reduce_scatter_single_coalesced([output], [value], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Job | None:
        """Reduce tensors whose equal parts are for the ranks."""
        op = read_op(opts, outputs)
        cut = [cut_equally(value, self.size(), output) for output, value in zip(outputs, inputs, strict=True)]

        def run() -> None:
            for output, blocks in zip(outputs, cut, strict=True):
                self.communicator.reduce_scatter(output, blocks, op)

        return self._run("reduce_scatter", run, outputs, opts)

    # ---- copies

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Job | None:
        """Overwrite a tensor with that of one rank."""
        tensor, root = take_only_element(tensors), opts.rootRank
        check_dense(tensor)
        return self._run("broadcast", lambda: self.communicator.broadcast(tensor, root), tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Job | None:
        """Collect a tensor of each rank in a list."""
        blocks, value = self._check_blocks(take_only_element(outputs)), take_only_element(inputs)
        check_same_size_and_type(blocks[self.rank()], value)
        return self._run("all_gather", lambda: self.communicator.all_gather(blocks, value), outputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Job | None:
        """Collect several tensors of each rank; `outputs[r]` are those of rank r."""
        if len(outputs) != self.size():
            raise ValueError(f"there are {len(outputs)} lists, needs one for each of {self.size()} ranks")
        for blocks in outputs:
            for block, value in zip(blocks, inputs, strict=True):
                check_same_size_and_type(block, value)

        def run() -> None:
            for *blocks, value in zip(*outputs, inputs, strict=True):
                self.communicator.all_gather(blocks, value)

        return self._run("all_gather", run, outputs, opts)

    def all_gather_single(self, output: Tensor, value: Tensor, opts: Any) -> Job | None:
        """Collect a tensor of each rank in one, part after part."""
        return self.all_gather_single_coalesced([output], [value], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Job | None:
        """Collect tensors of each rank, each kind in one tensor."""
        cut = [cut_equally(output, self.size(), value) for output, value in zip(outputs, inputs, strict=True)]

        def run() -> None:
            for blocks, value in zip(cut, inputs, strict=True):
                self.communicator.all_gather(blocks, value)

        return self._run("all_gather", run, outputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Job | None:
        """Collect a tensor of each rank in a list on one rank."""
        value, root = take_only_element(inputs), opts.rootRank
        blocks = self._check_blocks(take_only_element(outputs)) if self.rank() == root else []
        check_same_size_and_type(value, blocks[root] if blocks else value)
        return self._run("gather", lambda: self.communicator.gather(blocks, value, root), outputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Job | None:
        """Give each rank a tensor of a list on one rank."""
        output, root = take_only_element(outputs), opts.rootRank
        blocks = self._check_blocks(take_only_element(inputs)) if self.rank() == root else []
        check_same_size_and_type(output, blocks[root] if blocks else output)
        return self._run("scatter", lambda: self.communicator.scatter(output, blocks, root), outputs, opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> Job | None:
        """Give each rank a tensor of a list on every rank."""
        check_same_size_and_type(self._check_blocks(outputs)[self.rank()], self._check_blocks(inputs)[self.rank()])
        return self._run("all_to_all", lambda: self.communicator.all_to_all(outputs, inputs), outputs, opts)

    def all_to_all_single(
        self, output: Tensor, value: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any
    ) -> Job | None:
        """Give each rank rows of a tensor: equal parts, or as many as the sizes say."""
        size = self.size()
        return self.alltoall(cut_rows(output, size, output_sizes), cut_rows(value, size, input_sizes), opts)

    def barrier(self, opts: Any) -> Job | None:
        """Wait for all ranks."""
        return self._run("barrier", self.communicator.barrier, [], opts)

    # ---- messages

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Sent:
        """Begin to send a tensor."""
        tensor = take_only_element(tensors)
        check_dense(tensor)
        try:
            return Sent(self.communicator.send(tensor, target, tag % TAGS), self._explain)
        except (LinkError, LinkTimeout) as error:
            raise self._explain("send", error) from error

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Arriving:
        """Begin to receive a tensor; messages with the same tag come in the order in which they were sent."""
        tensor = take_only_element(tensors)
        check_dense(tensor)
        try:
            block, expected = self.communicator.expect(tensor, source, tag % TAGS)
        except (LinkError, LinkTimeout) as error:
            raise self._explain("recv", error) from error
        self.attendants[source].read_in_background(expected)
        return Arriving(self.communicator.incoming[source], block, expected, self._explain)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> NoReturn:
        """Raise: a message is read from the connection with its sender."""
        raise NotImplementedError("builtin receives from a rank that is named: dist.recv(tensor, src=...)")

    # ---- the end

    def shutdown(self) -> None:
        """Close all connections at once, from any thread; what waits for them fails."""
        self._close(dist.DistNetworkError(f"the process group was destroyed on this rank{self._name_group()}"))

    def abort(self) -> None:
        """Do the same as `shutdown`."""
        self.shutdown()

    def _close(self, error: BaseException) -> None:
        self.worker.close(error)
        for attendant in self.attendants.values():
            attendant.close()
        self.communicator.close()

    def _run(self, name: str, run: Callable[[], object], result: Any, opts: Any) -> Job | None:
        """Execute a collective: at once and here where the caller waits for it anyway and nothing is before it."""
        if opts.timeout not in (UNSET, self.timeout):
            raise NotImplementedError(
                f"{name}: all calls of a group have one time limit, timeout= of init_process_group or new_group"
            )
        run = partial(self._try, name, run)
        if not opts.asyncOp and self.worker.run_here_if_idle(run):
            return None
        job = self.worker.submit(Job(run, result))
        if opts.asyncOp:
            return job
        job.wait()
        return None

    def _try(self, name: str, run: Callable[[], object]) -> None:
        """Call `run`; after an error the group is closed, since other ranks and this one are at different calls."""
        try:
            run()
        except (LinkError, LinkTimeout) as error:
            explained = self._explain(name, error)
            self.worker.close(explained)
            if isinstance(error, LinkError):  # others, too, may wait for the rank that is lost
                self._close(explained)
            raise explained from error
        except BaseException as error:
            self._close(dist.DistNetworkError(f"{name} was broken off on this rank: {type(error).__name__}: {error}"))
            raise

    def _explain(self, name: str, error: BaseException) -> BaseException:
        """Return an error of a link as other backends raise it: a RuntimeError, or TimeoutError."""
        text = f"{name}: {error}{self._name_group()}"
        return TimeoutError(text) if isinstance(error, LinkTimeout) else dist.DistNetworkError(text)

    def _name_group(self) -> str:
        """Return a note for errors of a subgroup, which numbers its ranks itself; empty for the whole world."""
        members = list(self.members)
        return "" if members == list(range(len(members))) else f" (counted among the ranks {members} of the run)"

    def _check_blocks(self, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
        return check_blocks(blocks, self.communicator.size)
