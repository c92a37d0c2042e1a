"""Check the answers of a class: each in a process of its own, which is bounded and may not do much (bounded.py)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.commands import ROOT, started
from tools.course.bounded import ALL
from tools.tables import format_table
from utils.errors import UsageError
from utils.files import holds_no_code

NAME = re.compile(r"(\d\d)_\w+\.py")
RIGHT, UNTOUCHED, EMPTY = "right", "untouched", "empty"
MOST_BYTES = 2**20  # of an answer, which has a hundredth of that
MOST_LETTERS = 110  # of a reason
# Seconds that a check takes on two cores, most of them to start.
USUAL_SECONDS = 4
LONGER_SECONDS = {12: 30}  # it plans layouts
NOT_LEARNERS = ("solutions", "checks", "__pycache__")  # folders of this repository's exercises


@dataclass(frozen=True)
class Bounds:
    """What the check of one answer may use."""

    seconds: int = 120
    mebibytes: int = 8192  # address space of each process; PyTorch alone takes several GiB of it


@dataclass(frozen=True)
class Answer:
    """A file that a learner has handed in."""

    learner: str
    number: int
    file: Path


@dataclass(frozen=True)
class Result:
    """What the check says. reason: the first one, "" where the answer is right. taken: which of bounded.ALL."""

    answer: Answer
    reason: str
    taken: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One word: right, untouched, empty or wrong."""
        if self.reason in (UNTOUCHED, EMPTY):
            return self.reason
        return "wrong" if self.reason else RIGHT

    @property
    def was_run(self) -> bool:
        """Whether the learner's code ran."""
        return self.verdict in (RIGHT, "wrong")


def find_answers(folder: Path, numbers: Sequence[int] = ()) -> list[Answer]:
    """Files named like exercises in the folders of learners. numbers: of those exercises alone.

    Raises UsageError where there is none.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; it holds one folder for each learner")
    originals = {file.name for file in (ROOT / "exercises").glob("[0-9][0-9]_*.py")}
    answers = []
    for learner in learners_in(folder):
        for file in sorted(learner.rglob("[0-9][0-9]_*.py")):
            number = int(file.name[:2])
            is_own = not any(part in NOT_LEARNERS for part in file.relative_to(learner).parts)
            is_wanted = not numbers or number in numbers
            if is_own and is_wanted and file.name in originals:
                answers.append(Answer(learner.name, number, file))
    if not answers:
        raise UsageError(f"{folder}: no exercise in it, such as anna/02_ring_all_reduce.py")
    return answers


def learners_in(folder: Path) -> list[Path]:
    """The folders of learners, in order; what is hidden is none."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def state_without_running(answer: Answer) -> str:
    """Why an answer need not run: it is untouched, empty or no file that one can read. "" where it has to run."""
    file = answer.file
    try:
        if not file.is_file() or file.stat().st_size > MOST_BYTES:
            return "no file of an answer"
        if file.read_bytes() == (ROOT / "exercises" / file.name).read_bytes():
            return UNTOUCHED
        return EMPTY if holds_no_code(file) else ""
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def about_seconds(answers: Sequence[Answer], workers: int) -> float:
    """Seconds that these answers will take, about."""
    to_run = [answer for answer in answers if not state_without_running(answer)]
    seconds = sum(LONGER_SECONDS.get(answer.number, USUAL_SECONDS) for answer in to_run)
    return seconds / max(1, min(workers, len(to_run)))


def check_answer(answer: Answer, seed: int, bounds: Bounds) -> Result:
    """Run the check of one answer on a copy of it in a new folder, if it has to run."""
    state = state_without_running(answer)
    if state:
        return Result(answer, state)
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        scratch = Path(folder)
        copy = scratch / answer.file.name
        shutil.copyfile(answer.file, copy)
        check = [sys.executable, "-m", "exercises.check", str(answer.number), "--file", str(copy), "--seed", str(seed)]
        bounded = [sys.executable, "-m", "tools.course.bounded", folder, str(bounds.seconds), str(bounds.mebibytes)]
        # Nothing of the instructor's environment goes along: it may hold keys.
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": folder,
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "errors": "replace",
        }
        with started([*bounded, *check], cwd=folder, env=environment, **pipes) as process:
            try:
                said, complaint = process.communicate(timeout=bounds.seconds)
            except subprocess.TimeoutExpired:
                said, complaint = "", f"not done after {bounds.seconds} s"
        marked = scratch / "taken.json"
        taken = json.loads(marked.read_text()) if marked.exists() else []
    return Result(answer, reason_of(process.returncode, said, complaint), taken)


def reason_of(status: int, said: str, complaint: str) -> str:
    """The first reason that a check gives, in one short line; "" where it ended well."""
    if status == 0:
        return ""
    # A line of the learner's code stands below the reason.
    reason = re.search(r"^  - (.*)(?:\n {6}(.*))?$", said, re.M)
    if reason:
        first, below = reason.groups()
        text = f"{first} {below}" if below and first.endswith(":") else first
        return textwrap.shorten(text, MOST_LETTERS, placeholder=" ...")
    lines = complaint.strip().splitlines()
    return lines[-1] if lines else f"the check ended with status {status}"


def check_all(
    answers: Sequence[Answer], seed: int, bounds: Bounds, workers: int, tell: Callable[[str], None]
) -> list[Result]:
    """Check all answers, `workers` at a time. tell: is told each result as it comes."""
    seconds = about_seconds(answers, workers)
    tell(f"{len(answers)} answers, {workers} at a time: about {seconds:.0f} s")
    results = []
    with ThreadPoolExecutor(workers) as pool:
        for number, result in enumerate(pool.map(lambda answer: check_answer(answer, seed, bounds), answers), 1):
            results.append(result)
            answer = result.answer
            tell(f"{number} of {len(answers)}: {answer.learner}, exercise {answer.number}: {result.verdict}")
    return results


def tables(results: Sequence[Result], learners: Sequence[str] = ()) -> str:
    """Who has solved what, then the first reason of each answer that is wrong. learners: those of the class."""
    verdicts = {(result.answer.learner, result.answer.number): result.verdict for result in results}
    numbers = sorted({number for _, number in verdicts})
    # A clone has all exercises, and a class begins with few of them.
    begun = [number for number in numbers if _verdicts_of(number, verdicts) != {UNTOUCHED}]
    rows = []
    for learner in sorted({*learners, *(learner for learner, _ in verdicts)}):
        solved = [verdicts.get((learner, number)) for number in begun]
        rows.append([learner, *solved, solved.count(RIGHT)])
    titles = [str(number) for number in begun]
    columns = {"learner": "", **dict.fromkeys(titles, ""), RIGHT: "d"}
    text = format_table(columns, rows, titles)
    not_begun = [str(number) for number in numbers if number not in begun]
    if not_begun:
        text += f"\n\nUntouched by everyone: {', '.join(not_begun)}."
    reasons = []
    for result in results:
        if result.verdict == "wrong":
            reasons.append([result.answer.learner, result.answer.number, result.reason])
    if reasons:
        text += "\n\n" + format_table({"learner": "", "exercise": "d", "first reason": ""}, reasons, ["first reason"])
    nothing = sorted(set(learners) - {learner for learner, _ in verdicts})
    if nothing:
        text += f"\n\nNo exercise in the folder of {', '.join(nothing)}."
    ran = [result for result in results if result.was_run]
    return f"{text}\n\n{rights(ran)}" if ran else text


def _verdicts_of(number, verdicts):
    return {verdict for (_, each), verdict in verdicts.items() if each == number}


def rights(results: Sequence[Result]) -> str:
    """A sentence on what the answers could not do, and what they could all the same."""
    taken = list(ALL)
    for result in results:
        taken = [what for what in taken if what in result.taken]
    left = [what for what in ALL if what not in taken]
    text = f"Taken away from the answers: {', '.join(taken) or 'nothing'}."
    if left:
        text += f" This system cannot take away {' and '.join(left)}."
    return f"{text} They could read what you can read."
