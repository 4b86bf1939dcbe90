"""The contract of an optimizer: what schedules, checkpoints, GradScaler and FSDP2 need of it, tried on three layers."""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from common.checkpoint import state_dicts
from common.core.own_function import locate_errors
from common.distributed import local_launcher, rendezvous
from common.distributed.rank_info import RankInfo
from common.training import optimizers
from common.training.optimization import own_files
from configs.launch import Launch
from configs.shared import Optim

RATE = 0.1
CLOSE = 1e-12  # by how much, relative, float64 values of the same arithmetic in another order may differ
SEVERAL = 5  # steps within which an optimizer moves every parameter: one that gathers gradients does not in each
MISSING_RATE = 'its parameter groups have no lr: pass {"lr": lr} to super().__init__, and read group["lr"] in step'


class Trial:
    """An optimizer of three small layers of float64, which hold the same values and get the same gradients each time.

    `shard` is called with the layers before the optimizer is built. torch's own generator is seeded anew each time.
    """

    def __init__(self, optim: Optim, shard: Callable[[nn.Module], object] = lambda model: None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1)).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        shard(model)
        self.named = list(model.named_parameters())
        self.optimizer = optimizers.build_optimizer(model.parameters(), replace(optim, lr=RATE), scaled=True)

    def set_gradients(self, number: int, scale: float = 1.0) -> None:
        """Set the gradients of a step, multiplied by `scale`."""
        torch.manual_seed(number)  # also for an optimizer that draws numbers
        for _, parameter in self.named:
            gradient = scale * torch.randn(parameter.shape, dtype=torch.float64)
            parameter.grad = state_dicts.shard_like(gradient, parameter)

    def take_steps(self, numbers: Iterable[int], rate: float = RATE, scale: float = 1.0) -> Trial:
        """Take the steps of these numbers, with the learning rate set before each as a run does; return itself."""
        for number in numbers:
            optimizers.set_learning_rate(self.optimizer, rate)
            self.set_gradients(number, scale)
            self.optimizer.step()
        return self

    def read_values(self) -> dict[str, Tensor]:
        """Return the full parameters by name."""
        return {name: state_dicts.full_tensor(parameter.detach()).clone() for name, parameter in self.named}


def find_difference(one: Trial, other: Trial, tolerance: float = 0.0) -> str | None:
    """Return the name of a parameter that is not the same in both, relative to its largest value; None without any."""
    ours, theirs = one.read_values(), other.read_values()
    for name, value in ours.items():
        if not (value - theirs[name]).abs().max() <= tolerance * value.abs().max():  # so that NaN differs
            return name
    return None


# ---- the parts of the contract: each raises ValueError with what is wrong and what to do


def check_interface(optim: Optim) -> None:
    """Check that a run can call the optimizer."""
    optimizer = Trial(optim).optimizer
    step = inspect.unwrap(type(optimizer).step)
    if step is inspect.unwrap(Optimizer.step):
        raise ValueError("it has no method step(self), which changes the parameters by their gradients")
    takes = list(inspect.signature(step).parameters.values())[1:]
    needed = [one.name for one in takes if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if needed:
        raise ValueError(f"step needs {needed[0]}: a run calls step(), once after each backward; give it a default")
    if any(not math.isclose(group.get("lr", math.nan), RATE) for group in optimizer.param_groups):
        raise ValueError(MISSING_RATE)


def check_learning_rate(optim: Optim) -> None:
    """Check that the optimizer takes its learning rate from the parameter groups, in each step."""
    start, first, second = Trial(optim), range(SEVERAL), range(SEVERAL, 2 * SEVERAL)
    if find_difference(start, Trial(optim).take_steps(first, 0.0)):
        raise ValueError('step changes parameters at a learning rate of 0: read group["lr"], which the schedule sets')
    moved = Trial(optim).take_steps(first)
    before, after = start.read_values(), moved.read_values()
    still = [name for name in before if torch.equal(before[name], after[name])]
    if still:
        what = f"{SEVERAL} steps leave {still[0]} as it was"
        raise ValueError(f"{what}: p.add_ changes a parameter, p.add makes another tensor")
    if not find_difference(moved.take_steps(second), Trial(optim).take_steps(first).take_steps(second, RATE / 2)):
        raise ValueError('step keeps the learning rate of the first step: read group["lr"], which the schedule sets')


def check_resume(optim: Optim) -> None:
    """Check that state by parameter name, as a checkpoint has it, is all that the next step needs."""
    ours, resumed = Trial(optim).take_steps([1, 2, 3]), Trial(optim)
    file = io.BytesIO()
    state = state_dicts.collect_optimizer_state(ours.optimizer, ours.named)
    torch.save(state_dicts.to_plain([ours.read_values(), state], "optimizer"), file)
    values, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    state_dicts.load_tensors(resumed.named, values)
    state_dicts.load_optimizer_state(resumed.optimizer, resumed.named, state)
    if find_difference(ours.take_steps([4, 5]), resumed.take_steps([4, 5])):
        what = "after a resume it does not go on as without one"
        raise ValueError(f"{what}: what a step leaves for the next belongs into self.state[parameter], not elsewhere")


def check_skipped_step(optim: Optim) -> None:
    """Check that steps which GradScaler leaves out, also the very first, leave no trace."""
    ours, scaler = Trial(optim), GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # it has no scale before
    for number in (0, 1, 0, 2):
        ours.set_gradients(number, scaler.get_scale() if number else math.inf)
        scaler.step(ours.optimizer)
        scaler.update()
    if find_difference(Trial(optim).take_steps([1, 2]), ours, CLOSE):
        raise ValueError("a step that GradScaler leaves out, because a gradient is inf, changes parameters or state")


def check_zero_gradients(optim: Optim) -> None:
    """Check that gradients of zero do no harm."""
    trial = Trial(optim).take_steps([1, 2], scale=0.0).take_steps([3])
    if not all(value.isfinite().all() for value in trial.read_values().values()):
        raise ValueError("gradients of 0 make parameters that are no finite number: add a small number to a divisor")


def check_missing_gradient(optim: Optim) -> None:
    """Check that a parameter without gradient stays as it is, and the others move."""
    trial, start = Trial(optim), Trial(optim).read_values()
    name, parameter = trial.named[0]
    for number in range(SEVERAL):
        trial.set_gradients(number)
        parameter.grad = None
        trial.optimizer.step()
    values = trial.read_values()
    if not torch.equal(values.pop(name), start[name]):
        raise ValueError("step changes a parameter that has no gradient: leave out those whose grad is None")
    if any(torch.equal(value, start[other]) for other, value in values.items()):
        raise ValueError("step leaves parameters as they were because another one has no gradient")


def check_foreach_and_fused(optim: Optim) -> None:
    """Check that foreach and fused, where the optimizer has them, compute what its loop over parameters does."""
    forms = ("foreach", "fused")

    def choose(form: str) -> Trial:
        trial = Trial(optim)
        for group in trial.optimizer.param_groups:
            group |= {name: name == form for name in forms if name in group}
        return trial.take_steps([1, 2, 3])

    for form in forms:
        if form in Trial(optim).optimizer.param_groups[0] and find_difference(choose("loop"), choose(form), CLOSE):
            raise ValueError(f"{form}=True gives other parameters than the loop over them")


CHECKS: dict[str, Callable[[Optim], None]] = {
    "a run can call it": check_interface,
    "the schedule sets its learning rate": check_learning_rate,
    "it resumes to the bit": check_resume,
    "a step that GradScaler leaves out leaves no trace": check_skipped_step,
    "gradients of zero do no harm": check_zero_gradients,
    "a parameter without gradient stays": check_missing_gradient,
    "foreach and fused equal the loop": check_foreach_and_fused,
}


def check_optimizer(optim: Optim, passed: Callable[[str], object] = lambda words: None) -> None:
    """Try an optimizer in this process; `passed` gets each part of the contract that it keeps. Raises UserError.

    A process that forks others does not call it: it executes a user's file, which may start threads.
    """
    with torch.random.fork_rng([]):
        step: Any = inspect.unwrap(type(Trial(optim).optimizer).step)
        own = step if step.__code__.co_filename == optim.name.rpartition(":")[0] else None
        for words, check in CHECKS.items():
            with locate_errors("optim.name", optim.name, own):
                check(optim)
            passed(words)


def check_optimizer_of_run(optim: Optim, code: Path, *, named: bool) -> None:
    """Try a user's own optimizer on a rank; from now on it reads the files that its run keeps. Raises UserError.

    With `named`, in a new run, it is tried in the file that was named, so that errors name this one.
    """
    if ":" in optim.name:
        check_optimizer(optim if named else own_files.point_to_kept_files(optim, code))
    own_files.use_kept_files(optim, code)


# ---- with sharded parameters, on ranks


def compare_sharded(optim: Optim, ranks: int) -> None:
    """Raise ValueError unless parameters sharded by FSDP2 get the values of full ones. All ranks call it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # two seconds to import

    mesh = init_device_mesh("cpu", (ranks,))
    sharded = Trial(optim, lambda model: fully_shard(model, mesh=mesh)).take_steps([1, 2, 3])
    if find_difference(Trial(optim).take_steps([1, 2, 3]), sharded, CLOSE):
        what = "parameters that FSDP2 shards get other values than full ones"
        raise ValueError(f"{what}: a norm of a shard is not that of the tensor, which full_tensor() gives")


def check_on_ranks(optim: Optim, passed: Callable[[str], object]) -> int:
    """Try an optimizer on two ranks, which are forked here, also with sharded parameters; return the exit status."""

    def try_parts(info: RankInfo) -> None:
        with rendezvous.joined_world(info, Launch(device="cpu")) as world:
            if world.is_main:
                check_optimizer(optim, passed)
            with locate_errors("optim.name", optim.name):
                compare_sharded(optim, world.size)
            if world.is_main:
                passed("with parameters that FSDP2 shards it computes the values of full ones")

    return local_launcher.run_ranks(try_parts, 2, 1, lambda: None)
