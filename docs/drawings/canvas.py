"""Common parts of all drawings: boxes, arrows, words and a palette, as an SVG that follows the reader's theme."""

from collections.abc import Sequence
from html import escape

# A drawing brings its own background, so that it can be read on any page. Each class has a light and a dark colour.
LIGHT = {
    "paper": "#ffffff",
    "ink": "#1f2328",
    "line": "#59636e",
    "a": "#b6d4fe",  # a to d: ranks, or kinds of work
    "b": "#fde49b",
    "c": "#b9e8c4",
    "d": "#f6c6dd",
    "talk": "#ffb77c",  # communication
    "wait": "#eaeef2",  # waiting, and whatever stands in the background
}
DARK = {
    "paper": "#161b22",
    "ink": "#e6edf3",
    "line": "#9198a1",
    "a": "#1f4f8f",
    "b": "#7a5b0b",
    "c": "#1e6136",
    "d": "#7d2f58",
    "talk": "#9a4a10",
    "wait": "#2b323b",
}
RANKS = ("a", "b", "c", "d")  # the colour of a rank, or of a group of ranks


def _rules(colours: dict[str, str]) -> str:
    """The rules of a theme. Ink and line colour strokes and words, all others fill what has their class."""
    ink = colours["ink"]
    line = colours["line"]
    # Each box names its class, and the theme of the reader decides on the colour.
    fills = ""
    for name, colour in colours.items():
        if name not in ("ink", "line"):
            fills += f".{name}{{fill:{colour}}}"
    return f"text{{fill:{ink}}}.edge{{stroke:{line}}}.arrow{{stroke:{ink}}}.tip{{fill:{ink}}}.none{{fill:none}}{fills}"


class Drawing:
    """An SVG of a width and a height, in points; y grows downwards.

    title: what the drawing shows, which is also read to those who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", fill: str = "none", size: int = 13
    ) -> None:
        """A rectangle with words in its middle; lines of words are separated by line feeds."""
        self.parts.append(
            f'<rect class="{fill} edge" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>'
        )
        # Words come after their box, since SVG paints in the order of the text.
        self.words(x + width / 2, y + height / 2, words, "middle", size)

    def words(self, x: float, y: float, words: str, anchor: str = "start", size: int = 13, bold: bool = False) -> None:
        """Lines of words, in the middle of which y lies; anchor: start, middle or end."""
        lines = words.split("\n") if words else []
        middle = (len(lines) - 1) / 2
        weight = ' font-weight="600"' if bold else ""
        for i, line in enumerate(lines):
            # SVG places words by their baseline, which lies about a third of their size below the middle.
            at = y + size * 0.35 + (i - middle) * size * 1.25
            self.parts.append(
                f'<text x="{x:g}" y="{at:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(line)}</text>'
            )

    def arrow(self, *points: tuple[float, float], words: str = "", dashed: bool = False, both: bool = False) -> None:
        """An arrow along points, with words above its middle."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(f'<path class="none arrow" d="{path}"{dash}{start} marker-end="url(#tip)"/>')
        if words:
            # Only straight arrows have words, so the ends give the middle.
            x0, y0 = points[0]
            x1, y1 = points[-1]
            self.words((x0 + x1) / 2, (y0 + y1) / 2 - 9, words, "middle", 12)

    def line(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line without a tip."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="none edge" d="{path}"{dash}/>')

    def row(
        self, x: float, y: float, label: str, spans: Sequence[tuple[float, float, str, str]], height: float = 26
    ) -> None:
        """A row of a timeline: spans of (start, length, words, fill), behind a label that ends at x."""
        self.words(x - 10, y + height / 2, label, "end")
        for start, length, words, fill in spans:
            self.box(x + start, y, length, height, words, fill, 12)

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]], step: float = 130) -> None:
        """Colours and what they mean: entries of (fill, words)."""
        for i, (fill, words) in enumerate(entries):
            self.box(x + i * step, y, 14, 14, "", fill)
            self.words(x + i * step + 20, y + 7, words, size=12)

    def svg(self) -> str:
        """The text of the file."""
        # A page shows the file as an image, which sees the reader's preference and not the page's theme.
        style = f"{_rules(LIGHT)}@media (prefers-color-scheme: dark){{{_rules(DARK)}}}"
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" '
                'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{style}</style>",
                f"<defs>{tip}</defs>",
                f'<rect class="paper" width="{self.width}" height="{self.height}" rx="8"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )
