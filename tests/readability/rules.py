"""Rules that limit code and text that is hard to read, and the recommended replacements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

MAX_STATEMENT_TOKENS = 20

VAGUE_WORDS = """
    told said found given made held kept taken seen used rest most least more own mine here there then words what who
    how why where one both each same others plain whole chosen known asked wanted named drawn shown listed alike apart
    alone near far late early within between beside above below came goes gone begun ended ending thing things some such
    anew at must less many few
"""
GENERIC_WORDS = "result results value values item items data info obj tmp res entry x out output ret"
VAGUE_NAMES = frozenset(VAGUE_WORDS.split())
GENERIC_NAMES = frozenset(GENERIC_WORDS.split())

PHRASES = {
    r"of one's own|of your own": "`custom` or `your`",
    r"\btold\b": "`given`, `set` or `reported`",
    r"\b(?:somebody|whoever|everybody)\b": "`the user`, `the rank` or `the process`",
    r"\banew\b": "`again` or `from step 0`",
    r"\b(?:go|goes|went|gone) on\b": "`resume`, `continue` or `happen`",
    r"\bwhat one sees\b": "`Output:`",
    r"\bno finite number\b": "`NaN or infinity`",
    r"\bstands? still\b": "`makes no progress`",
    r"\bwithout a word\b": "`silently`",
    r"\bin its life\b": "`per run`",
    r"\bin vain\b": "`without effect`",
    r"\bmore seldom\b": "`less often`",
    r"\bnone the less\b": "`anyway`",
    r"\bas told above\b": "the reason",
}
"""Phrases to avoid in all text of the project, and what to write instead."""

MESSAGE_PHRASES = {
    r"(?<!there )\bis no (?:\w+ ){0,2}(?:file|folder|number|name|run|key|setting|rank|process)\b": "`is not a ...`",
    r"\bnothing wrong\b": "`no problem found`",
    r"\b(?:is|are) (?:all )?sound\b": "`passed`",
    r"\bnobody\b": "`no rank`, `no user` or `no process`",
    r"\bis neither\b.*\bnor\b": "`must be A or B, got ...`",
    r"\bwhat became of\b": "`the state of`",
    r"\bto be continued\b": "`can be resumed`",
}
"""Phrases to avoid in messages only, and what to write instead."""


@dataclass(frozen=True)
class Rule:
    """A limit on the files of a scope: `scale * count / size` must be at most `ceiling`."""

    name: str
    count: str
    size: str
    scale: float
    ceiling: float
    remedy: str


NAME_REMEDY = "use a name that describes the value, such as settings, matches or run_folder"
PRODUCT_RULES = (
    Rule("tokens per statement", "tokens", "statements", 1, 10.3, "split statements that contain several ideas"),
    Rule("long statements, %", "long statement", "statements", 100, 9.0, "give intermediate values a name"),
    Rule("vague names, %", "vague name", "names", 100, 1.0, NAME_REMEDY),
    Rule("generic names, %", "generic name", "names", 100, 5.0, NAME_REMEDY),
    Rule("tuple assignments, %", "tuple assignment", "assignments", 100, 3.0, "write one assignment per line"),
    Rule("comprehensions per 100 code lines", "comprehension", "code_lines", 100, 4.5, "write a loop"),
    Rule("nested comprehensions", "nested comprehension", "", 1, 10, "write a loop"),
    Rule("unpacked dicts of type Any", "unpacked Any", "", 1, 0, "name the arguments of the call"),
    Rule("odd phrases per 1,000 lines", "odd phrase", "lines", 1000, 0.5, "write {}"),
    Rule("odd phrases in messages", "odd message", "", 1, 0, "write {}"),
)
TEST_CEILINGS = {
    "tokens per statement": 11.5,
    "long statements, %": 12.0,
    "vague names, %": 3.0,
    "nested comprehensions": 20,
    "odd phrases per 1,000 lines": 1.0,
}
PAGE_CEILINGS = {"odd phrases per 1,000 lines": 0.0}


def limit_rules(ceilings: Mapping[str, float]) -> tuple[Rule, ...]:
    """Return the named rules of product code with other ceilings."""
    limited = []
    for rule in PRODUCT_RULES:
        if rule.name in ceilings:
            limited.append(replace(rule, ceiling=ceilings[rule.name]))
    return tuple(limited)


SCOPES = {"product": PRODUCT_RULES, "tests": limit_rules(TEST_CEILINGS), "pages": limit_rules(PAGE_CEILINGS)}
"""Rules by scope. Python files outside of tests are product code; all Markdown files are pages."""


def find_phrases(text: str, phrases: dict[str, str]) -> list[tuple[int, str, str]]:
    """Return the position, phrase and replacement of each match in a text. A line break counts as a space."""
    joined = re.sub(r"\s", " ", text)
    matches = []
    for pattern, replacement in phrases.items():
        for match in re.finditer(pattern, joined, re.IGNORECASE):
            matches.append((match.start(), match.group(0), replacement))
    return sorted(matches)
