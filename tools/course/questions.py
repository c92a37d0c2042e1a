"""The questions before and after each rung (docs/questions): their files, and which answers are right."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from utils.errors import UsageError, nearest, reported_as_usage_error
from utils.files import read_text
from utils.yaml_files import parse_yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/questions"
WHEN = ("before", "after")
RUNGS = (1, 2, 3, 4)
ROUNDING = 1e-9  # by which numbers that are read from text may differ
# How learners write numbers: as here, with commas between thousands, or with a decimal comma and points between
# thousands. docs/moving/questions.js has the same.
PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.I)
COMMAS = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]+)?")
DECIMAL_COMMA = re.compile(r"[+-]?([0-9]*|[1-9][0-9]{0,2}(\.[0-9]{3})+),[0-9]+")
# What a question may say; another key is a slip of the pen.
KEYS = ("ask", "answer", "because", "choices", "unit", "tolerance")


@dataclass(frozen=True)
class Question:
    """A question. choices: none where a number is asked for; tolerance: a share of that number.

    name: of the idea, which a question before the rung and one after it ask for. section: of the page that explains it.
    """

    name: str
    section: str
    ask: str
    answer: str
    because: str
    choices: tuple[str, ...] = ()
    unit: str = ""
    tolerance: float = 0.0

    def is_right(self, given: str) -> bool:
        """Whether an answer is right; an empty one is not."""
        if self.choices:
            return given == self.answer
        # A share of the answer, so that questions of any unit have one rule.
        wanted = float(self.answer)
        bound = self.tolerance * abs(wanted) + ROUNDING
        return any(abs(found - wanted) <= bound for found in numbers(given))


@dataclass(frozen=True)
class QuestionSet:
    """The questions before or after a rung. title: of the rung."""

    rung: int
    title: str
    when: str
    questions: tuple[Question, ...]

    @cached_property
    def mark(self) -> str:
        """A few characters that change with what is asked, so that answers to other questions are told apart."""
        # Explanations may change: they decide on no answer.
        asked = []
        for question in self.questions:
            choices = list(question.choices)
            asked.append([question.name, question.ask, question.answer, choices, question.tolerance])
        text = json.dumps(asked)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def numbers(text: str) -> list[float]:
    """The finite numbers that a text may mean: none, one, or the two of "1,000", which is one or a thousand."""
    text = text.strip()
    written = []
    if PLAIN.fullmatch(text):
        written.append(text)
    if DECIMAL_COMMA.fullmatch(text):
        written.append(text.replace(".", "").replace(",", "."))
    if COMMAS.fullmatch(text):
        written.append(text.replace(",", ""))
    found = [float(each) for each in written]
    return [each for each in found if math.isfinite(each)]


def complaint_of(text: str) -> str:
    """What to say to a learner whose answer is not one number; "" where it is."""
    found = numbers(text)
    if not found:
        return "A number, please."
    if len(found) > 1:
        small, large = (f"{each:g}" for each in found)
        # A keypad may have no point.
        ways = f"For {large}, leave the comma out; for {small}, add a zero at the end."
        return f"{text} may be {small} or {large}. {ways}"
    return ""


def read_questions(rung: int, folder: Path = FOLDER) -> dict[str, QuestionSet]:
    """The questions of a rung by when they are asked. Raises UsageError for a file that is not as it should be."""
    # The name of a file begins with its rung.
    (path,) = folder.glob(f"{rung}_*.yml")
    text = read_text(path)
    # First whether it is YAML at all, then whether it says what is needed.
    with reported_as_usage_error(ValueError, str(path)):
        content = parse_yaml(text)
    with reported_as_usage_error((KeyError, TypeError, AttributeError), f"{path}: not the form of such a file"):
        title = content["title"]
        listed = content["questions"]
        sets = {}
        for when in WHEN:
            questions = [_question(entry, when, path) for entry in listed]
            sets[when] = QuestionSet(rung, title, when, tuple(questions))
    return sets


def _question(entry: Mapping[str, Any], when: str, path: Path) -> Question:
    name = entry["name"]
    asked = entry[when]
    where = f"{path}: {name}, {when}"
    for key in asked:
        if key not in KEYS:
            raise UsageError(f"{where}: unknown key {key!r}{nearest(key, KEYS)}")
    # A number and a word of YAML become the text that a learner would give.
    choices = tuple(asked.get("choices", ()))
    answer = str(asked["answer"])
    # A wrong file would judge a whole class wrongly.
    if choices and answer not in choices:
        raise UsageError(f"{where}: the answer {answer!r} is no choice")
    if not choices and len(numbers(answer)) != 1:
        raise UsageError(f"{where}: the answer {answer!r} is no number")
    unit = asked.get("unit", "")
    tolerance = asked.get("tolerance", 0.0)
    return Question(name, entry["section"], asked["ask"], answer, asked["because"], choices, unit, tolerance)
