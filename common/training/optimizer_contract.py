"""The contract of an optimizer: the behaviour that schedules, checkpoints, GradScaler and FSDP2 rely on, as checks."""

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
from common.config.custom_function import convert_errors_of_user_file
from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.training import custom_optimizer, optimizers
from configs.launch import Launch
from configs.shared import Optim

RATE = 0.1
RELATIVE_TOLERANCE = 1e-12  # between float64 values of the same arithmetic in a different order
SEVERAL_STEPS = 5  # within which every parameter changes; an optimizer that accumulates gradients may skip steps


class Trial:
    """An optimizer of three small float64 layers with the same initial values and gradients in each trial.

    `shard` is called with the layers before the optimizer is built. Each trial seeds torch's global generator.
    """

    def __init__(self, optim: Optim, shard: Callable[[nn.Module], object] = lambda model: None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1)).double()
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        shard(model)
        self.parameters = list(model.named_parameters())
        self.optimizer = optimizers.build_optimizer(model.parameters(), replace(optim, lr=RATE), scaled=True)

    def set_gradients(self, number: int, scale: float = 1.0) -> None:
        """Set the gradients of step `number`, multiplied by `scale`."""
        torch.manual_seed(number)  # also for an optimizer that draws random numbers
        for _, parameter in self.parameters:
            gradient = scale * torch.randn(parameter.shape, dtype=torch.float64)
            parameter.grad = state_dicts.shard_like(gradient, parameter)

    def take_steps(self, numbers: Iterable[int], rate: float = RATE, scale: float = 1.0) -> Trial:
        """Take steps with these numbers, setting the learning rate before each as a run does; return itself."""
        for number in numbers:
            optimizers.set_learning_rate(self.optimizer, rate)
            self.set_gradients(number, scale)
            self.optimizer.step()
        return self

    def copy_parameters(self) -> dict[str, Tensor]:
        """Return copies of the full parameters by name."""
        return {name: state_dicts.gather_full_tensor(parameter.detach()).clone() for name, parameter in self.parameters}


def find_difference(first: Trial, second: Trial, tolerance: float = 0.0) -> str | None:
    """Return the name of a parameter that differs between two trials, or None.

    `tolerance` is relative to the largest value of the parameter. NaN differs from everything.
    """
    references = second.copy_parameters()
    for name, tensor in first.copy_parameters().items():
        difference = (tensor - references[name]).abs().max()
        if not difference <= tolerance * tensor.abs().max():
            return name
    return None


# ---- the parts of the contract: each raises ValueError with the problem and its remedy


def check_step_interface(optim: Optim) -> None:
    """Check that a run can call the optimizer."""
    optimizer = Trial(optim).optimizer
    step = inspect.unwrap(type(optimizer).step)
    if step is inspect.unwrap(Optimizer.step):
        raise ValueError("it has no method step(self), which updates the parameters from their gradients")
    parameters = list(inspect.signature(step).parameters.values())[1:]
    positional = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    required = [parameter.name for parameter in positional if parameter.default is parameter.empty]
    if required:
        raise ValueError(f"step needs {required[0]}: a run calls step(), once after each backward; give it a default")
    if any(not math.isclose(group.get("lr", math.nan), RATE) for group in optimizer.param_groups):
        problem = "its parameter groups have no lr"
        raise ValueError(f'{problem}: pass {{"lr": lr}} to super().__init__, and read group["lr"] in step')


def check_learning_rate(optim: Optim) -> None:
    """Check that each step uses the learning rate of the parameter groups."""
    start = Trial(optim)
    numbers = range(SEVERAL_STEPS)
    if find_difference(start, Trial(optim).take_steps(numbers, 0.0)):
        raise ValueError('step changes parameters at a learning rate of 0: read group["lr"], which the schedule sets')

    stepped = Trial(optim).take_steps(numbers)
    before = start.copy_parameters()
    after = stepped.copy_parameters()
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    if unchanged:
        problem = f"{SEVERAL_STEPS} steps leave {unchanged[0]} unchanged"
        raise ValueError(f"{problem}: use p.add_, which updates a parameter; p.add returns a new tensor")

    slower = Trial(optim).take_steps(numbers)
    numbers = range(SEVERAL_STEPS, 2 * SEVERAL_STEPS)
    if not find_difference(stepped.take_steps(numbers), slower.take_steps(numbers, RATE / 2)):
        raise ValueError('step keeps the learning rate of the first step: read group["lr"], which the schedule sets')


def check_resume(optim: Optim) -> None:
    """Check that the next step depends only on the state that a checkpoint contains, by parameter name."""
    trial = Trial(optim).take_steps([1, 2, 3])
    file = io.BytesIO()
    state = state_dicts.collect_optimizer_state(trial.optimizer, trial.parameters)
    torch.save(state_dicts.convert_to_plain_values([trial.copy_parameters(), state], "optimizer"), file)
    file.seek(0)
    parameters, state = torch.load(file, weights_only=True)

    resumed = Trial(optim)
    state_dicts.load_tensors(resumed.parameters, parameters)
    state_dicts.load_optimizer_state(resumed.optimizer, resumed.parameters, state)
    if find_difference(trial.take_steps([4, 5]), resumed.take_steps([4, 5])):
        problem = "steps after a resume differ from those without one"
        raise ValueError(f"{problem}: store everything that later steps need in self.state[parameter]")


def check_skipped_step(optim: Optim) -> None:
    """Check that steps which GradScaler skips, even the very first, have no effect."""
    trial = Trial(optim)
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # initialises the scale
    for number in (0, 1, 0, 2):
        trial.set_gradients(number, scaler.get_scale() if number else math.inf)
        scaler.step(trial.optimizer)
        scaler.update()
    if find_difference(Trial(optim).take_steps([1, 2]), trial, RELATIVE_TOLERANCE):
        raise ValueError("a step that GradScaler skips because a gradient is inf changes parameters or state")


def check_zero_gradients(optim: Optim) -> None:
    """Check that parameters stay finite after gradients of zero."""
    trial = Trial(optim).take_steps([1, 2], scale=0.0).take_steps([3])
    if not all(tensor.isfinite().all() for tensor in trial.copy_parameters().values()):
        raise ValueError("gradients of 0 make parameters NaN or infinite: add a small number to the divisor")


def check_missing_gradient(optim: Optim) -> None:
    """Check that a parameter without gradient does not change, and that the others do."""
    trial = Trial(optim)
    before = trial.copy_parameters()
    name, parameter = trial.parameters[0]
    for number in range(SEVERAL_STEPS):
        trial.set_gradients(number)
        parameter.grad = None
        trial.optimizer.step()
    after = trial.copy_parameters()
    if not torch.equal(after.pop(name), before[name]):
        raise ValueError("step changes a parameter that has no gradient: skip parameters whose grad is None")
    if any(torch.equal(tensor, before[other]) for other, tensor in after.items()):
        raise ValueError("step leaves parameters unchanged because another one has no gradient")


def check_foreach_and_fused(optim: Optim) -> None:
    """Check that foreach and fused, if the optimizer has them, compute the same as its loop over parameters."""
    options = ("foreach", "fused")

    def take_steps_with(option: str) -> Trial:
        trial = Trial(optim)
        for group in trial.optimizer.param_groups:
            for name in options:
                if name in group:
                    group[name] = name == option
        return trial.take_steps([1, 2, 3])

    group = Trial(optim).optimizer.param_groups[0]
    for option in options:
        if option not in group:
            continue
        if find_difference(take_steps_with("loop"), take_steps_with(option), RELATIVE_TOLERANCE):
            raise ValueError(f"{option}=True gives other parameters than the loop over them")


CHECKS: dict[str, Callable[[Optim], None]] = {
    "a run can construct it and call step()": check_step_interface,
    "each step uses the learning rate of the schedule": check_learning_rate,
    "steps after a resume are identical": check_resume,
    "a step that GradScaler skips has no effect": check_skipped_step,
    "gradients of zero leave parameters finite": check_zero_gradients,
    "parameters without gradient do not change": check_missing_gradient,
    "foreach and fused match the loop": check_foreach_and_fused,
}


def check_optimizer(optim: Optim, passed: Callable[[str], object] = lambda name: None) -> None:
    """Check an optimizer in this process; call `passed` with the name of each passed check. Raises UserError.

    Do not call it in a process that forks others: it executes a user's file, which may start threads.
    """
    with torch.random.fork_rng([]):
        step: Any = inspect.unwrap(type(Trial(optim).optimizer).step)
        is_custom = step.__code__.co_filename == optim.name.rpartition(":")[0]
        for name, check in CHECKS.items():
            with convert_errors_of_user_file("optim.name", optim.name, step if is_custom else None):
                check(optim)
            passed(name)


def check_optimizer_of_run(optim: Optim, code: Path, *, is_new_run: bool) -> None:
    """Check a custom optimizer on a rank, which from now on uses the run's copies of custom files.

    In a new run the original file is checked, so that errors name it. Raises UserError.
    """
    if ":" in optim.name:
        check_optimizer(optim if is_new_run else custom_optimizer.point_to_kept_files(optim, code))
    custom_optimizer.use_kept_files(optim, code)


# ---- with sharded parameters, on ranks


def compare_sharded(optim: Optim, ranks: int) -> None:
    """Raise ValueError if parameters sharded by FSDP2 get other values than full ones. All ranks call it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # takes two seconds to import

    mesh = init_device_mesh("cpu", (ranks,))
    sharded = Trial(optim, lambda model: fully_shard(model, mesh=mesh)).take_steps([1, 2, 3])
    if find_difference(Trial(optim).take_steps([1, 2, 3]), sharded, RELATIVE_TOLERANCE):
        problem = "parameters sharded by FSDP2 get other values than full ones"
        raise ValueError(f"{problem}: the norm of a shard is not that of the tensor, which full_tensor() returns")


def check_on_ranks(optim: Optim, passed: Callable[[str], object]) -> int:
    """Check an optimizer on two forked ranks, also with sharded parameters; return the exit status."""

    def check_rank(rank_info: RankInfo) -> None:
        with rendezvous.join_world(rank_info, Launch(device="cpu")) as world:
            if world.is_main:
                check_optimizer(optim, passed)
            with convert_errors_of_user_file("optim.name", optim.name):
                compare_sharded(optim, world.size)
            if world.is_main:
                passed("parameters sharded by FSDP2 get the values of full ones")

    return local_launcher.run_ranks(check_rank, 2, 1, lambda: None)
