"""Write custom optimizers: a valid one, and variants that violate one requirement each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

VALID_OPTIMIZER = """import torch


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


class Violation(NamedTuple):
    """A change of the valid optimizer, and a part of the error message about it."""

    replaced: str
    replacement: str
    message_part: str


VIOLATIONS = {
    "no optimizer": Violation(
        "class Own(torch.optim.Optimizer)", "class Own", "not a subclass of torch.optim.Optimizer"
    ),
    "another class": Violation("class Own", "class Other", "has no class 'Own'; it has Other"),
    "no defaults": Violation('{"lr": lr, "foreach": False}', "{}", "own.py:8: the parameter groups have no lr: pass"),
    "an error": Violation("super()", "1 / 0; super()", "own.py:6: ZeroDivisionError: division by zero"),
    "no step": Violation("def step", "def stride", "the class has no method step(self)"),
    "needs a closure": Violation("closure=None", "closure", "own.py:8: step() requires the argument closure"),
    "calls a closure": Violation("        for group", "        closure()\n        for group", "own.py:10: TypeError"),
    "rate outside the groups": Violation('group["lr"]', "0.1", "step() changes parameters although"),
    "rate of the first step": Violation(
        '-group["lr"]', '-self.state[p].setdefault("lr", group["lr"])', "uses the learning rate of the first step"
    ),
    "add for add_": Violation(
        "p.add_(", "p.add(", "5 steps leave the parameter 0.weight unchanged: use p.add_, which changes"
    ),
    "state elsewhere": Violation(
        "self.state[p]", "vars(self).setdefault('memory', {}).setdefault(p, {})", "steps after a resume differ"
    ),
    "takes inf": Violation(
        "    @torch", "    _step_supports_amp_scaling = True\n\n    @torch", "a step that GradScaler skips"
    ),
    "divides by zero": Violation(
        "if not state:",
        "p.grad.div_(p.grad.norm())\n                if not state:",
        "zero gradients make parameters NaN or infinite",
    ),
    "every gradient is needed": Violation("if p.grad is None", "if False", "own.py:17: TypeError"),
    "another foreach": Violation(
        '-group["lr"]', '-group["lr"] * (1 + group["foreach"])', "foreach=True computes different parameters"
    ),
}
MIXING = Violation(
    'p.add_(state["mean"]',
    'norms = [q.grad.norm() for q in group["params"] if q.grad is not None]\n'
    '                p.add_(state["mean"] / (1 + sum(norms))',
    "the step of a parameter depends on the other parameters, which other ranks update",
)
"""A valid optimizer that divides the steps of all parameters by the sum of their norms."""


def write_optimizer(folder: Path, violation: Violation | None = None) -> str:
    """Write an optimizer, with a violation if one is given. Return the value of optim.name."""
    text = VALID_OPTIMIZER
    if violation is not None:
        assert violation.replaced in text
        text = text.replace(violation.replaced, violation.replacement)
    file = folder / "own.py"
    file.write_text(text)
    return f"{file}:Own"
