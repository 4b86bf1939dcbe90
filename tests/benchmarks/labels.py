"""The wording of recorded tables in the pages, which labels.yaml defines.

Text that labels.yaml does not contain is shown as it was recorded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".yaml")


@functools.cache
def load_labels() -> Mapping[str, Any]:
    """Return the content of labels.yaml: `patterns`, `facts` and `parts`."""
    content: Mapping[str, Any] = yaml.safe_load(FILE.read_text())
    return content


def reword(name: str, text: str) -> str:
    """Return the wording of a row, column or note of the part `name`."""
    labels = load_labels()
    exact = labels["parts"].get(name, {})
    if text in exact:
        return str(exact[text])
    for pattern, replacement in labels["patterns"]:
        text = re.sub(pattern, replacement, text)
    return text


def reword_fact(name: str, fact: str) -> str:
    """Return the wording of a fact of an older record, such as `threads 1`."""
    labels = load_labels()
    exact = labels["parts"].get(name, {})
    if fact in exact:
        return str(exact[fact])
    for pattern, replacement in labels["facts"]:
        match = re.fullmatch(pattern, fact)
        if match:
            return match.expand(replacement)
    return fact


def list_conditions(name: str, part: Mapping[str, Any]) -> list[str]:
    """Return the conditions of a measurement, and the note of its record.

    Facts are a list of phrases. In older records, they are names with values.
    """
    facts = part.get("facts", [])
    if isinstance(facts, dict):
        facts = [reword_fact(name, f"{fact} {value}") for fact, value in facts.items()]
    conditions = list(facts)
    if "note" in part:
        conditions.append(reword(name, part["note"]))
    return conditions


def reword_table(name: str, part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part whose table has the wording of the pages."""
    table = part["table"]
    columns = [reword(name, column) for column in table["columns"]]
    rows = [row | {"what": reword(name, row["what"])} for row in table["rows"]]
    return {**part, "table": {"columns": columns, "rows": rows}}
