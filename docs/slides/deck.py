"""A deck of slides as one HTML file that needs nothing else.

A deck is a file of this folder: a page, and for each slide what to show of it, minutes and notes. So words, drawings,
tables and formulas stand in the lessons alone.
"""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown import markdown

from docs.slides.pages import FOLDER, Part, Section, paragraph_of, read_sections, title_of_exercise, without_pointers
from docs.typeset import typeset, typeset_sentences
from utils.errors import UsageError, nearest, reported_as_usage_error
from utils.files import read_text
from utils.yaml_files import parse_yaml

HERE = Path(__file__).parent
KEYS = ("from", "show", "exercises", "title", "minutes", "notes", "teaching")
TYPES = {".svg": "svg+xml", ".png": "png", ".webp": "webp"}
PREDICT = "Predict first: "  # which is the title of such a slide
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\([^)]+\)")


@dataclass(frozen=True)
class Slide:
    """A slide. body: HTML; notes: what to say, HTML."""

    title: str
    body: str
    minutes: int
    notes: str


@dataclass(frozen=True)
class Deck:
    """The slides of a page of docs/."""

    page: str
    title: str
    slides: tuple[Slide, ...]

    @property
    def minutes(self) -> int:
        """Minutes of all slides together."""
        return sum(slide.minutes for slide in self.slides)


def read_deck(file: Path) -> Deck:
    """The deck of a file. Raises UsageError, with the number of the slide, where its page has not what it asks for."""
    with reported_as_usage_error(ValueError, str(file)):
        content = parse_yaml(read_text(file))
    page = content["page"]
    sections = read_sections(page)
    title = next(iter(sections.values())).heading
    slides = []
    for number, entry in enumerate(content["slides"], 1):
        where = f"{file}: slide {number}"
        for key in entry:
            if key not in KEYS:
                raise UsageError(f"{where}: unknown key {key!r}{nearest(key, KEYS)}")
        with reported_as_usage_error((UsageError, KeyError), where):
            slides.append(_slide(entry, sections))
    return Deck(page, title, tuple(slides))


def _slide(entry: Mapping[str, Any], sections: Mapping[str, Section]) -> Slide:
    anchor = entry.get("from")
    section = sections[anchor] if anchor else next(iter(sections.values()))
    body = []
    notes = [entry["notes"]]
    for wanted in entry.get("show", ()):
        part = section.find(wanted)
        body.append(as_html(part))
        if part.kind == "question":
            notes.append(f"The answer: {_answer(part)}")
    title = entry.get("title", section.heading)
    if "exercises" in entry:
        title, shown = _exercises(entry["exercises"])
        body.append(shown)
    if not body:
        raise UsageError("nothing to show: add show or exercises")
    if "teaching" in entry:
        notes.append(paragraph_of("teaching.md", entry["teaching"]))
    said = _markdown("\n\n".join(notes))
    return Slide(title, "\n".join(body), int(entry["minutes"]), said)


def as_html(part: Part) -> str:
    """A part of a page as it is on a slide."""
    if part.kind == "formula":
        return typeset(part.text.splitlines()[1])
    if part.kind == "picture":
        return _picture(part.text)
    if part.kind == "question":
        return _question(part.text)
    if part.kind == "code":
        lines = part.text.splitlines()
        is_fenced = lines[0].startswith("```")
        code = lines[1:-1] if is_fenced else [line.removeprefix("    ") for line in lines]
        return _command("\n".join(code))
    if part.kind == "text":
        return _markdown(without_pointers(part.text))
    # Each row or item is a text of its own.
    return _markdown("\n".join(map(without_pointers, part.text.splitlines())))


def _command(code: str) -> str:
    """Code or commands; a line that is too long breaks between words."""
    # A browser breaks lines at hyphens too, and options begin with two.
    words = re.sub(r"[^\s<>&]*-[^\s<>&]*", r"<span>\g<0></span>", html.escape(code))
    return f"<pre><code>{words}</code></pre>"


def _exercises(numbers: Sequence[int]) -> tuple[str, str]:
    """Title and HTML of a slide with an exercise for all, and others for those who are done."""
    first, *others = numbers
    title, learnt, file = title_of_exercise(first)
    texts = [
        f"{learnt[0].upper()}{learnt[1:]}.",
        f"Fill the gap between `# TODO` and `# END` of `exercises/{file}`.",
        f"    make exercise N={first}",
    ]
    for number in others:
        name, _, _ = title_of_exercise(number)
        texts.append(f"Who is done: exercise {number}, {name}.")
    return f"Exercise {first}: {title}", _markdown("\n\n".join(texts))


def _question(text: str) -> str:
    """A question, with its choices where it has some."""
    asked = re.search(r"<summary>(.*?)</summary>", text, re.S)
    if not asked:
        raise UsageError(f"{text!r} asks nothing")
    words = " ".join(asked[1].split()).removeprefix(PREDICT)
    body = _markdown(words[0].upper() + words[1:])
    choices = re.search(r'data-choices="([^"]*)"', text)
    if choices:
        body += _markdown(" / ".join(f"**{choice}**" for choice in choices[1].split("|")))
    return f'<div class="asked">{body}</div>'


def _markdown(text: str) -> str:
    """Markdown as HTML; links become their words, since they lead nowhere from a slide."""
    words = LINK.sub(r"\1", text)
    return markdown(typeset_sentences(words), extensions=["tables"])


def _answer(part: Part) -> str:
    """What a question says when it is unfolded."""
    return part.text.partition("</summary>")[2].removesuffix("</details>").strip()


def _picture(text: str) -> str:
    """A picture of a page, inside the file."""
    found = re.match(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    if not found:
        raise UsageError(f"{text!r} is no picture")
    file = FOLDER / found[2]
    content = file.read_bytes()
    if file.suffix == ".svg":
        # A slide is light, whatever the reader prefers.
        plain = re.sub(r"@media \(prefers-color-scheme: dark\)[^<]*", "", content.decode())
        content = plain.encode()
    data = base64.b64encode(content).decode()
    return f'<img alt="{html.escape(found[1])}" src="data:image/{TYPES[file.suffix]};base64,{data}">'


def deck_as_html(deck: Deck) -> str:
    """The file of a deck."""
    count = len(deck.slides)
    name = html.escape(deck.title)
    sections = []
    for number, slide in enumerate(deck.slides, 1):
        place = f"{number} of {count}"
        foot = f"{place}, {slide.minutes} min, {deck.minutes} in all"
        sections.append(_section(slide, place, f"{name}<span>{foot}</span>"))
    style = (HERE / "deck.css").read_text()
    script = (HERE / "deck.js").read_text()
    body = "\n".join(sections)
    head = f'<meta charset="utf-8">\n<title>{name}</title>\n<style>\n{style}</style>'
    main = f'<main class="deck">\n{body}\n</main>\n<script>\n{script}</script>'
    return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{main}\n</body>\n'


def _section(slide: Slide, place: str, foot: str) -> str:
    """A slide as an element. foot: HTML."""
    title = _markdown(slide.title).removeprefix("<p>").removesuffix("</p>")
    label = html.escape(f"{place}: {slide.title}")
    parts = [
        f'<section class="slide" aria-label="{label}">',
        f"<h2>{title}</h2>",
        f'<div class="body">\n{slide.body}\n</div>',
        f"<footer>{foot}</footer>",
        f'<aside class="notes" aria-label="notes">{slide.notes}</aside>',
        "</section>",
    ]
    return "\n".join(parts)
