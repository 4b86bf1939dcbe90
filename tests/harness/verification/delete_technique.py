"""Delete a technique from a clone of the checkout, to show that no other code needs it.

    python -m tests.harness.verification.delete_technique local_sgd /tmp/clone

A technique can be deleted if it belongs to one experiment (`Entry.own_technique`). The program deletes the folder of
the technique, every file of experiments, configs and tests that is named after the technique or its experiment, its
records, and the table rows and list items of the pages that name one of these. It edits no code. The clone contains
the committed files only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from common.runs.folder import write_json
from common.system.errors import UserError, exit_on_user_error
from tests.benchmarks import tables
from tests.harness.experiments.registry import ENTRIES
from tests.harness.repository import ROOT

DELETABLE_TECHNIQUES = {entry.own_technique: entry.name for entry in ENTRIES if entry.own_technique}
"""Each technique that can be deleted, with its experiment."""
GIT_COMMAND = ("git", "-c", "user.name=deletion", "-c", "user.email=deletion@localhost", "-c", "commit.gpgsign=false")


def list_committed_files(folder: Path) -> list[str]:
    """Return the files of a folder in the commit that is checked out."""
    command = ["git", "ls-tree", "-r", "--name-only", "HEAD", "--", str(folder)]
    process = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return process.stdout.splitlines()


def clone_checkout(clone: Path) -> None:
    """Clone the commit that is checked out here, with an environment of the same packages and the clone's sources."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    venv.create(clone / ".venv", symlinks=True)
    packages = importlib.util.find_spec("pytest")
    assert packages
    assert packages.origin
    # A .pth file adds folders. It does not execute the .pth file that adds the sources of this checkout.
    (site_packages,) = (clone / ".venv/lib").glob("python*/site-packages")
    (site_packages / "clone.pth").write_text(f"{Path(packages.origin).parents[1]}\n{clone}\n")
    for program in Path(sys.executable).parent.iterdir():
        link = clone / ".venv/bin" / program.name
        if not link.exists():
            link.symlink_to(program)
    shutil.copy(clone / "requirements.txt", clone / ".venv/.ready")
    copy_bytecode(clone)


def copy_bytecode(clone: Path) -> None:
    """Copy this checkout's bytecode of the files that are equal in the clone, which is not compiled again there."""
    for file in clone.glob("[a-z]*/**/*.py"):
        original = ROOT / file.relative_to(clone)
        compiled = list((original.parent / "__pycache__").glob(f"{original.stem}.*.pyc"))
        if not compiled or original.read_bytes() != file.read_bytes():
            continue
        shutil.copystat(original, file)  # bytecode is valid for a source file with this time of change
        (file.parent / "__pycache__").mkdir(exist_ok=True)
        for bytecode in compiled:
            shutil.copy(bytecode, file.parent / "__pycache__")


def find_files(clone: Path, technique: str, experiment: str) -> list[Path]:
    """Return the files of a technique: its folders, and the files that are named after it or its experiment."""
    is_named = re.compile(rf"(^|_)({technique}|{experiment})(_|\.)")
    files = []
    for parent in ("common/techniques", "tests/unit/techniques"):
        files += [path for path in (clone / parent / technique).rglob("*") if path.is_file()]
    for folder in ("experiments", "configs", "tests"):
        files += [path for path in (clone / folder).rglob("*.*") if is_named.search(path.name)]
    return files


def list_shown_parts(pages: list[Path]) -> set[str]:
    """Return the recorded parts that pages show."""
    parts: set[str] = set()
    for page in pages:
        matches = tables.MARKED.finditer(page.read_text())
        parts.update(match.group(2) for match in matches)
    return parts


def delete_records(folder: Path, names: set[str]) -> None:
    """Delete recorded parts."""
    for file in folder.glob("*-*.json"):
        record = json.loads(file.read_text())
        remaining = {name: part for name, part in record["parts"].items() if name not in names}
        if len(remaining) < len(record["parts"]):
            write_json(file, record | {"parts": remaining})


def name_in_links(file: Path) -> str:
    """Return the end of links to a file, with its folder if many folders have a file of this name."""
    return f"{file.parent.name}/{file.name}" if file.name in ("README.md", "__init__.py") else file.name


def delete_rows(text: str, is_deleted: re.Pattern[str]) -> str:
    """Return the text of a page without the table rows and list items that match. Items may have several lines."""
    table_row = r"^\|.*\n"
    list_item = r"^ *(?:-|\d+\.) .*\n(?:^ +(?!-|\d+\.).*\n)*"
    for block in re.findall(f"{table_row}|{list_item}", text, re.MULTILINE):
        if is_deleted.search(block):
            text = text.replace(block, "")
    return text


def delete_technique(technique: str, clone: Path) -> None:
    """Clone the checkout into the new folder `clone`, and delete the technique there."""
    experiment = DELETABLE_TECHNIQUES[technique]
    folder = Path("common/techniques") / technique
    if not list_committed_files(folder):
        raise UserError(f"{folder} is not committed, and a clone has only committed files; commit it first")
    clone_checkout(clone)
    files = find_files(clone, technique, experiment)
    tests = set()
    for file in files:
        if file.suffix == ".py":
            tests.update(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    parts_of_deleted_pages = list_shown_parts([file for file in files if file.suffix == ".md"])
    for file in files:
        file.unlink(missing_ok=True)  # a file can be found in two ways
    shutil.rmtree(clone / "common/techniques" / technique)

    pages = [page for page in clone.rglob("*.md") if page.name != "CHANGELOG.md"]
    unused_parts = parts_of_deleted_pages - list_shown_parts(pages)
    delete_records(clone / "tests/benchmarks/recorded", unused_parts)
    in_code = "|".join([technique, experiment, *tests])
    links = "|".join(re.escape(name_in_links(file)) for file in files)
    is_deleted = re.compile(rf"`(?:{in_code})`|\]\([^)]*\b(?:{links})[#)]")
    for page in pages:
        page.write_text(delete_rows(page.read_text(), is_deleted))

    subprocess.run([*GIT_COMMAND, "add", "--all"], cwd=clone, check=True)
    subprocess.run([*GIT_COMMAND, "commit", "--quiet", f"--message=Delete {technique}"], cwd=clone, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("technique", choices=sorted(DELETABLE_TECHNIQUES))
    parser.add_argument("clone", type=Path, help="a new folder for the clone")
    arguments = parser.parse_args()
    with exit_on_user_error():
        delete_technique(arguments.technique, arguments.clone.absolute())
    subprocess.run(["git", "show", "--stat=120", "--format="], cwd=arguments.clone, check=True)
    print(f"{arguments.clone} is the clone without {arguments.technique}; run make lint and make test-all there")


if __name__ == "__main__":
    main()
