"""Pages of the site for files of code: colours and a way back, without the weight of the theme."""

import os
from html import escape
from pathlib import Path, PurePosixPath

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound

FORMATTER = HtmlFormatter(nowrap=True)
STYLE = """:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; font-family: system-ui, sans-serif; }
pre { overflow-x: auto; font-size: .85rem; line-height: 1.4; }
"""


def code_page(path: str, root: Path) -> str:
    """The page of a file, or of a folder, of the repository as HTML. It lies at code/PATH.html of the site."""
    file = root / path
    home = os.path.relpath("index.html", PurePosixPath(f"code/{path}").parent)
    style = os.path.relpath("code/code.css", PurePosixPath(f"code/{path}").parent)
    body = _listing(file) if file.is_dir() else f"<pre><code>{_coloured(file)}</code></pre>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(path)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<link rel="stylesheet" href="{style}"></head>\n'
        f'<body><p><a href="{home}">Deep learning at scale</a></p><h1>{escape(path)}</h1>\n{body}</body></html>\n'
    )


def stylesheet() -> str:
    """The rules that all pages of code share, for light and for dark."""
    light = HtmlFormatter(style="default").get_style_defs("pre")
    dark = HtmlFormatter(style="github-dark").get_style_defs("pre")
    return f"{STYLE}{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _listing(folder: Path) -> str:
    names = []
    for each in folder.iterdir():
        is_hidden = each.name[0] in "._"
        if not is_hidden:
            names.append(f"{each.name}/" if each.is_dir() else each.name)
    entries = "".join(f"<li><code>{escape(name)}</code></li>" for name in sorted(names))
    return f"<ul>{entries}</ul>"


def _coloured(file: Path) -> str:
    text = file.read_text()
    try:
        lexer = get_lexer_for_filename(file.name)
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(text, lexer, FORMATTER)
