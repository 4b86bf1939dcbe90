"""Checks that a custom optimizer works with learning rate schedules, checkpoints, GradScaler, and FSDP2."""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from common.checkpoint import state_dicts
from common.config.custom_function import convert_errors_of_user_file
from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.training import learning_rate, optimizers
from configs.shared import Launch, Optim

RATE = 0.1
RELATIVE_TOLERANCE = 1e-12  # for float64 results that differ only in the order of operations
SEVERAL_STEPS = 5  # number of steps within which every parameter must change; an optimizer may skip some steps


class OptimizerTrial:
    """A small float64 model with three layers, and the optimizer to be checked.

    Initial values and gradients are the same in all trials. `shard` is called with the model before the optimizer is
    built. Each trial seeds torch's global random number generator.
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
        """Set all gradients to the random values of step `number`, multiplied by `scale`."""
        torch.manual_seed(number)  # also affects an optimizer that draws random numbers
        for _, parameter in self.parameters:
            gradient = scale * torch.randn(parameter.shape, dtype=torch.float64)
            parameter.grad = state_dicts.shard_like(gradient, parameter)

    def take_steps(self, numbers: Iterable[int], rate: float = RATE, scale: float = 1.0) -> OptimizerTrial:
        """Take one step for each step number in `numbers`, and return this trial.

        The number of a step determines its gradients. As in a run, the learning rate is set before each step.
        """
        for number in numbers:
            learning_rate.set_learning_rate(self.optimizer, rate)
            self.set_gradients(number, scale)
            self.optimizer.step()
        return self

    def copy_parameters(self) -> dict[str, Tensor]:
        """Return copies of the full (unsharded) parameters by name."""
        return {name: state_dicts.gather_full_tensor(parameter.detach()).clone() for name, parameter in self.parameters}


def find_differing_parameter(first: OptimizerTrial, second: OptimizerTrial, tolerance: float = 0.0) -> str | None:
    """Return the name of a parameter that differs between two trials, if any.

    `tolerance` is relative to the largest absolute value of the parameter. NaN differs from every value.
    """
    references = second.copy_parameters()
    for name, tensor in first.copy_parameters().items():
        difference = (tensor - references[name]).abs().max()
        if not difference <= tolerance * tensor.abs().max():
            return name
    return None


# ---- checks, which raise ValueError with the problem and a remedy


def check_step_interface(optim: Optim) -> None:
    """Check that a run can construct the optimizer and call `step()`."""
    optimizer = OptimizerTrial(optim).optimizer
    step = inspect.unwrap(type(optimizer).step)
    if step is inspect.unwrap(Optimizer.step):
        raise ValueError("the class has no method step(self): define one that updates parameters from their gradients")
    parameters = list(inspect.signature(step).parameters.values())[1:]
    positional = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    required = [parameter.name for parameter in positional if parameter.default is parameter.empty]
    if required:
        problem = f"step() requires the argument {required[0]}"
        raise ValueError(f"{problem}, but a run calls step() without arguments: give {required[0]} a default value")
    if any(not math.isclose(group.get("lr", math.nan), RATE) for group in optimizer.param_groups):
        problem = "the parameter groups have no lr"
        raise ValueError(f'{problem}: pass {{"lr": lr}} to super().__init__() and read group["lr"] in step()')


def check_learning_rate(optim: Optim) -> None:
    """Check that each step uses the learning rate that is set in the parameter groups."""
    start = OptimizerTrial(optim)
    numbers = range(SEVERAL_STEPS)
    if find_differing_parameter(start, OptimizerTrial(optim).take_steps(numbers, 0.0)):
        problem = "step() changes parameters although the learning rate is 0"
        raise ValueError(f'{problem}: read group["lr"], which the schedule sets before each step')

    stepped = OptimizerTrial(optim).take_steps(numbers)
    before = start.copy_parameters()
    after = stepped.copy_parameters()
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    if unchanged:
        problem = f"{SEVERAL_STEPS} steps leave the parameter {unchanged[0]} unchanged"
        raise ValueError(f"{problem}: use p.add_, which changes p in place; p.add returns a new tensor")

    slower = OptimizerTrial(optim).take_steps(numbers)
    numbers = range(SEVERAL_STEPS, 2 * SEVERAL_STEPS)
    if not find_differing_parameter(stepped.take_steps(numbers), slower.take_steps(numbers, RATE / 2)):
        problem = "every step uses the learning rate of the first step"
        raise ValueError(f'{problem}: read group["lr"], which the schedule sets before each step')


def check_steps_after_resume(optim: Optim) -> None:
    """Check that later steps depend only on state that a checkpoint contains for each parameter."""
    trial = OptimizerTrial(optim).take_steps([1, 2, 3])
    file = io.BytesIO()
    state = state_dicts.collect_optimizer_state(trial.optimizer, trial.parameters)
    torch.save(state_dicts.convert_to_plain_values([trial.copy_parameters(), state], "optimizer"), file)
    file.seek(0)
    parameters, state = torch.load(file, weights_only=True)

    resumed = OptimizerTrial(optim)
    state_dicts.load_tensors(resumed.parameters, parameters)
    state_dicts.load_optimizer_state(resumed.optimizer, resumed.parameters, state)
    if find_differing_parameter(trial.take_steps([4, 5]), resumed.take_steps([4, 5])):
        problem = "steps after a resume differ from those of an uninterrupted run"
        raise ValueError(f"{problem}: store everything that later steps need in self.state[parameter]")


def check_skipped_step(optim: Optim) -> None:
    """Check that a step skipped by GradScaler has no effect, even the first step."""
    trial = OptimizerTrial(optim)
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))  # initializes the scale
    for number in (0, 1, 0, 2):
        # GradScaler skips step 0 because its gradients are infinite.
        trial.set_gradients(number, scaler.get_scale() if number else math.inf)
        scaler.step(trial.optimizer)
        scaler.update()
    if find_differing_parameter(OptimizerTrial(optim).take_steps([1, 2]), trial, RELATIVE_TOLERANCE):
        raise ValueError("a step that GradScaler skips because of an infinite gradient changes parameters or state")


def check_zero_gradients(optim: Optim) -> None:
    """Check that parameters remain finite when all gradients are zero."""
    trial = OptimizerTrial(optim).take_steps([1, 2], scale=0.0).take_steps([3])
    if not all(tensor.isfinite().all() for tensor in trial.copy_parameters().values()):
        raise ValueError("zero gradients make parameters NaN or infinite: add a small epsilon to the divisor")


def check_missing_gradient(optim: Optim) -> None:
    """Check that a step changes all parameters except those without a gradient."""
    trial = OptimizerTrial(optim)
    before = trial.copy_parameters()
    name, parameter = trial.parameters[0]
    for number in range(SEVERAL_STEPS):
        trial.set_gradients(number)
        parameter.grad = None
        trial.optimizer.step()
    after = trial.copy_parameters()
    if not torch.equal(after.pop(name), before[name]):
        raise ValueError("step() changes a parameter that has no gradient: skip parameters whose grad is None")
    if any(torch.equal(tensor, before[other]) for other, tensor in after.items()):
        problem = "step() does not update some parameters if another parameter has no gradient"
        raise ValueError(f"{problem}: skip only the parameters whose grad is None")


def check_foreach_and_fused(optim: Optim) -> None:
    """Check that the foreach and fused implementations, if any, match the loop over parameters."""
    options = ("foreach", "fused")

    def take_steps_with(option: str) -> OptimizerTrial:
        trial = OptimizerTrial(optim)
        for group in trial.optimizer.param_groups:
            for name in options:
                if name in group:
                    group[name] = name == option
        return trial.take_steps([1, 2, 3])

    group = OptimizerTrial(optim).optimizer.param_groups[0]
    for option in options:
        if option not in group:
            continue
        # "loop" is neither foreach nor fused, so both options are off.
        if find_differing_parameter(take_steps_with("loop"), take_steps_with(option), RELATIVE_TOLERANCE):
            raise ValueError(f"{option}=True computes different parameters than {option}=False")


CHECKS: dict[str, Callable[[Optim], None]] = {
    "the optimizer can be constructed, and step() can be called": check_step_interface,
    "each step uses the learning rate that the schedule sets": check_learning_rate,
    "steps after a resume equal those of an uninterrupted run": check_steps_after_resume,
    "a step that GradScaler skips has no effect": check_skipped_step,
    "parameters remain finite when all gradients are zero": check_zero_gradients,
    "parameters without a gradient do not change": check_missing_gradient,
    "foreach and fused implementations match the loop over parameters": check_foreach_and_fused,
}
"""Maps the message that is printed for a passed check to the function that performs the check."""


def check_optimizer(optim: Optim, passed: Callable[[str], object] = lambda name: None) -> None:
    """Check an optimizer, and call `passed` with the name of each passed check.

    Do not call this function in a process that forks, because the user's file is executed and may start threads. Raises
    UserError if a check fails.
    """
    with torch.random.fork_rng([]):
        step: Any = inspect.unwrap(type(OptimizerTrial(optim).optimizer).step)
        is_custom = step.__code__.co_filename == optim.name.rpartition(":")[0]
        for name, check in CHECKS.items():
            with convert_errors_of_user_file("optim.name", optim.name, step if is_custom else None):
                check(optim)
            passed(name)


# ---- checks of techniques that divide parameters or their states among ranks


def check_independent_parameters(optim: Optim, remedy: str) -> None:
    """Raise UserError if the steps of a parameter change when the other parameters have no gradients.

    `remedy` contains the settings that let every rank update all parameters.
    """
    numbers = [1, 2, 3]
    with torch.random.fork_rng([]), convert_errors_of_user_file("optim.name", optim.name):
        trial = OptimizerTrial(optim)
        for number in numbers:
            for part in (0, 1):
                trial.set_gradients(number)
                for _, parameter in trial.parameters[part::2]:
                    parameter.grad = None
                trial.optimizer.step()
        if find_differing_parameter(OptimizerTrial(optim).take_steps(numbers), trial, RELATIVE_TOLERANCE):
            problem = "the step of a parameter depends on the other parameters, which other ranks update"
            raise ValueError(f"{problem}; use {remedy}")


def check_sharded_parameters(optim: Optim, ranks: int) -> None:
    """Raise ValueError if the optimizer computes different values for parameters sharded by FSDP2.

    `ranks` is the number of ranks, all of which must call this function.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # this import takes two seconds

    mesh = init_device_mesh("cpu", (ranks,))
    sharded = OptimizerTrial(optim, lambda model: fully_shard(model, mesh=mesh)).take_steps([1, 2, 3])
    if find_differing_parameter(OptimizerTrial(optim).take_steps([1, 2, 3]), sharded, RELATIVE_TOLERANCE):
        problem = "parameters sharded by FSDP2 get different values than full parameters"
        raise ValueError(f"{problem}: compute each norm from full_tensor(), not from a shard of the tensor")


def check_optimizer_on_two_ranks(optim: Optim, passed: Callable[[str], object]) -> int:
    """Check an optimizer on two forked ranks, including with sharded parameters. Return the exit status."""

    def check_rank(rank_info: RankInfo) -> None:
        with rendezvous.join_world(rank_info, Launch(device="cpu")) as world:
            if world.is_main:
                check_optimizer(optim, passed)
            with convert_errors_of_user_file("optim.name", optim.name):
                check_sharded_parameters(optim, world.size)
            if world.is_main:
                passed("parameters sharded by FSDP2 get the same values as full parameters")

    return local_launcher.run_ranks(check_rank, 2, 1, lambda: None)
