"""The class's clone, which has no solutions, and a clone for each learner, which that learner and the instructor read.

    folder/tutorial         what is handed out; everyone can read it
    folder/learners/anna    anna's clone: exercises, runs and answers of a quiz

Root gives each learner a clone. Another instructor does so where ACLs work (man 5 acl). Elsewhere learners make their
own (`join`): it gets the group of folder/learners, so the instructor reads it as a member of that group.
"""

import os
import pwd
import shutil
import stat
import subprocess
from pathlib import Path

from utils.errors import UsageError, first_line, one_line

ROOT = Path(__file__).parents[2]
# What holds solutions, or pieces of them.
SOLUTIONS = ("exercises/solutions/", "tests/test_exercises.py", "tests/support/wrong_answers.py")
NOT_COPIED = ("__pycache__", ".venv", ".cache")  # which those who work there leave
# Of folder/learners: everyone can make a folder, nobody can list them or remove another's, and all get its group.
OPEN_TO_JOIN = stat.S_ISGID | stat.S_ISVTX | 0o733
PRIVATE = 0o700
SHARED_WITH_GROUP = 0o027  # umask: nothing for others


def write_class_clone(target: Path) -> None:
    """Copy the files of this repository, but for solutions, to a new folder that everyone can read.

    Raises UsageError where this is no clone of git, which tells what belongs to it.
    """
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise UsageError(f"{ROOT}: git cannot list its files: {one_line(done.stderr)}")
    part = _part_of(target)
    for name in done.stdout.split("\0"):
        source = ROOT / name
        # A file that was removed is still listed.
        is_wanted = name and not name.startswith(SOLUTIONS) and os.path.lexists(source)
        if is_wanted:
            copy = part / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy(source, copy)
    part.rename(target)


def give_clone(folder: Path, account: str) -> None:
    """Make the clone of a learner as root or by ACLs. Raises UsageError where neither works."""
    own = folder / "learners" / account
    part = _part_of(own)
    # Closed first, so that there is no moment in which others could read it.
    part.mkdir(mode=PRIVATE)
    _fill(part, folder)
    try:
        if os.geteuid() == 0:
            _chown(part, pwd.getpwnam(account))
        else:
            allow(part, {account: "rwX", str(os.geteuid()): "rwX"})
    except UsageError:
        shutil.rmtree(part)
        raise
    part.rename(own)


def join(folder: Path) -> Path:
    """Make the clone of the learner who calls this, unless there is one; returns its folder.

    Raises UsageError where it cannot be private to learner and instructor.
    """
    learners = folder / "learners"
    if not learners.is_dir():
        raise UsageError(f"{learners}: no such folder; the instructor's python -m tools.course init makes it")
    own = learners / account_of(os.geteuid())
    if own.exists():
        if not os.access(own, os.W_OK):
            owner = account_of(own.stat().st_uid)
            raise UsageError(f"{own}: it belongs to {owner}, and you cannot write there; ask the instructor")
        return own
    instructor = learners.stat()
    part = _part_of(own)
    mask = os.umask(SHARED_WITH_GROUP)
    try:
        # A new folder gets the group of its parent (man 2 mkdir), which the learner need not be in.
        part.mkdir()
        _fill(part, folder)
        is_of_learners = instructor.st_gid in {os.getegid(), *os.getgroups()}
        is_instructor = instructor.st_uid == os.geteuid()
        # In a group of all learners each could read the others' answers.
        if is_of_learners and not is_instructor:
            part.chmod(PRIVATE)
            allow(part, {str(instructor.st_uid): "rX"})
        part.rename(own)
    except UsageError as error:
        shutil.rmtree(part)
        mend = f"let the instructor call chgrp GROUP {learners}, with a group that has no learners"
        raise UsageError(f"{own}: the others of your group could read it: {error}; {mend}") from None
    finally:
        os.umask(mask)
    return own


def folder_of_class() -> Path:
    """The folder of the class whose clone, or a learner's clone, this program lies in.

    Raises UsageError where there is none.
    """
    for folder in (ROOT.parent, ROOT.parents[1]):
        if (folder / "learners").is_dir():
            return folder
    raise UsageError(f"{ROOT}: no clone of a class; name the folder of the class")


def closed_part_of(program: Path) -> Path | None:
    """The first folder on the way to a program, and to what it links to, that others cannot enter; None if none."""
    for path in (program, program.resolve()):
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & stat.S_IXOTH:
                return folder
    return None


def account_of(number: int) -> str:
    """The name of an account, or its number where it has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def require_account(account: str) -> None:
    """Raises UsageError unless there is such an account on this machine."""
    try:
        pwd.getpwnam(account)
    except KeyError:
        raise UsageError(f"{account!r}: no such account on this machine") from None


def allow(folder: Path, rights: dict[str, str]) -> None:
    """Give accounts rights to a folder and to all that will be in it. Raises UsageError where ACLs do not work."""
    entries = [f"u:{account}:{letters}" for account, letters in rights.items()]
    inherited = [f"d:{entry}" for entry in entries]
    try:
        done = subprocess.run(
            ["setfacl", "-R", "-m", ",".join([*entries, *inherited]), folder], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise UsageError("there is no setfacl (of the package acl)") from None
    except OSError as error:
        raise UsageError(f"setfacl: {first_line(error)}") from None
    if done.returncode != 0:
        raise UsageError(one_line(done.stderr))


def _part_of(target: Path) -> Path:
    """The name of a folder until it is whole; what an earlier attempt has left there is removed."""
    part = target.with_name(f".{target.name}.part")
    if part.exists():
        shutil.rmtree(part)
    return part


def _fill(part: Path, folder: Path) -> None:
    """Copy the class's clone, with rights by the umask, and link the data to where a clone has them."""
    source = folder / "tutorial"
    if not source.is_dir():
        raise UsageError(f"{source}: no such folder; the instructor's python -m tools.course init makes it")
    for at, folders, files in os.walk(source):
        folders[:] = [name for name in folders if name not in NOT_COPIED]
        there = part / Path(at).relative_to(source)
        # Its rights are not copied: a learner's folder passes its group on, and the class's does not.
        there.mkdir(exist_ok=True)
        for name in files:
            _copy(Path(at, name), there / name)
    (part / "data").symlink_to(folder)


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(source.readlink())
        return
    shutil.copyfile(source, target)
    if os.access(source, os.X_OK):
        rights = target.stat().st_mode
        may_read = rights & 0o444
        target.chmod(rights | may_read >> 2)


def _chown(folder: Path, account: pwd.struct_passwd) -> None:
    for at, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.chown(Path(at, name), account.pw_uid, account.pw_gid, follow_symlinks=False)
