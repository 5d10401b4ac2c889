"""Docstrings and comments use the field's terms: a list of words that strangers stumbled over stays out of them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted(path for top in ("capture", "steering", "consumers") for path in (ROOT / top).rglob("*.py"))

INSTEAD = {
    r"hears?|heard": "receive, read",
    r"tells?|told": "report, send, state, distinguish",
    r"nobody|somebody|whoever": "name who it is",
    r"behind": "after (a server may be behind a proxy)",
    r"those that": "name what they are",
    r"of which": "two sentences",
}
"""What is written instead of words of ours, which a reader who knows vLLM would have to learn."""
FORBIDDEN = re.compile(rf"\b({'|'.join(INSTEAD)})\b", re.IGNORECASE)
ALLOWED = re.compile(
    r"behind (a|an|the|its|their) (\w+ )?(proxy|proxies|balancer|gateway|firewall|NAT)\b", re.IGNORECASE
)
BEGINNINGS = ("Of ", "The same ", "Those ", "Nobody ", "Whoever ")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """First line and text of a module's docstrings, also those of constants, and of its comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def offences(source: str) -> Iterator[tuple[int, str]]:
    """Line and words of each sentence that uses the list's words or beginnings."""
    for line, text in texts(source):
        if text.startswith(BEGINNINGS):
            yield line, text.splitlines()[0]
        plain = ALLOWED.sub("", re.sub(r"``[^`]*``|`[^`]*`|^ *\w+: ", "", text, flags=re.MULTILINE))
        for found in FORBIDDEN.finditer(plain):
            yield line + plain[: found.start()].count("\n"), found[0]


def test_docstrings_and_comments_keep_to_the_terms_of_the_field() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}: {what}" for path in FILES for line, what in offences(path.read_text())]

    assert found == [], f"write instead: {INSTEAD}"


def test_words_of_the_list_are_found() -> None:
    source = '''
"""Told what it is, behind a proxy.

`told` and ``tell`` are code, those that are not are found.

Args:
    told: A name.
"""
LIMIT = 1
"""Of a request."""
x = "nobody"  # somebody's
'''

    assert list(offences(source)) == [(2, "Told"), (4, "those that"), (10, "Of a request."), (11, "somebody")]
