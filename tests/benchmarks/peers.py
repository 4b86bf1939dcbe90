"""The same training loop written with other libraries: bare PyTorch, Lightning's Trainer and Fabric, Accelerate.

Each takes a model, batches and the learning rate of each step, trains, and leaves the model trained. The
optimizer is torch's fused SGD with Nesterov momentum. Each function imports its library, so that no peer pays for the
imports of another one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from configs.shared import Optim

Batches = Iterable[tuple[Tensor, Tensor]]
Peer = Callable[[nn.Module, Batches, Sequence[float], Optim], None]


def sgd(model: nn.Module, settings: Optim) -> Optimizer:
    parameters = model.parameters()
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum, nesterov=True, fused=True)


def bare(model: nn.Module, batches: Batches, rates: Sequence[float], settings: Optim) -> None:
    """A loop of plain PyTorch."""
    optimizer = sgd(model, settings)
    model.train()
    for (x, y), rate in zip(batches, rates, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def fabric(model: nn.Module, batches: Batches, rates: Sequence[float], settings: Optim) -> None:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = runner.setup(model, sgd(model, settings))
    wrapped.train()
    for (x, y), rate in zip(batches, rates, strict=True):
        optimizer.zero_grad()
        runner.backward(F.cross_entropy(wrapped(x), y))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def accelerate(model: nn.Module, batches: Batches, rates: Sequence[float], settings: Optim) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, sgd(model, settings))
    wrapped.train()
    for (x, y), rate in zip(batches, rates, strict=True):
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(wrapped(x), y))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def trainer(model: nn.Module, batches: Batches, rates: Sequence[float], settings: Optim) -> None:
    """Lightning's Trainer, which logs the loss of every step; a scheduler sets the rate."""
    fit(model, batches, rates, settings, logs=True)


def trainer_lean(model: nn.Module, batches: Batches, rates: Sequence[float], settings: Optim) -> None:
    """The same Trainer with a module that logs nothing and sets the rate itself."""
    fit(model, batches, rates, settings, logs=False)


def fit(model: nn.Module, batches: Batches, rates: Sequence[float], settings: Optim, *, logs: bool) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            if logs:
                self.log("loss", loss)
            else:
                for group in self.trainer.optimizers[0].param_groups:
                    group["lr"] = rates[number]
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = sgd(model, settings)
            if not logs:
                return optimizer
            factor = [rate / settings.lr for rate in rates] + [0.0]
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor[step])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    with tempfile.TemporaryDirectory() as folder:
        runner = lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder, log_every_n_steps=1 if logs else None
        )
        runner.fit(Module(), batches)
