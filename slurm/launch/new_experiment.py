"""The verb `new-experiment`: write the files of a new experiment, which trains and passes its tests unchanged.

The templates are in the folder templates/. Imports no torch.
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
from slurm.arguments import EXPERIMENT_NAME

TEMPLATES = Path(__file__).parent / "templates"
SAMPLE_NAME = "my_experiment"
"""Stands for the experiment's name in the templates and in the paths below."""
FILES = {
    "experiments/my_experiment.py": ("script.py.txt", "the training: network, loss, step"),
    "configs/my_experiment.py": ("settings.py.txt", "its settings: type, range, default, documentation"),
    "configs/my_experiment.yaml": ("values.yaml.txt", "the values that differ from the defaults"),
    "experiments/my_experiment.md": ("page.md.txt", "its page: question, method, commands, measurements"),
}
"""Template and purpose of each new file, by its path below the root."""
RESERVED_PATHS = ("experiments/my_experiment", "configs/my_experiment", "tests/benchmarks/my_experiment.py")
README_ROW = re.compile(r"\| \[\w+\]\(experiments/\w+\.py\) \|.*\n")


def check_new_name(name: str) -> None:
    """Raise UserError unless a new experiment can have this name."""
    if not name:
        raise UserError("NAME is missing; write make new-experiment NAME=my_mlp")
    if not EXPERIMENT_NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UserError(
            f"NAME={name!r} is invalid; write a name such as my_mlp: at most 64 lowercase letters, digits and "
            "underscores, starting with a letter, and not a Python keyword"
        )
    for sample_path in (*FILES, *RESERVED_PATHS):
        path = sample_path.replace(SAMPLE_NAME, name)
        if (ROOT / path).exists():
            raise UserError(f"NAME={name}: {path} exists already; choose another name")
    if name in sys.stdlib_module_names or is_importable(name):
        raise UserError(
            f"NAME={name}: a module of Python, of a package or of this project has this name, and experiments/ comes "
            f"first on a script's import path; choose another name, such as my_{name}"
        )


def is_importable(name: str) -> bool:
    """Check for an importable module; a folder of the checkout without modules, such as runs, does not count."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is not None:
        return spec is not None
    return any(Path(folder).parent != ROOT for folder in spec.submodule_search_locations or ())


def fill_template(file_name: str, name: str) -> str:
    """Return the text of a template with the experiment's name."""
    return (TEMPLATES / file_name).read_text().replace(SAMPLE_NAME, name)


def add_readme_row(readme: str, name: str) -> str:
    """Return the README with a row for the experiment at the end of its table, if it has one."""
    rows = list(README_ROW.finditer(readme))
    if not rows:
        return readme
    end = rows[-1].end()
    return readme[:end] + fill_template("readme_row.md.txt", name) + readme[end:]


def write_all_or_none(new_texts: Mapping[Path, str], changed_texts: Mapping[Path, str]) -> None:
    """Write new files and change others; undo all after an error. Raises UserError."""
    created: list[Path] = []
    try:
        for path, text in new_texts.items():
            with disk_errors(path), open(path, "x") as file:
                created.append(path)
                file.write(text)
        for path, text in changed_texts.items():
            write_atomic(path, text)
    except BaseException as error:
        for path in created:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise UserError(f"{error.filename} exists already; choose another NAME") from None
        raise


def main(args: argparse.Namespace) -> int:
    """Write the files of a new experiment; print them and the next commands. Returns the exit status."""
    name = args.name
    check_new_name(name)
    new_texts: dict[Path, str] = {}
    purposes: dict[str, str] = {}
    for sample_path, (template, purpose) in FILES.items():
        path = sample_path.replace(SAMPLE_NAME, name)
        new_texts[ROOT / path] = fill_template(template, name)
        purposes[path] = purpose

    changed_texts: dict[Path, str] = {}
    readme = ROOT / "README.md"
    old_readme = readme.read_text() if readme.is_file() else ""
    new_readme = add_readme_row(old_readme, name)
    if new_readme != old_readme:
        changed_texts[readme] = new_readme
        purposes["README.md"] = "its row in the table of experiments"

    write_all_or_none(new_texts, changed_texts)
    width = max(map(len, purposes)) + 2
    for path, purpose in purposes.items():
        print(f"{path:<{width}}{purpose}")
    print(f"next: make exp NAME={name}")
    print(f'      make test TESTS="tests/experiments tests/commands/test_readme.py -k {name}"')
    print('      CONTRIBUTING.md, "Adding an experiment": what to change')
    return 0
