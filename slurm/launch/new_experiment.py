"""The verb `new-experiment`: create an experiment that trains and passes its tests without any changes.

The files of the experiment are created from the templates in the folder `templates/`. This module does not import
torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from common.config.config import ROOT
from common.runs.folder import convert_disk_errors, write_atomic
from common.system.errors import UserError
from slurm.arguments import EXPERIMENT_NAME

TEMPLATES = Path(__file__).parent / "templates"
SAMPLE_NAME = "my_experiment"
"""Placeholder for the experiment's name in the templates and in the paths below."""
FILES = {
    "experiments/my_experiment.py": ("script.py.txt", "training script: network, loss, and step"),
    "configs/my_experiment.py": ("settings.py.txt", "settings: types, ranges, defaults, and documentation"),
    "configs/my_experiment.yaml": ("values.yaml.txt", "values that differ from the defaults"),
    "experiments/my_experiment.md": ("page.md.txt", "page: question, answer, method, commands, and measurements"),
}
"""Template and purpose of each new file. The keys are the paths of the files relative to the root of the project."""
RESERVED_PATHS = ("experiments/my_experiment", "configs/my_experiment", "tests/benchmarks/my_experiment.py")
README_ROW = re.compile(r"\| \[\w+\]\(experiments/\w+\.py\) \|.*\n")


def check_new_name(name: str) -> None:
    """Raise UserError if `name` is not a valid name for a new experiment."""
    if not name:
        raise UserError("NAME is missing; run, for example, make new-experiment NAME=my_mlp")
    if not EXPERIMENT_NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UserError(
            f"NAME={name!r} is invalid; use at most 64 lowercase letters, digits, and underscores, starting with a "
            "letter (for example, my_mlp); Python keywords are not allowed"
        )
    for sample_path in (*FILES, *RESERVED_PATHS):
        path = sample_path.replace(SAMPLE_NAME, name)
        if (ROOT / path).exists():
            raise UserError(f"NAME={name}: {path} already exists; choose another name")
    if name in sys.stdlib_module_names or is_importable(name):
        raise UserError(
            f"NAME={name}: the new script would hide an installed module, or a module of this project, with the same "
            f"name; choose another name, such as my_{name}"
        )


def is_importable(name: str) -> bool:
    """Return whether a module with this name can be imported.

    Python would also find a folder of the checkout that is not a package, such as runs. These folders are ignored.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is not None:
        return spec is not None
    return any(Path(folder).parent != ROOT for folder in spec.submodule_search_locations or ())


def fill_template(file_name: str, name: str) -> str:
    """Return the text of a template with the placeholder replaced by the experiment's name."""
    return (TEMPLATES / file_name).read_text().replace(SAMPLE_NAME, name)


def add_readme_row(readme: str, name: str) -> str:
    """Return the text of the README with a new row for the experiment at the end of the table of experiments.

    A README without a table of experiments is returned unchanged.
    """
    rows = list(README_ROW.finditer(readme))
    if not rows:
        return readme
    end = rows[-1].end()
    return readme[:end] + fill_template("readme_row.md.txt", name) + readme[end:]


def write_all_or_none(new_texts: Mapping[Path, str], changed_texts: Mapping[Path, str]) -> None:
    """Create the new files, then rewrite the changed files. If an error occurs, remove the new files.

    Raises UserError if a new file already exists or cannot be written.
    """
    created: list[Path] = []
    try:
        for path, text in new_texts.items():
            with convert_disk_errors(path), open(path, "x") as file:
                created.append(path)
                file.write(text)
        for path, text in changed_texts.items():
            write_atomic(path, text)
    except BaseException as error:
        for path in created:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise UserError(f"{error.filename} already exists; choose another NAME") from None
        raise


def main(args: argparse.Namespace) -> int:
    """Create the files of a new experiment, print the next commands, and return the exit status."""
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
        purposes["README.md"] = "row in the table of experiments"

    write_all_or_none(new_texts, changed_texts)
    width = max(map(len, purposes)) + 2
    for path, purpose in purposes.items():
        print(f"{path:<{width}}{purpose}")
    print(f"next: make exp NAME={name}")
    print(f'      make test TESTS="tests/experiments tests/commands/test_readme.py -k {name}"')
    print('      see "Adding an experiment" in CONTRIBUTING.md for what to change')
    return 0
