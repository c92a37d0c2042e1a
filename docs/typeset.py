"""Formulas of TeX as drawings, for the site and for slides."""

import html
import re
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import math_to_image

FORMULA = re.compile(r"^\$\$\n(.+)\n\$\$$", re.M)


def typeset(formula: str) -> str:
    """A formula of TeX as a drawing in the colour of the text; nothing is loaded to show it."""
    style: Any = {
        "mathtext.fontset": "stix",
        "savefig.facecolor": "none",
        "svg.hashsalt": "formula",  # the same names of shapes in every build
    }
    drawn = StringIO()
    with matplotlib.rc_context(style):
        math_to_image(f"${formula}$", drawn, FontProperties(size=12), format="svg", color="#010203")
    # The colour stands for that of the text, which only the page knows.
    svg = drawn.getvalue().partition("<svg ")[2].replace("#010203", "currentColor")
    # Metadata hold a date, and a style would count for the whole page.
    svg = re.sub(r"<(metadata|style)[ >].*?</\1>|<!--.*?-->", "", svg, flags=re.S)
    return f'<p><svg role="img" aria-label="{html.escape(formula)}" style="max-width: 100%" {svg.strip()}</p>\n'
