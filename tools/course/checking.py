"""Check the answers of a class: each in a process of its own, which is bounded and may not do much (bounded.py)."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tools.course.bounded import ALL
from tools.tables import format_table
from utils.errors import UsageError

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(\d\d)_\w+\.py")
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


def find_answers(folder: Path, numbers: Sequence[int] = ()) -> list[Answer]:
    """Files named like exercises in the folders of learners. numbers: of those exercises alone.

    Raises UsageError where there is none.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; it holds one folder for each learner")
    originals = {file.name for file in (ROOT / "exercises").glob("[0-9][0-9]_*.py")}
    answers = []
    for learner in sorted(path for path in folder.iterdir() if path.is_dir()):
        for file in sorted(learner.rglob("[0-9][0-9]_*.py")):
            number = int(file.name[:2])
            is_own = not any(part in NOT_LEARNERS for part in file.relative_to(learner).parts)
            is_wanted = not numbers or number in numbers
            if is_own and is_wanted and file.name in originals:
                answers.append(Answer(learner.name, number, file))
    if not answers:
        raise UsageError(f"{folder}: no exercise in it, such as anna/02_ring_all_reduce.py")
    return answers


def check_answer(answer: Answer, seed: int, bounds: Bounds) -> Result:
    """Run the check of one answer on a copy of it in a new folder."""
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
        process = subprocess.Popen(
            [*bounded, *check],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, complaint = process.communicate(timeout=bounds.seconds)
        except subprocess.TimeoutExpired:
            said, complaint = "", f"not done after {bounds.seconds} s"
        finally:
            _end_all(process)
        marked = scratch / "taken.json"
        taken = json.loads(marked.read_text()) if marked.exists() else []
    return Result(answer, _reason(process.returncode, said, complaint), taken)


def _end_all(process):
    """End the process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(status, said, complaint):
    if status == 0:
        return ""
    reasons = re.findall(r"^  - (.*)$", said, re.M)
    if reasons:
        return reasons[0]
    lines = complaint.strip().splitlines()
    return lines[-1] if lines else f"the check ended with status {status}"


def check_all(
    answers: Sequence[Answer], seed: int, bounds: Bounds, workers: int, tell: Callable[[str], None]
) -> list[Result]:
    """Check all answers, `workers` at a time. tell: is told each result as it comes."""
    results = []
    with ThreadPoolExecutor(workers) as pool:
        for number, result in enumerate(pool.map(lambda answer: check_answer(answer, seed, bounds), answers), 1):
            results.append(result)
            verdict = "not yet" if result.reason else "right"
            answer = result.answer
            tell(f"{number} of {len(answers)}: {answer.learner}, exercise {answer.number}: {verdict}")
    return results


def tables(results: Sequence[Result]) -> str:
    """Who has solved what, then the first reason of each answer that is not right yet."""
    numbers = sorted({result.answer.number for result in results})
    learners = sorted({result.answer.learner for result in results})
    verdicts = {}
    for result in results:
        verdicts[result.answer.learner, result.answer.number] = "not yet" if result.reason else "right"
    rows = []
    for learner in learners:
        solved = [verdicts.get((learner, number)) for number in numbers]
        rows.append([learner, *solved, solved.count("right")])
    columns = {"learner": "", **{str(number): "" for number in numbers}, "right": "d"}
    text = format_table(columns, rows)
    reasons = []
    for result in results:
        if result.reason:
            reasons.append([result.answer.learner, result.answer.number, result.reason])
    if reasons:
        text += "\n\n" + format_table({"learner": "", "exercise": "d", "first reason": ""}, reasons)
    return f"{text}\n\n{rights(results)}"


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
