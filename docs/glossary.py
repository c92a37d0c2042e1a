"""The words of docs/glossary.md, explained where a page of the web site uses one first."""

import html
import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parent / "glossary.md"
ROW = re.compile(r"^\| ([^|]+?) \| ([^|]+?) \|$", re.M)
TAG = re.compile(r"(<[^>]+>)")
# Inside these a term is no running text, or is explained by what it leads to.
HEADINGS = {"h1", "h2", "h3", "h4", "th", "summary", "figure"}
UNTOUCHED = HEADINGS | {"a", "abbr", "button", "code", "pre", "script", "style", "svg", "math"}


@cache
def terms() -> dict[str, str]:
    """{term: its meaning}, the longest terms first, so that "CUDA graph" comes before "graph"."""
    rows = [(term, meaning) for term, meaning in ROW.findall(PAGE.read_text()) if term not in ("term", "---")]
    return dict(sorted(rows, key=lambda row: -len(row[0])))


def explain(page: str) -> str:
    """The HTML of a page, in which the first use of each term has its meaning, in an <abbr>."""
    left = dict(terms())
    inside: list[str] = []  # open elements of UNTOUCHED
    parts = []
    for part in TAG.split(page):
        if part.startswith("<"):
            _follow(part, inside)
        elif not inside:
            part = _explain_text(part, left)
        parts.append(part)
    return "".join(parts)


def _follow(tag: str, inside: list[str]) -> None:
    """Keep the list of open elements in which nothing is explained. tag: as it stands in the page."""
    found = re.match(r"</?([a-z0-9]+)", tag)
    name = found[1] if found else ""
    if name not in UNTOUCHED:
        return
    if tag.startswith("</"):
        if inside and inside[-1] == name:
            inside.pop()
    elif not tag.endswith("/>"):
        inside.append(name)


def _explain_text(text: str, left: dict[str, str]) -> str:
    """A piece of text with its first terms explained; those are taken out of `left`."""
    if not left:
        return text
    words = "|".join(map(re.escape, left))
    # Terms begin with a capital letter at the start of a sentence, and may be plural.
    pattern = re.compile(rf"\b({words})(s|es)?\b", re.I)

    def explained(found: re.Match[str]) -> str:
        term = next((each for each in left if each.lower() == found[1].lower()), None)
        if term is None:  # it has been explained in this piece
            return found[0]
        meaning = html.escape(left.pop(term), quote=True)
        return f'<abbr title="{meaning}" tabindex="0">{found[0]}</abbr>'

    return pattern.sub(explained, text)
