"""The verb `new-experiment`: write the files of a new experiment that trains and passes its tests as it is.

Imports no torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from common.core.config import ROOT
from common.core.errors import UserError
from common.runs.folder import disk_errors, write_atomic
from slurm.arguments import NAME

SAMPLE = "my_experiment"  # in the texts below, in place of the name
SCRIPT = '''\
"""One sentence: the technique and its source (author, year, arXiv id).

    python experiments/my_experiment.py         two ranks on this machine
    make exp NAME=my_experiment NODES=2         on a cluster

Every rank trains the same network on its shard of each batch, and DDP averages their gradients.
"""

from __future__ import annotations

from common.api import Facts, Run, TrainState, build_optimizer, ddp, networks, score_replicated, start
from configs.my_experiment import Config

import torch.nn.functional as F


def main(cfg: Config, run: Run) -> None:
    # the network, one of common/models/networks.py: every rank draws the same weights
    inner = networks.SimpleNN(cfg.width, shape=run.sample_shape, classes=run.classes).to(run.device, run.dtype)
    model = ddp.wrap_ddp(inner, run.device)
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    batches = run.batches(shard=run.shard)
    ddp.warm_up_buckets(model, run.load_example(cfg.batch_plan.shard))
    state = TrainState([inner], optimizer, batches, run.world, replicated=True)

    for step in run.steps(state, lambda: score_replicated(inner, run)):
        with step:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(step.x), step.y)  # the mean over this rank's shard
            loss.backward()  # at its end every rank holds the mean gradient
            # the technique: what it does to the loss above, or to the gradients here
            optimizer.step()
            step.log(loss=loss.detach())
    run.report(Facts({"width": f"{cfg.width}"}))  # the rows that the experiment adds to the final table


if __name__ == "__main__":
    start(main, Config)
'''
SETTINGS = '''\
"""Settings of experiments/my_experiment.py."""

from __future__ import annotations

from dataclasses import dataclass

from configs.dataparallel import Replicated
from configs.shared import at_least


@dataclass
class Config(Replicated):
    """Settings of the experiment, beside those that all have."""

    width: int = at_least(2, 128)
    """Units of the first hidden layer; the second one has half as many."""
'''
VALUES = """\
# The values that differ from the defaults of the settings, such as those of one pass over MNIST.
epochs: 1
batch: 64
optim:
  lr: 0.02
"""
PAGE = """\
# my_experiment

**Question.** What does a second rank gain when both train a small network?

## Method

[my_experiment.py](my_experiment.py) gives each rank its shard of every batch and averages the gradients with DDP
([arXiv 2006.15704](https://arxiv.org/abs/2006.15704)), so that all ranks take the step that one would take.

## Commands

```sh
python experiments/my_experiment.py         # two ranks on this machine
make bench NAME=my_experiment               # the table below
```

## Measured

<!-- measured my_experiment/ranks -->
Not recorded yet: `make bench NAME=my_experiment/ranks` measures it, on a quiet machine.
<!-- end -->

## What surprises

Nothing has been measured yet.

## Exercises

1. Find the width from which two ranks process more samples a second than one.
"""
LINE = (
    "| [my_experiment](experiments/my_experiment.py) | data parallelism with DDP | not measured yet "
    "| [page](experiments/my_experiment.md) |\n"
)
FILES = {
    "experiments/my_experiment.py": (SCRIPT, "the training: network, loss, step"),
    "configs/my_experiment.py": (SETTINGS, "its settings: type, range, default, documentation"),
    "configs/my_experiment.yaml": (VALUES, "their values where these are not the defaults"),
    "experiments/my_experiment.md": (PAGE, "its page: question, method, commands, measurements"),
}
"""Text and purpose of the new files, below the root."""
ROW = re.compile(r"\| \[\w+\]\(experiments/\w+\.py\) \|.*\n")


def check_new_name(name: str) -> None:
    """Raise UserError unless a new experiment can have this name."""
    if not name:
        raise UserError("NAME is missing; write make new-experiment NAME=my_mlp")
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UserError(
            f"NAME={name!r}: write a name such as my_mlp: at most 64 small letters, digits and _, the first one a "
            "letter, and no keyword of Python"
        )
    taken = [*FILES, "experiments/my_experiment", "configs/my_experiment", "tests/benchmarks/my_experiment.py"]
    found = [path for path in (Path(one.replace(SAMPLE, name)) for one in taken) if (ROOT / path).exists()]
    if found:
        raise UserError(f"NAME={name}: {found[0]} exists already; choose another name")
    if name in sys.stdlib_module_names or is_importable(name):
        raise UserError(
            f"NAME={name}: a module of Python, of a package or of this project has this name, and experiments/ comes "
            f"first on a script's path; choose another one, such as my_{name}"
        )


def is_importable(name: str) -> bool:
    """Check for a module that can be imported; a folder of the checkout without one, such as runs, does not count."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is not None:
        return spec is not None
    return any(Path(folder).parent != ROOT for folder in spec.submodule_search_locations or ())


def add_readme_line(readme: str, name: str) -> str:
    """Return the README with a line for the experiment at the end of its table, unchanged where it has no table."""
    rows = list(ROW.finditer(readme))
    end = rows[-1].end() if rows else 0
    return readme[:end] + LINE.replace(SAMPLE, name) + readme[end:] if rows else readme


def write_all_or_none(texts: Mapping[Path, str], changed: Mapping[Path, str]) -> None:
    """Write new files and change others: all of them or none. Raises UserError, also for a new one that is there."""
    written = list[Path]()
    try:
        for path, text in texts.items():
            with disk_errors(path), open(path, "x") as file:
                written.append(path)
                file.write(text)
        for path, text in changed.items():
            write_atomic(path, text)
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise UserError(f"{error.filename} exists already; choose another NAME") from None
        raise


def main(given: argparse.Namespace) -> int:
    """Write the files of a new experiment, and print them and the next commands; returns the exit status."""
    name = given.name
    check_new_name(name)
    texts = {ROOT / path.replace(SAMPLE, name): text.replace(SAMPLE, name) for path, (text, _) in FILES.items()}
    readme = ROOT / "README.md"
    before = readme.read_text() if readme.is_file() else ""
    after = add_readme_line(before, name)
    write_all_or_none(texts, {readme: after} if after != before else {})
    shown = {path.replace(SAMPLE, name): purpose for path, (_, purpose) in FILES.items()}
    shown |= {"README.md": "its line in the table of experiments"} if after != before else {}
    width = max(map(len, shown)) + 2
    for path, purpose in shown.items():
        print(f"{path:<{width}}{purpose}")
    print(f"next: make exp NAME={name}")
    print(f'      make test TESTS="tests/experiments tests/commands/test_readme.py -k {name}"')
    print('      CONTRIBUTING.md, "Adding an experiment": what to change')
    return 0
