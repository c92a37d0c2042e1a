"""Folders of a class: a site file, data that all share, and exercises for each learner."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from utils.errors import UsageError

ROOT = Path(__file__).parents[2]
EXERCISES = ROOT / "exercises"


@dataclass(frozen=True)
class Action:
    """Something to do, and the words that tell it."""

    words: str
    do: Callable[[], object]


def site_file(folder: Path) -> str:
    """The text of the site file of the class: the environment of this repository and the data of the folder."""
    return f': "${{PYTHON:={sys.executable}}}"\n: "${{DATA_DIR:={folder / "quick"}}}"\n'


def originals() -> list[Path]:
    """The exercises as they are handed out."""
    return sorted(EXERCISES.glob("[0-9][0-9]_*.py"))


def plan_class(folder: Path, accounts: Sequence[str]) -> list[Action]:
    """What is missing in the folder of a class. Raises UsageError for an account that is no name of a folder."""
    folder = folder.resolve()
    for account in accounts:
        is_name = account and account == Path(account).name and account not in (".", "..")
        if not is_name:
            raise UsageError(f"{account!r} is no name of an account: letters, digits, - and _")
    actions = []
    site = folder / "site.sh"
    if not site.exists():
        actions.append(Action(f"write {site}", partial(_write, site, site_file(folder))))
    data = folder / "quick"
    if not data.exists():
        make = [sys.executable, "-m", "weather.sample_data", str(data)]
        actions.append(
            Action(f"make sample data, 280 MB, in {data}", partial(subprocess.run, make, cwd=ROOT, check=True))
        )
    for account in accounts:
        own = folder / "learners" / account
        missing = [file for file in originals() if not (own / file.name).exists()]
        if missing:
            words = f"copy {len(missing)} exercises to {own}"
            actions.append(Action(words, partial(_copy, missing, own)))
    return actions


def plan_reset(folder: Path, accounts: Sequence[str], numbers: Sequence[int]) -> list[Action]:
    """Exercises of these accounts as they were handed out; what the learners have written is kept beside.

    Raises UsageError for an account without a folder.
    """
    actions = []
    for account in accounts:
        own = folder / "learners" / account
        if not own.is_dir():
            raise UsageError(f"{own}: no such folder; python -m tools.course init makes it")
        for original in originals():
            theirs = own / original.name
            is_wanted = not numbers or int(original.name[:2]) in numbers
            is_changed = theirs.exists() and theirs.read_bytes() != original.read_bytes()
            if is_wanted and is_changed:
                kept = _free_name(theirs)
                words = f"{theirs}: as handed out; the learner's is kept as {kept.name}"
                actions.append(Action(words, partial(_replace, theirs, kept, original)))
    return actions


def _write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _copy(files, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _free_name(file):
    """A name for what a file held: with the first number behind it that is not taken."""
    number = 1
    while file.with_name(f"{file.name}.{number}").exists():
        number += 1
    return file.with_name(f"{file.name}.{number}")


def _replace(theirs, kept, original):
    theirs.rename(kept)
    shutil.copyfile(original, theirs)
