"""A quiz before and after a rung: a learner answers, and an instructor sees what a class knows.

The questions lie in docs/questions, a file for each rung and time.

Answers are JSON: {"rung", "when", "questions": the mark of what was asked, "time", "answers": {name: text}}. The page
of the site (docs/moving/quiz.js) saves the same.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.course.checking import learners_in
from tools.tables import format_table
from utils.errors import UsageError, nearest, one_line, os_errors_as_usage_errors, reported_as_usage_error
from utils.files import read_json, read_text, write_json
from utils.yaml_files import parse_yaml

PATTERN = "quiz_*.json"
MOST_BYTES = 2**20  # of a file of answers, which has less than a hundredth of that
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


@dataclass(frozen=True)
class HandedIn:
    """Answers of a learner before or after a rung. right: {name of a question: whether its answer is right}."""

    learner: str
    rung: int
    when: str
    time: str
    right: dict[str, bool]


def file_of(folder: Path, questions: QuestionSet) -> Path:
    """The file of a learner's answers."""
    return folder / f"quiz_{questions.rung}_{questions.when}.json"


def take(folder: Path, questions: QuestionSet, read: Callable[[str], str], tell: Callable[[str], None]) -> Path:
    """Ask the questions one by one, each with its answer behind it; returns the file of the answers.

    read: shows a prompt and returns a line. Raises UsageError where there are answers already, or where lines end
    too early: nothing is written then.
    """
    # Nothing that was handed in is ever written over.
    file = file_of(folder, questions)
    if file.exists():
        raise UsageError(f"{file}: these questions are answered; the first answers count")
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder for your answers")
    tell(f"Ten questions {questions.when} rung {questions.rung}, {questions.title}. An empty line: I do not know.")
    # Answers are kept in memory until the last one: a file has all of them.
    answers: dict[str, str] = {}
    for place, question in enumerate(questions.questions, 1):
        tell(f"\n{place}. {question.ask}")
        try:
            given = _ask(question, read, tell)
        except EOFError:
            raise UsageError(f"stopped after {len(answers)} answers: nothing was written") from None
        answers[question.name] = given
        verdict = "Right."
        if not question.is_right(given):
            answer = f"{question.answer} {question.unit}".rstrip()
            verdict = f"It is {answer}."
        tell(f"   {verdict} {question.because} (docs/{question.section})")
    # The mark tells which questions these were, should they change later.
    record = {
        "rung": questions.rung,
        "when": questions.when,
        "questions": questions.mark,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "answers": answers,
    }
    write_json(file, record)
    return file


def _ask(question: Question, read: Callable[[str], str], tell: Callable[[str], None]) -> str:
    """An answer to a question as the page would give it: a choice in full, or a number."""
    # Choices are typed as letters and kept as words, as the page keeps them.
    letters = {}
    for letter, choice in zip("abcdefgh", question.choices, strict=False):
        letters[letter] = choice
        tell(f"   {letter}  {choice}")
    wanted = question.unit or "number"
    if letters:
        wanted = "/".join(letters)
    # Whatever is neither an answer nor an empty line is asked for again.
    while True:
        given = read(f"   [{wanted}] ").strip()
        if not given:
            return ""
        letter = given.lower()
        if letter in letters:
            return letters[letter]
        complaint = "A letter, please." if letters else complaint_of(given)
        if not complaint:
            return given
        tell(f"   {complaint}")


def read_class(folder: Path) -> tuple[list[HandedIn], list[str]]:
    """The first answers of each learner before and after each rung, and a line for each file that does not count.

    Raises UsageError where no learner has answered.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; it holds one folder for each learner")
    # One bad file costs nobody the answers of the others.
    found: dict[tuple[str, int, str], HandedIn] = {}
    complaints = []
    files = list(_files(folder))
    for learner, file in files:
        try:
            handed = _read(learner, file)
        except UsageError as error:
            complaints.append(one_line(str(error)))
            continue
        key = (learner, handed.rung, handed.when)
        earlier = found.get(key)
        if earlier:
            complaints.append(f"{file}: {learner} has answered these questions twice; the first answers count")
            # Times are texts of one form and zone, so that they sort.
            if earlier.time <= handed.time:
                continue
        found[key] = handed
    if not files:
        raise UsageError(f"{folder}: no answers in it, such as anna/quiz_2_after.json")
    return list(found.values()), complaints


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Learners and their files of answers, in order."""
    for own in learners_in(folder):
        for file in sorted(own.rglob(PATTERN)):
            yield own.name, file


def _read(learner: str, file: Path) -> HandedIn:
    # Folders of learners may hold anything, a device or a huge file too.
    if not file.is_file() or file.stat().st_size > MOST_BYTES:
        raise UsageError(f"{file}: no file of answers")
    with os_errors_as_usage_errors():
        record = read_json(file)
    rung, when, answers, time = _parts(record, file)
    questions = read_questions(rung)[when]
    if record.get("questions") != questions.mark:
        raise UsageError(f"{file}: answers to other questions than those of docs/questions; it does not count")
    # What was left out counts as not known, and so does what is no text.
    right = {}
    for question in questions.questions:
        given = answers.get(question.name, "")
        right[question.name] = isinstance(given, str) and question.is_right(given)
    return HandedIn(learner, rung, when, time, right)


def _parts(record: Any, file: Path) -> tuple[int, str, dict[str, Any], str]:
    """Rung, when, answers and time of a record, if it has them."""
    if not isinstance(record, dict):
        raise UsageError(f"{file}: no answers of a quiz")
    rung: Any = record.get("rung")
    when: Any = record.get("when")
    answers: Any = record.get("answers")
    # JSON that a learner has edited may hold any type.
    has_rung = isinstance(rung, int) and rung in RUNGS
    has_moment = isinstance(when, str) and when in WHEN
    has_answers = isinstance(answers, dict)
    if not (has_rung and has_moment and has_answers):
        raise UsageError(f"{file}: no answers of a quiz: it lacks a rung, before or after, or the answers")
    return rung, when, answers, str(record.get("time", ""))


def quiz_tables(handed: Sequence[HandedIn], learners: Sequence[str] = ()) -> str:
    """A table of questions for each rung, and one of learners. learners: those of the class."""
    texts = []
    for rung in sorted({each.rung for each in handed}):
        of_rung = [each for each in handed if each.rung == rung]
        texts.append(_table_of_questions(rung, of_rung))
    texts.append(_table_of_learners(handed, learners))
    return "\n\n".join(texts)


def _table_of_questions(rung: int, handed: Sequence[HandedIn]) -> str:
    """Shares of right answers; the gain is of learners who have answered before and after."""
    sets = read_questions(rung)
    by_when: dict[str, dict[str, HandedIn]] = {when: {} for when in WHEN}
    for each in handed:
        by_when[each.when][each.learner] = each
    before, after = by_when["before"], by_when["after"]
    # Learners who missed one of the two would make a gain of what they knew already.
    both = sorted(before.keys() & after.keys())
    names = [question.name for question in sets["before"].questions]
    wanted = {name: [name] for name in names}
    wanted["all"] = names
    # A row for each question, and one for all together.
    rows: list[list[Any]] = []
    for label, chosen in wanted.items():
        gain = None
        if both:
            of_both_before = [before[learner] for learner in both]
            of_both_after = [after[learner] for learner in both]
            gain = _percent(of_both_after, chosen) - _percent(of_both_before, chosen)
        share_before = _percent(before.values(), chosen)
        share_after = _percent(after.values(), chosen)
        rows.append([label, share_before, share_after, gain])
    columns = {f"rung {rung}, right answers": "", "before, %": ".0f", "after, %": ".0f", "gain": "+.0f"}
    learners = "learner" if len(before) == 1 else "learners"
    counts = f"{len(before)} {learners} before, {len(after)} after."
    gains = f"Gain: percentage points, of the {len(both)} with both."
    return f"{format_table(columns, rows)}\n\n{counts} {gains}"


def _percent(handed, names):
    """Right answers to these questions, in percent; None where nobody has answered."""
    verdicts = []
    for each in handed:
        verdicts += [each.right[name] for name in names]
    if not verdicts:
        return None
    return 100 * sum(verdicts) / len(verdicts)


def _table_of_learners(handed: Sequence[HandedIn], learners: Sequence[str]) -> str:
    """Right answers of each learner, of those too who have answered nothing."""
    # Only what somebody has answered gets a column.
    counts = {}
    for each in handed:
        counts[each.learner, each.rung, each.when] = sum(each.right.values())
    sets = [(rung, when) for rung in RUNGS for when in WHEN]
    answered = {(each.rung, each.when) for each in handed}
    asked = [each for each in sets if each in answered]
    columns = {"learner": ""}
    for rung, when in asked:
        columns[f"{when} rung {rung}"] = "d"
    rows: list[list[Any]] = []
    for learner in sorted({*learners, *(each.learner for each in handed)}):
        of_learner = [counts.get((learner, rung, when)) for rung, when in asked]
        rows.append([learner, *of_learner])
    return format_table(columns, rows)
