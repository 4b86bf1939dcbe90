"""Trial of a custom network and a custom loss: one forward and backward pass on a few training samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from common.config.custom_function import convert_errors_of_user_file, load_function
from common.data.prepare import PreparedDataset
from common.data.samples import Images, open_samples
from common.models.networks import build_network
from common.models.sample_dropout import get_dropout
from common.system.errors import UserError
from common.system.seeds import derive_seed
from common.training.losses import ALTERNATIVES, find_wrong_shape
from common.training.run_data import choose_loss
from configs.shared import TrainingExperiment

SAMPLES = 8  # several samples, so that a loss that mixes samples is detected
TOLERANCE = 1e-4  # relative difference of a loss that is computed alone and together with other samples
LOSS_USAGE = "function(outputs, targets) must return a tensor [N] with one loss per sample"


def try_training(cfg: TrainingExperiment, prepared: PreparedDataset) -> None:
    """Compute outputs, losses and gradients for the first training samples.

    Raises UserError, with file and line where possible, if the network or the loss does not work with the data set.
    """
    torch.set_num_threads(1)  # this process is a fork, and threads of the original process do not exist here
    torch.manual_seed(derive_seed(cfg.seed, "init"))
    train = open_samples(prepared, "train")
    dtype = getattr(torch, cfg.dtype)
    samples = slice(0, min(SAMPLES, len(train)))
    targets = train.load_targets(samples, torch.device("cpu"), dtype)
    model = getattr(cfg, "model", "")
    network: nn.Module | None = None
    outputs = torch.randn(len(targets), *train.output_shape, dtype=dtype, requires_grad=True)
    if ":" in model:
        inputs = train.load_inputs(samples, torch.device("cpu"), dtype)
        network = build_network(model, train.shape, train.outputs).to(dtype)
        check_network(cfg, model, network)
        with convert_errors_of_user_file("model", model, type(network).forward):
            outputs = compute_layers(network, inputs) if cfg.splits_network else network(inputs)
            check_outputs(cfg.loss, outputs, targets, train)
    if ":" in cfg.loss:
        check_custom_loss(cfg.loss, outputs, targets)
    if network is not None:
        loss = choose_loss(cfg, train)(outputs, targets, reduction="sum")
        check_gradients(cfg, model, network, loss)


def check_network(cfg: TrainingExperiment, value: str, network: nn.Module) -> None:
    """Raise UserError if the experiment cannot train the network."""
    if cfg.splits_network and not isinstance(network, nn.Sequential):
        problem = "this experiment splits the network into stages, so the class must be a subclass of nn.Sequential"
        raise UserError(
            f"model={value}: {problem} whose children are the layers; data parallelism accepts any nn.Module"
        )
    if get_dropout(cfg) and not isinstance(network, nn.Sequential):
        problem = "the setting dropout inserts a layer before the last layer of an nn.Sequential"
        raise UserError(
            f"model={value}: {problem}; omit dropout, and add dropout layers to the network instead "
            "(their masks depend on the number of ranks)"
        )
    for name, module in network.named_modules():
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            layer = f"the layer {name} ({type(module).__name__})"
            problem = f"the sizes of {layer} are unknown before the first forward pass"
            raise UserError(f"model={value}: {problem}; use a layer with known sizes, such as nn.Linear")
    for name, parameter in network.named_parameters():
        if parameter.dim() == 0 and not getattr(cfg, "accepts_scalar_parameters", True):
            problem = f"the parameter {name} is a scalar, which these settings do not support"
            raise UserError(f"model={value}: {problem}; use a parameter of the shape [1]")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"model={value}: the network has no trainable parameters; register its layers as attributes")


def compute_layers(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs of a network whose layers may be in different stages. Raises TypeError or ValueError."""
    outputs = inputs
    for name, layer in network.named_children():
        outputs = layer(outputs)
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            raise TypeError(f"the layer {name} returned a {type(outputs).__name__}; return one float tensor")
        if outputs.shape[:1] != inputs.shape[:1]:
            problem = f"for {len(inputs)} samples, the layer {name} returned the shape {list(outputs.shape)}"
            raise ValueError(f"{problem}; return one row for each sample")
    return outputs


def check_outputs(loss: str, outputs: Any, targets: Tensor, train: Images) -> None:
    """Raise TypeError or ValueError if the outputs of a custom network do not fit a built-in loss."""
    count = len(targets)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        raise TypeError(f"forward returned a {type(outputs).__name__}; return a float tensor")
    expected = None
    if loss == "cross_entropy":
        expected = [count, *train.output_shape]
    elif loss == "mse" and not train.has_labels and outputs.numel() != targets.numel():
        expected = list(targets.shape)
    if expected is not None and list(outputs.shape) != expected:
        problem = f"for {count} samples, forward returned the shape {list(outputs.shape)}"
        raise ValueError(f"{problem}; loss={loss} needs {expected}")
    if len(outputs) != count:
        raise ValueError(f"for {count} samples, forward returned the shape {list(outputs.shape)}; return one row each")


def compute_losses(function: Callable[..., Any], outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of samples that a custom loss computes. Raises ValueError if their shape is wrong."""
    losses = function(outputs, targets)
    problem = find_wrong_shape(losses, len(targets))
    if problem:
        raise ValueError(problem)
    return cast(Tensor, losses)


def check_custom_loss(value: str, outputs: Tensor, targets: Tensor) -> None:
    """Raise UserError if a custom loss does not return one independent loss per sample."""
    function = load_function("loss", value, ALTERNATIVES)
    with convert_errors_of_user_file("loss", value, function, LOSS_USAGE):
        losses = compute_losses(function, outputs, targets)
        for number in range(len(targets)):
            row = slice(number, number + 1)
            alone = compute_losses(function, outputs[row], targets[row])
            if not torch.allclose(alone, losses[row], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                problem = f"the loss of sample {number} depends on the other samples of the batch"
                shapes = f"outputs {list(outputs.shape)}, targets {list(targets.shape)}"
                raise ValueError(f"{problem} ({shapes}); compute each loss from its own output and target")
        if not losses.isfinite().all():
            raise ValueError("the losses of the first samples contain NaN or infinity")
        if not losses.requires_grad:
            raise ValueError(
                "the losses do not depend on the outputs, so there are no gradients; do not detach outputs"
            )


def check_gradients(cfg: TrainingExperiment, value: str, network: nn.Module, loss: Tensor) -> None:
    """Raise UserError if a trainable parameter gets no gradient, unless the experiment supports such parameters."""
    with convert_errors_of_user_file("model", value, type(network).forward):
        loss.backward()
    if cfg.ranks_have_separate_models or getattr(cfg, "find_unused_parameters", False):
        return
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            remedy = "use the parameter in forward, or remove it"
            if hasattr(cfg, "find_unused_parameters"):
                remedy += ", or set find_unused_parameters=true"
            raise UserError(f"model={value}: the parameter {name} gets no gradient; {remedy}")
