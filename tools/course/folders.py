"""Folders of a class: a site file, data and a clone without solutions that all share, and a clone for each learner."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.course.clones import OPEN_TO_JOIN, give_clone, require_account, write_class_clone
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
    clone = folder / "tutorial"
    if not clone.exists():
        actions.append(Action(f"copy this repository without solutions to {clone}", partial(write_class_clone, clone)))
    learners = folder / "learners"
    if not learners.exists():
        actions.append(Action(f"make {learners}, where learners can join", partial(_open_to_join, learners)))
    for account in accounts:
        own = learners / account
        if not own.exists():
            actions.append(_clone_for(folder, account))
    return actions


def _clone_for(folder: Path, account: str) -> Action:
    """How a learner comes to a clone: from the instructor where that is possible, else by a call of the learner."""
    own = folder / "learners" / account
    is_root = os.geteuid() == 0
    if is_root:
        require_account(account)
    if is_root or shutil.which("setfacl"):
        return Action(f"make {own}, which {account} can write and others cannot read", partial(_give, folder, account))
    return Action(_call_of(folder, account), _nothing)


def _call_of(folder, account):
    return f"let {account} call: cd {folder / 'tutorial'} && python -m tools.course join"


def _give(folder, account):
    try:
        give_clone(folder, account)
    except UsageError as error:
        print(f"no clone for {account} ({error}): {_call_of(folder, account)}")


def _nothing():
    pass


def _open_to_join(learners):
    learners.mkdir(parents=True)
    learners.chmod(OPEN_TO_JOIN)


def plan_reset(folder: Path, accounts: Sequence[str], numbers: Sequence[int]) -> list[Action]:
    """Exercises of these accounts as they were handed out; what the learners have written is kept beside.

    Raises UsageError for an account without a folder.
    """
    actions = []
    for account in accounts:
        own = folder / "learners" / account
        if not own.is_dir():
            raise UsageError(f"{own}: no such folder; python -m tools.course init or join makes it")
        for original in originals():
            theirs = own / "exercises" / original.name
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


def _free_name(file):
    """A name for what a file held: with the first number behind it that is not taken."""
    number = 1
    while file.with_name(f"{file.name}.{number}").exists():
        number += 1
    return file.with_name(f"{file.name}.{number}")


def _replace(theirs, kept, original):
    try:
        theirs.rename(kept)
        shutil.copyfile(original, theirs)
    except PermissionError:
        account = theirs.parents[1].name
        raise UsageError(f"{theirs}: you cannot write there: let {account} call reset without --accounts") from None
    if os.geteuid() == 0:
        owner = kept.stat()
        os.chown(theirs, owner.st_uid, owner.st_gid)
