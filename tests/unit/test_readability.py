"""Readability step of `make lint`: each rule finds its case and prints what to write instead."""

from __future__ import annotations

import tokenize
from pathlib import Path

import pytest

from tests.readability import __main__ as readability
from tests.readability.inspection import ROOT
from tests.readability.python_tokens import list_tokens
from tests.readability.rules import PAGE_CEILINGS, PRODUCT_RULES, SCOPES, TEST_CEILINGS, Rule

READABLE = """
def compute_mean(losses):
    \"\"\"Return the mean loss.\"\"\"
    total = sum(losses)
    return total / len(losses)
"""

UNREADABLE = {
    "tokens per statement": "print(first, second, third, fourth, fifth, sixth, seventh)\n",
    "long statements, %": "print(a, b, c, d, e, f, g, h, i, j, k)\n",
    "vague names, %": "found = 1\n",
    "generic names, %": "data = 1\n",
    "tuple assignments, %": "first, second = 1, 2\n",
    "comprehensions per 100 code lines": "squares = [n * n for n in numbers]\n",
    "nested comprehensions": "pairs = [(a, b) for a in rows for b in rows]\n" * 11,
    "unpacked dicts of type Any": "settings: Any = {}\nstart(**settings)\n",
    "odd phrases per 1,000 lines": "# Write an optimizer of your own.\n",
    "odd phrases in messages": "message = f'{path} is no file'\n",
}


def test_readable_code_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(READABLE * 5)
    assert readability.check_files([path], is_verbose=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rule", PRODUCT_RULES, ids=lambda rule: rule.name)
def test_each_rule_prints_the_line_and_what_to_write_instead(
    rule: Rule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "module.py"
    path.write_text(UNREADABLE[rule.name])
    assert not readability.check_files([path], is_verbose=False)
    output = capsys.readouterr().out
    assert f"error: {rule.name}: " in output
    if rule.count == "tokens":  # a mean has no line
        return
    line = 2 if rule.count == "unpacked Any" else 1
    assert f"{path}:{line}: " in output
    assert rule.remedy.split("{}")[0] in output


def test_a_phrase_is_found_across_a_line_break(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    path.write_text("Write an optimizer of your\nown.\n")
    assert not readability.check_files([path], is_verbose=False)
    assert f"{path}:1: odd phrase `of your own`; write `custom` or `your`" in capsys.readouterr().out


def test_a_page_must_not_contain_any_odd_phrase(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("The run resumes.\n" * 5000 + "The run goes on.\n")
    assert not readability.check_files([path], is_verbose=False)


def test_tests_have_limits_of_their_own() -> None:
    assert readability.select_scope(Path("tests/unit/test_readability.py")) == "tests"
    assert readability.select_scope(Path("experiments/local_sgd.md")) == "pages"
    assert readability.select_scope(Path("common/tests/errors.py")) == "product"
    names = [rule.name for rule in SCOPES["tests"]]
    assert names == list(TEST_CEILINGS)
    assert set(PAGE_CEILINGS) <= set(names)


def test_the_default_paths_include_tests_and_pages() -> None:
    files = set(readability.list_tracked_files(readability.DEFAULT_PATHS))
    assert {Path(__file__).relative_to(ROOT), Path("CONTRIBUTING.md"), Path("tests/pitfalls/README.md")} <= files


def test_an_exchange_of_two_names_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("first, second = second, first\n")
    assert readability.check_files([path], is_verbose=False)


def test_a_string_with_replacement_fields_is_one_token_in_every_python_version() -> None:
    tokens = list_tokens("print(f'{name!r:{width}} of {f\"{count:,}\"}')\n")
    strings = [token.string for token in tokens if token.type == tokenize.STRING]
    assert len(strings) == 1
