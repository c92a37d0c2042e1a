"""What a page needs on a narrow screen: whole words of code, room for cells of words, and plots that can be read.

docs/moving/moving.css has the rules of the classes that are given here.
"""

import re
from html import escape
from pathlib import Path

from PIL import Image

BLOCK_OR_CODE = re.compile(r"<pre\b.*?</pre>|<code>(.*?)</code>", re.S)
# A browser breaks a line after a hyphen, of which options have two. What is too long for a phone may break.
HYPHENED = re.compile(r"(?=[^\s<>]*-)[^\s<>]{2,38}(?![^\s<>])")
CELL = re.compile(r"<td((?: [^>]*)?)>(.*?)</td>", re.S)
# A block of commands, which may break between words where a line is too long; code and tables keep their lines.
COMMANDS = re.compile(r'<div class="([\w -]*highlight)">(<pre>.*?</pre>)</div>', re.S)
PROGRAM = re.compile(r"^\s*(#|\w+=\S+ |python|torchrun|sbatch|srun|make|pip|git|diff|\.venv/bin/)", re.M)
WORDS = 25  # letters of a cell that gets room for some words in a line
PLOT = re.compile(r'<p>(<img alt="([^"]*)" src="([^"]+\.(?:png|webp))" ?/?>)</p>')
# The type of plots has 14 px at their full width.
SMALLEST_SHARE = 0.8


def fit_narrow(content: str, folder: Path) -> str:
    """The HTML of a page. folder: of docs/, that links of the page begin at."""
    content = COMMANDS.sub(_command_that_breaks, content)
    content = BLOCK_OR_CODE.sub(_whole_words, content)
    content = CELL.sub(_room_for_words, content)
    return PLOT.sub(lambda found: _plot(found, folder), content)


def _whole_words(found: re.Match[str]) -> str:
    if found[1] is None:  # a block keeps its lines
        return found[0]
    words = HYPHENED.sub(r'<span class="whole">\g<0></span>', found[1])
    return f"<code>{words}</code>"


def _command_that_breaks(found: re.Match[str]) -> str:
    classes, block = found.groups()
    text = re.sub(r"<.*?>", "", block)
    if not PROGRAM.match(text) or "|--" in text:
        return found[0]
    parts = re.split(r"(<[^>]*>)", block)
    # Tags stand at odd places.
    parts[::2] = [HYPHENED.sub(r'<span class="whole">\g<0></span>', part) for part in parts[::2]]
    return f'<div class="{classes} commands">{"".join(parts)}</div>'


def _room_for_words(found: re.Match[str]) -> str:
    attributes, content = found.groups()
    text = re.sub(r"<(svg|style)\b.*?</\1>|<.*?>", "", content, flags=re.S)
    if len(text) < WORDS:
        return found[0]
    return f'<td class="words"{attributes}>{content}</td>'


def _plot(found: re.Match[str], folder: Path) -> str:
    """A plot that is a link to itself, and that scrolls where it would be too small to read."""
    image, alt, source = found.groups()
    file = folder / source
    if not file.is_file():
        return found[0]
    with Image.open(file) as opened:
        least = round(SMALLEST_SHARE * opened.width)
    box = f'<div class="plot" style="--least: {least}px" tabindex="0" role="region" aria-label="{escape(alt)}">'
    return f'{box}<a href="{source}">{image}</a></div>'
