"""The questions before and after each rung (docs/questions) as HTML, where docs/questions.md has their marks.

Without JavaScript a question unfolds to its answer. With it, docs/moving/questions.js asks for an answer first, and
docs/moving/quiz.js counts and saves.
"""

import re
from html import escape
from pathlib import Path

from tools.course.quiz import Question, QuestionSet, read_questions

FOLDER = Path(__file__).parent
MARK = re.compile(r"<!-- questions: (\d) (before|after) -->")


def insert(content: str) -> str:
    """The HTML of a page with questions in place of their marks."""
    return MARK.sub(lambda found: questions_as_html(read_questions(int(found[1]))[found[2]]), content)


def questions_as_html(questions: QuestionSet) -> str:
    """The questions before or after a rung."""
    parts = []
    for place, question in enumerate(questions.questions, 1):
        parts.append(_question(place, question))
    about = f'data-rung="{questions.rung}" data-when="{questions.when}" data-questions="{questions.mark}"'
    title = f"Ten questions {questions.when} rung {questions.rung}, {escape(questions.title)}"
    body = "\n".join(parts)
    return f'<details class="quiz" {about}><summary>{title}</summary>\n{body}\n</details>'


def _question(place: int, question: Question) -> str:
    attributes = {"name": question.name, "answer": question.answer}
    others = ""
    if question.choices:
        attributes["choices"] = "|".join(question.choices)
        # With JavaScript the choices stand in a list to choose from.
        others = f"<noscript> ({escape('; '.join(question.choices))})</noscript>"
    else:
        attributes["tolerance"] = str(question.tolerance)
        attributes["unit"] = question.unit
    data = ""
    for name, value in attributes.items():
        data += f' data-{name}="{escape(value)}"'
    asked = f"<summary>{place}. {_code(question.ask)}{others}</summary>"
    answer = f"{escape(question.answer)} {escape(question.unit)}".rstrip()
    explained = f"<p><strong>{answer}.</strong> {_code(question.because)} {_link(question.section)}</p>"
    return f'<details class="predict"{data}>{asked}{explained}</details>'


def _code(text: str) -> str:
    """Text in which words between backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _link(section: str) -> str:
    """A link to a section of a page, with the names of both."""
    page, _, anchor = section.partition("#")
    headings = re.findall(r"^#+ (.*)$", (FOLDER / page).read_text(), re.M)
    (heading,) = [each for each in headings if anchor_of(each) == anchor]
    address = f"{page.removesuffix('.md')}.html#{anchor}"
    return f'<a href="{address}">{escape(headings[0])}: {escape(heading)}</a>'


def anchor_of(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
