"""Tokens of Python source, of which every Python version yields the same number.

Python 3.12 and later split an f-string into several tokens (https://peps.python.org/pep-0701). Here, a string is one
token in all versions.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator

FSTRING_START: int | None = getattr(tokenize, "FSTRING_START", None)
FSTRING_END: int | None = getattr(tokenize, "FSTRING_END", None)


def list_tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a source text. An f-string is one token of the type STRING."""
    open_strings: list[tokenize.TokenInfo] = []  # an f-string may contain other f-strings
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == FSTRING_START:
            open_strings.append(token)
        elif token.type == FSTRING_END:
            start = open_strings.pop()
            if not open_strings:
                yield token._replace(type=tokenize.STRING, start=start.start)
        elif not open_strings:
            yield token
