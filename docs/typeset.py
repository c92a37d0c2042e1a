"""Formulas of TeX as drawings, for the site and for slides. Nothing is loaded to show one."""

import html
import re
from functools import cache
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image

FORMULA = re.compile(r"^\$\$\n(.+)\n\$\$$", re.M)
# Code, which may have dollars of its own, or a formula within a sentence.
CODE = r"^(?P<fence>```|~~~).*?^(?P=fence)[^\n]*$|^ {4}[^\n]*$|`[^`\n]+`|<!--.*?-->"
POINTS = 12  # of the type in which formulas are drawn: 1 em of a page
INLINE = re.compile(rf"{CODE}|\$(?P<tex>[^\s$`](?:[^$`\n]*[^\s$`])?)\$", re.M | re.S)


def typeset_all(markdown: str) -> str:
    """Markdown with its formulas as drawings, those in paragraphs of their own and those within sentences."""
    return typeset_sentences(FORMULA.sub(lambda found: typeset(found[1]), markdown))


def typeset_sentences(markdown: str) -> str:
    """Markdown with the formulas within its sentences as drawings."""
    return INLINE.sub(_typeset_inline, markdown)


def typeset(formula: str) -> str:
    """A formula of TeX as a drawing, in a paragraph of its own."""
    svg, _ = draw_formula(formula)
    return f'<p><svg role="img" aria-label="{html.escape(formula)}" style="max-width: 100%" {svg}</p>\n'


def _typeset_inline(found: re.Match[str]) -> str:
    """A formula within a sentence as a drawing on its line; code as it is."""
    tex = found["tex"]
    if tex is None:
        return found[0]
    svg, depth = draw_formula(tex)
    place = f"vertical-align: -{depth:.3f}em"
    return f'<svg class="formula" role="img" aria-label="{html.escape(tex)}" style="{place}" {svg}'


@cache
def draw_formula(tex: str) -> tuple[str, float]:
    """A formula of TeX as the end of an SVG in the colour and of the size of the text; its depth in em."""
    style: Any = {
        "mathtext.fontset": "stix",
        "savefig.facecolor": "none",
        "svg.hashsalt": "formula",  # the same names of shapes in every build
    }
    drawn = StringIO()
    with matplotlib.rc_context(style):
        depth = math_to_image(f"${tex}$", drawn, FontProperties(size=POINTS), format="svg", color="#010203")
    # The colour stands for that of the text, which only the page knows.
    svg = drawn.getvalue().partition("<svg ")[2].replace("#010203", "currentColor")
    # Metadata hold a date, and a style would count for the whole page.
    svg = re.sub(r"<(metadata|style)[ >].*?</\1>|<!--.*?-->", "", svg, flags=re.S)
    # On a slide type is larger, and formulas grow with it.
    svg = re.sub(r' (width|height)="([\d.]+)pt"', _in_em, svg)
    # A blank line would end the paragraph, or the row of a table.
    return re.sub(r"\s*\n\s*", " ", svg.strip()), float(depth) / POINTS


def _in_em(found: re.Match[str]) -> str:
    side, points = found.groups()
    size = float(points) / POINTS
    return f' {side}="{size:.3f}em"'
