"""The parts of a lesson that slides show: text, lists, tables, code, formulas, pictures and questions of a section."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.quiz_page import anchor_of
from utils.errors import UsageError

FOLDER = Path(__file__).parents[1]
SENTENCE = re.compile(r"(?<=[.?!:])\s+(?=[A-Z0-9`*\[])")
# Links to other pages: a sentence, or words in brackets, that hold nothing else.
POINTER = re.compile(r"\[[^\]]+\]\((?!https?:)[^)\s]+\)\.?")
ASIDE = re.compile(r"\s*\(\[[^\]]+\]\((?!https?:)[^)\s]+\)\)")
# How the blocks of each kind begin; what begins otherwise is text. A block ends at an empty line, but for those that
# have an end of their own.
BEGINNINGS = {
    "code": re.compile(r"```|    \S"),
    "table": re.compile(r"\|"),
    "list": re.compile(r"- |\d+\. "),
    "picture": re.compile(r"!\["),
    "formula": re.compile(r"\$\$$"),
    "question": re.compile(r"<details"),
}
ENDS = {"code": "```", "formula": "$$", "question": "</details>"}


@dataclass(frozen=True)
class Part:
    """A block of a page. kind: text, or one of BEGINNINGS; text: as it stands in the page."""

    kind: str
    text: str


@dataclass(frozen=True)
class Section:
    """A heading of a page and what stands below it, up to the next heading."""

    heading: str
    parts: tuple[Part, ...]

    def find(self, wanted: str) -> Part:
        """The part that words name.

        "table 2": the second one of the section. "picture halo": of that name. "text 2/1-3": sentences of a paragraph.
        Raises UsageError where there is none.
        """
        name, _, sentences = wanted.partition("/")
        kind, _, which = name.strip().partition(" ")
        found = [part for part in self.parts if part.kind == kind]
        if which.isdigit() or not which:
            place = int(which or 1) - 1
            found = found[place : place + 1]
        else:
            found = [part for part in found if f"/{which}." in part.text]
        if len(found) != 1:
            raise UsageError(f"section {self.heading!r} has no {wanted!r}")
        if not sentences:
            return found[0]
        first, _, last = sentences.strip().partition("-")
        chosen = SENTENCE.split(found[0].text)[int(first) - 1 : int(last or first)]
        if not chosen:
            raise UsageError(f"section {self.heading!r}: {wanted!r} has no such sentences")
        return Part(kind, " ".join(chosen))


def read_sections(page: str, folder: Path = FOLDER) -> dict[str, Section]:
    """The sections of a page of docs/ by their anchors; the first one holds what stands below the title."""
    text = re.sub(r"^<!--.*?-->\n?", "", (folder / page).read_text(), flags=re.S | re.M)
    bodies: dict[str, list[str]] = {}
    heading = ""
    is_code = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        is_heading = re.match(r"#+ \S", line) and not is_code
        if is_heading:
            heading = line.lstrip("#").strip().replace("`", "")
            bodies[heading] = []
        else:
            bodies[heading].append(line)
    sections = {}
    for heading, lines in bodies.items():
        sections[anchor_of(heading)] = Section(heading, tuple(_parts(lines)))
    return sections


def _parts(body: list[str]) -> Iterator[Part]:
    lines = iter(body)
    for line in lines:
        if not line.strip():
            continue
        kind = _kind(line)
        block = [line]
        is_closed = kind in ENDS and not line.startswith("    ")
        for following in lines:
            is_end = following == ENDS.get(kind) if is_closed else not following.strip()
            if is_end and not is_closed:
                break
            block.append(following)
            if is_end:
                break
        yield Part(kind, "\n".join(block))


def _kind(line: str) -> str:
    for kind, beginning in BEGINNINGS.items():
        if beginning.match(line):
            return kind
    return "text"


def without_pointers(text: str) -> str:
    """Text without what only points to other pages."""
    sentences = SENTENCE.split(ASIDE.sub("", text))
    return " ".join(each for each in sentences if not POINTER.fullmatch(each.strip()))


def title_of_exercise(number: int, folder: Path = FOLDER.parent / "exercises") -> tuple[str, str, str]:
    """(title, what one learns, file) of an exercise, of the table of all. Raises UsageError where it has none."""
    page = folder / "README.md"
    found = re.search(rf"^\| {number} \| \[([^\]]+)\]\(([^)]+)\) \| \d \| ([^|]+) \|", page.read_text(), re.M)
    if not found:
        raise UsageError(f"{page} has no exercise {number}")
    title, file, learnt = found.groups()
    return title, learnt, file


def paragraph_of(page: str, beginning: str, folder: Path = FOLDER) -> str:
    """The paragraph of a page that begins with these words in bold, without them. Raises UsageError for none."""
    found = re.search(rf"^\*\*{re.escape(beginning)}\*\* (.*?)(?=\n\n|\Z)", (folder / page).read_text(), re.S | re.M)
    if not found:
        raise UsageError(f"docs/{page} has no paragraph that begins with **{beginning}**")
    return " ".join(found[1].split())
