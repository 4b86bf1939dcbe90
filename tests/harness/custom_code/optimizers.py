"""Custom optimizers: one that meets the requirements, and variants that violate one requirement each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

KEEPS = """import torch


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "foreach": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad)
                p.add_(state["mean"], alpha=-group["lr"])
"""


class Breach(NamedTuple):
    """A violation: the replaced text, its replacement, and a part of the error message."""

    of: str
    by: str
    told: str


BREACHES = {
    "no optimizer": Breach("class Own(torch.optim.Optimizer)", "class Own", "not a subclass of torch.optim.Optimizer"),
    "another class": Breach("class Own", "class Other", "has no class 'Own'; it has Other"),
    "no defaults": Breach('{"lr": lr, "foreach": False}', "{}", "own.py:8: the parameter groups have no lr: pass"),
    "an error": Breach("super()", "1 / 0; super()", "own.py:6: ZeroDivisionError: division by zero"),
    "no step": Breach("def step", "def stride", "the class has no method step(self)"),
    "needs a closure": Breach("closure=None", "closure", "own.py:8: step() requires the argument closure"),
    "calls a closure": Breach("        for group", "        closure()\n        for group", "own.py:10: TypeError"),
    "rate outside the groups": Breach('group["lr"]', "0.1", "step() changes parameters although"),
    "rate of the first step": Breach(
        '-group["lr"]', '-self.state[p].setdefault("lr", group["lr"])', "uses the learning rate of the first step"
    ),
    "add for add_": Breach(
        "p.add_(", "p.add(", "5 steps leave the parameter 0.weight unchanged: use p.add_, which changes"
    ),
    "state elsewhere": Breach(
        "self.state[p]", "vars(self).setdefault('memory', {}).setdefault(p, {})", "steps after a resume differ"
    ),
    "takes inf": Breach(
        "    @torch", "    _step_supports_amp_scaling = True\n\n    @torch", "a step that GradScaler skips"
    ),
    "divides by zero": Breach(
        "if not state:",
        "p.grad.div_(p.grad.norm())\n                if not state:",
        "zero gradients make parameters NaN or infinite",
    ),
    "every gradient is needed": Breach("if p.grad is None", "if False", "own.py:17: TypeError"),
    "another foreach": Breach(
        '-group["lr"]', '-group["lr"] * (1 + group["foreach"])', "foreach=True computes different parameters"
    ),
}


def write_own(folder: Path, breach: Breach | None = None) -> str:
    """Write the file, with a violation if one is given. Return the value of optim.name."""
    text = KEEPS
    if breach is not None:
        assert breach.of in text
        text = text.replace(breach.of, breach.by)
    file = folder / "own.py"
    file.write_text(text)
    return f"{file}:Own"
