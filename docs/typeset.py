"""Formulas of TeX as MathML, which browsers draw by themselves, for the site and for slides."""

import re

from latex2mathml.converter import convert

FORMULA = re.compile(r"^\$\$\n(.+)\n\$\$$", re.M)
# Code, which may have dollars of its own, or a formula within a sentence.
CODE = r"^(?P<fence>```|~~~).*?^(?P=fence)[^\n]*$|^ {4}[^\n]*$|`[^`\n]+`|<!--.*?-->"
INLINE = re.compile(rf"{CODE}|\$(?P<tex>[^\s$`](?:[^$`\n]*[^\s$`])?)\$", re.M | re.S)


def typeset_all(markdown: str) -> str:
    """Markdown with its formulas as MathML, those in paragraphs of their own and those within sentences."""
    return typeset_sentences(FORMULA.sub(lambda found: typeset(found[1]), markdown))


def typeset_sentences(markdown: str) -> str:
    """Markdown with the formulas within its sentences as MathML; code stays as it is."""
    return INLINE.sub(lambda found: _in_span(found["tex"]) if found["tex"] else found[0], markdown)


def typeset(formula: str) -> str:
    """A formula of TeX in a paragraph of its own."""
    return f'<p class="formula">{convert(formula, display="block")}</p>\n'


def _in_span(tex):
    # Markdown takes <math> at the beginning of a line for a block.
    return f'<span class="formula">{convert(tex)}</span>'
