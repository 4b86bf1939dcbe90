"""The pages are true: the README's commands run, links lead somewhere, the sample output is like the real one."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.harness.commands.processes import run_experiment
from tests.harness.pages.page_commands import (
    PAGES,
    README_COMMANDS,
    check_page_command,
    list_page_commands,
    write_page_runs,
)
from tests.harness.repository import ROOT

TEXT = (ROOT / "README.md").read_text()
HEADINGS = ["Question", "Answer", "Figure", "How it works", "Commands", "Results", "Limits", "Exercises"]
MAX_PAGE_LINES = 180
TECHNIQUES_PAGE = ROOT / "experiments" / "README.md"  # recommends a technique for each situation
EXPERIMENT_PAGES = sorted(set((ROOT / "experiments").glob("*.md")) - {TECHNIQUES_PAGE})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page_runs(tmp_path_factory.mktemp("readme"))


@pytest.mark.parametrize("command", README_COMMANDS)
def test_every_command_runs(command: str, cache: Path, tmp_path: Path, place: Path, runs: Path) -> None:
    check_page_command(command, cache, tmp_path, place, runs)


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert link.startswith("http") or target.exists(), link
        assert not anchor or anchor in slugs(target), link


def test_the_readme_explains_where_data_come_from_and_how_a_run_is_made_short() -> None:
    assert "`DATA_ROOT` sets the default of `data.root`" in " ".join(TEXT.split())
    assert "`steps=100` ends a run" in TEXT


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 170


def test_the_page_for_choosing_a_technique_is_short_and_linked() -> None:
    assert TECHNIQUES_PAGE in PAGES
    assert len(TECHNIQUES_PAGE.read_text().splitlines()) <= 110
    assert "](experiments/README.md)" in TEXT


def test_sample_output_has_the_lines_of_a_real_run(cache: Path, tmp_path: Path) -> None:
    done = run_experiment("mnist_pipeline", "data.name=digits", f"data.cache={cache}", "steps=20", runs=tmp_path)
    sample = re.search(r"```text\n(mnist_pipeline: .*?)```", TEXT, re.DOTALL)
    assert sample

    def labels(text: str) -> list[str]:
        return re.findall(r"^  ([a-z][a-z ]*?)  ", text, re.MULTILINE)

    assert labels(sample.group(1)) == labels(done.stdout)
    assert len(labels(done.stdout)) > 8


@pytest.mark.parametrize("script", sorted((ROOT / "experiments").glob("*.py")), ids=lambda script: script.stem)
def test_every_experiment_has_its_page_and_its_line(script: Path) -> None:
    line = rf"^\| \[{script.stem}\]\(experiments/{script.name}\) \|.*\]\(experiments/{script.stem}.md\) \|$"
    assert re.search(line, TEXT, re.MULTILINE)
    page = script.with_suffix(".md").read_text()
    assert "](https://arxiv.org/abs/" in page
    assert f"({script.name})" in page
    assert any(command.startswith(f"make bench NAME={script.stem}") for command in list_page_commands(*PAGES))


def test_the_page_for_contributors_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= MAX_PAGE_LINES


@pytest.mark.parametrize("page", sorted((ROOT / "common").rglob("README.md")), ids=lambda page: page.parent.name)
def test_pages_beside_the_code_are_short_and_checked(page: Path) -> None:
    max_lines = 120 if page.parent.name == "common" else MAX_PAGE_LINES
    assert page in PAGES
    assert len(page.read_text().splitlines()) <= max_lines


@pytest.mark.parametrize("page", EXPERIMENT_PAGES, ids=lambda page: page.stem)
def test_every_experiment_page_has_the_same_headings(page: Path) -> None:
    text = page.read_text()
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^##? .*$", without_code, re.MULTILINE)
    assert headings == [f"# {page.stem}", *(f"## {heading}" for heading in HEADINGS)]
    assert text.startswith(f"# {page.stem}\n\n## Question\n\n")
    assert len(text.splitlines()) <= MAX_PAGE_LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_holds_both_sides_of_a_merge(page: Path) -> None:
    assert not re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(), re.MULTILINE)


def test_every_package_says_what_it_is_for() -> None:
    common = ROOT / "common"
    page = (common / "README.md").read_text()
    packages_of_page = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    packages_of_common = {path.parent.name for path in common.glob("*/__init__.py")}
    assert packages_of_common
    assert packages_of_common <= packages_of_page

    files = [*common.glob("*/**/__init__.py"), *(ROOT / "slurm").glob("*/**/__init__.py")]
    for file in files:
        package = ast.parse(file.read_text())
        assert ast.get_docstring(package), file


def test_every_pitfall_links_the_tests_that_show_it() -> None:
    folder = ROOT / "tests/pitfalls"
    page = (folder / "README.md").read_text()
    rows = re.findall(r"^\| (?!mistake |---).*$", page, re.MULTILINE)
    assert rows
    linked_tests = set()
    for row in rows:
        last_cell = row.rstrip("| ").rpartition(" | ")[2]
        links = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", last_cell)
        assert links, row
        for name, file in links:
            source = (folder / file).read_text()
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{name} is not in {file}"
            linked_tests.add(name)

    for file in folder.rglob("test_*.py"):
        tests = re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
        assert linked_tests.issuperset(tests), file


def test_ci_and_hooks_call_what_the_pages_name() -> None:
    assert "run: .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    makefile = (ROOT / "Makefile").read_text()
    lint = " ".join(re.findall(r"-m (ruff \w+|mypy)", makefile))
    assert hooks
    for repository in hooks:
        assert repository["repo"] == "local", "hooks must not need a network connection"
        assert repository["hooks"]
        for hook in repository["hooks"]:
            program, _, module = shlex.split(hook["entry"])[:3]
            assert program == ".venv/bin/python"
            assert module in lint


def test_the_citation_names_the_version_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"$', project, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert version
    assert citation["version"] == version[1]
