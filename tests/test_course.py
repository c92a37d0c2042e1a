"""Tools of an instructor: thirty answers are checked at once, each bounded and without the instructor's rights."""

import json
import os
import pwd
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import programs
from tools.course import clones
from tools.course.__main__ import main
from tools.course.bounded import ALL
from tools.course.checking import Answer, Bounds, Result, check_answer, find_answers, reason_of, tables
from tools.course.clones import account_of, join
from tools.course.folders import originals, plan_class, plan_reset
from tools.course.timetable import commands
from utils.errors import UsageError

ROOT = Path(__file__).parents[1]
TOKENS = "14_patches.py"  # an exercise of one process
needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="rights are taken away on Linux alone")


def hand_in(folder, learner, name, text):
    file = folder / learner / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return Answer(learner, int(file.name[:2]), file)


def solution(name):
    return (ROOT / "exercises/solutions" / name).read_text()


def original(name):
    return (ROOT / "exercises" / name).read_text()


def checked(tmp_path, before, bounds=None):
    """The result of a right answer that does something else first, when it is loaded."""
    text = solution(TOKENS)
    marker = "from torch import Tensor\n"
    assert marker in text
    answer = hand_in(tmp_path, "anna", TOKENS, text.replace(marker, f"{marker}{before}\n"))
    return check_answer(answer, 3, bounds or Bounds())


def test_a_class_is_a_table_with_the_first_reason_of_each(tmp_path):
    hand_in(tmp_path, "anna", TOKENS, solution(TOKENS))
    hand_in(tmp_path, "anna", "15_collectives.py", "# nothing yet\n")
    hand_in(tmp_path, "anna", "09_rule_for_shard_tensor.py", original("09_rule_for_shard_tensor.py"))
    hand_in(tmp_path, "ben", TOKENS, original(TOKENS))
    hand_in(tmp_path / "ben", "solutions", "15_collectives.py", "is none of ben's")
    hand_in(tmp_path, "dora", f"exercises/{TOKENS}", "import os\nos._exit(0)\n")
    (tmp_path / "carl").mkdir()
    words = ["--seed", "3", "--workers", "1", "--json", str(tmp_path / "found.json")]
    run = programs.run(["-m", "tools.course", "check", "--all", str(tmp_path), *words])
    assert run.returncode == 1, run.stderr
    assert run.stdout.startswith("""\
| learner | 14        | 15    | right |
|---------|-----------|-------|------:|
| anna    | right     | empty |     1 |
| ben     | untouched | -     |     0 |
| carl    | -         | -     |     0 |
| dora    | wrong     | -     |     0 |

Untouched by everyone: 9.

| learner | exercise | first reason                                         |
|---------|---------:|------------------------------------------------------|
| dora    |       14 | it has ended itself with status 0, without an answer |

No exercise in the folder of carl.
""")
    said = run.stderr.splitlines()
    assert said[0] == "5 answers, 1 at a time: about 8 s" and said[-1] == "5 of 5: dora, exercise 14: wrong"
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["verdict"] for each in found] == ["untouched", "right", "empty", "untouched", "wrong"]


def test_reasons_are_short_and_say_where_a_loop_is():
    loop = "still waiting after 6 s in line 9, in merge:"
    assert reason_of(1, f"Exercise 7: not yet.\n  - {loop}\n      while True:\n  - more\n", "") == f"{loop} while True:"
    long = reason_of(1, f"  - line 3: {'long ' * 99}\n      raise\n", "")
    assert len(long) <= 110 and long.endswith("long ...")


ATTEMPTS = """
import ctypes, socket
def attempt(function):
    try:
        function()
    except OSError as error:
        return error.strerror
    return "done"
said = [
    attempt(lambda: open("mine.txt", "w").close()),
    attempt(lambda: open("{outside}", "w").close()),
    attempt(lambda: socket.create_connection(("192.0.2.1", 80), timeout=1)),
    "mount " + str(ctypes.CDLL(None).mount(None, b"/", None, 0x1020, None)),
]
raise RuntimeError(", ".join(said))
"""


@needs_linux
def test_an_answer_has_no_network_and_writes_in_its_folder_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    found = checked(tmp_path, ATTEMPTS.format(outside=outside / "theirs.txt"))
    if found.taken != list(ALL):
        pytest.skip(f"this system takes away {found.taken} alone")
    assert "done, Read-only file system, Network is unreachable, mount -1" in found.reason
    assert not list(outside.iterdir())


@pytest.mark.slow("answers that take all time and memory")
def test_time_and_memory_of_an_answer_are_bounded(tmp_path):
    assert checked(tmp_path, "import time; time.sleep(600)", Bounds(seconds=4)).reason != ""
    # Twice what is allowed, of which nothing is used.
    text = "import mmap; mmap.mmap(-1, 16 * 2**30)"
    assert "Cannot allocate memory" in checked(tmp_path, text).reason


def test_an_answer_sees_nothing_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_SECRET", "key")
    text = "import os; assert 'COURSE_SECRET' not in os.environ, 'it is there'"
    assert checked(tmp_path, text).reason == ""


def test_what_cannot_be_taken_away_is_said(tmp_path):
    answer = hand_in(tmp_path, "anna", TOKENS, "")
    assert "Taken away from the answers: nothing. This system cannot take away the network and writing" in tables(
        [Result(answer, "", [])]
    )
    assert "cannot" not in tables([Result(answer, "", list(ALL))])


def test_a_folder_without_answers_is_refused_in_one_line(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match=str(folder)):
            find_answers(folder)


@pytest.fixture
def course():
    """The folder of a class, which every account reaches, with data and a small clone without solutions."""
    with tempfile.TemporaryDirectory(prefix="course-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        folder.parent.chmod(folder.parent.stat().st_mode | 0o011)  # the tests' own folder is closed to others
        (folder / "quick").mkdir()
        (folder / "site.sh").write_text("")
        exercises = folder / "tutorial/exercises"
        exercises.mkdir(parents=True)
        for file in originals():
            shutil.copy(file, exercises)
        yield folder


def begin(folder, accounts):
    """Do what `init` plans; returns the words of it."""
    plan = plan_class(folder, accounts)
    for action in plan:
        action.do()
    return [action.words for action in plan]


def test_init_says_what_it_would_do_and_hands_out_no_solutions(tmp_path, capsys, monkeypatch):
    (tmp_path / "quick").mkdir()  # the data are there
    accounts = [account_of(os.geteuid())]
    assert len(plan_class(tmp_path, accounts)) == 4 and not (tmp_path / "learners").exists()
    assert main(["init", str(tmp_path), "--accounts", *accounts, "--write"]) == 0
    assert plan_class(tmp_path, accounts) == [] or "let " in capsys.readouterr().out
    assert f"DATA_DIR:={tmp_path / 'quick'}" in (tmp_path / "site.sh").read_text()
    own = join(tmp_path)  # which changes nothing where there is a clone
    assert own == tmp_path / "learners" / accounts[0]
    for clone in (tmp_path / "tutorial", own):
        assert [file.name for file in sorted(clone.glob("exercises/[0-9]*.py"))] == [file.name for file in originals()]
        assert not (clone / "exercises/solutions").exists() and (clone / "docs/teaching.md").exists()
        assert (clone / "submit_dp.sh").stat().st_mode & 0o111 and (clone / "submit_pm_dp.sh").is_symlink()
    assert (own / "data/quick").is_dir()
    for clone in (tmp_path / "tutorial", own):  # where a learner's commands run
        monkeypatch.setattr(clones, "ROOT", clone)
        assert main(["reset"]) == 0 and "nothing to do" in capsys.readouterr().out
    monkeypatch.setattr(clones, "ROOT", tmp_path)
    program = tmp_path / "learners" / "python"
    assert clones.closed_part_of(program) in program.parents  # which nobody else can enter
    with pytest.raises(UsageError, match="no clone of a class"):
        main(["join"])
    with pytest.raises(UsageError, match="something already"):
        main(["clone", str(own)])


def test_reset_keeps_what_was_there(course):
    own = course / "learners/anna"
    shutil.copytree(course / "tutorial", own)
    theirs = own / "exercises" / TOKENS
    for text in ("first", "second"):
        theirs.write_text(text)
        assert plan_reset(course, ["anna"], [15]) == []
        (action,) = plan_reset(course, ["anna"], [])
        action.do()
    assert theirs.read_bytes() == (ROOT / "exercises" / TOKENS).read_bytes()
    assert [theirs.with_name(f"{TOKENS}.{n}").read_text() for n in (1, 2)] == ["first", "second"]
    with pytest.raises(UsageError, match="no such folder"):
        plan_reset(course, ["carl"], [])
    for account in ("../carl", "", "."):
        with pytest.raises(UsageError, match="no name of an account"):
            plan_class(course, [account])


# Accounts of every Linux, and groups that none of them is in by itself.
ANNA, BEN, INSTRUCTOR = "daemon", "nobody", "sys"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for several accounts")


def as_account(name, function, *args, group=None):
    """What a function returns for an account, as text, or the name of its error and what it says."""
    account = pwd.getpwnam(name)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(account.pw_gid if group is None else group)
            os.setuid(account.pw_uid)
            said = str(function(*args))
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    with os.fdopen(ours) as pipe:
        return pipe.read()


def expect_private_clones(course, instructor, group=None):
    """Anna and Ben write in their clones and cannot read each other's; the instructor reads both."""
    for name, other in ((ANNA, BEN), (BEN, ANNA)):
        own = course / "learners" / name
        for file in (own / "exercises" / TOKENS, own / "quiz_1_before.json"):
            said = as_account(name, file.write_text, name, group=group)
            assert said == str(len(name)), (name, said)
            said = as_account(other, file.read_text, group=group)
            assert said.startswith("PermissionError"), (other, said)
            assert as_account(instructor, file.read_text, group=group) == name
        (own / "exercises" / TOKENS).unlink()
        said = as_account(other, (own / "mine").write_text, "", group=group)
        assert said.startswith("PermissionError")


@needs_root
def test_clones_by_root_are_their_learners_alone(course):
    begin(course, [ANNA, BEN])
    expect_private_clones(course, "root")
    theirs = course / "learners" / ANNA / "exercises/15_collectives.py"
    for text in ("first", "second"):  # what was handed out anew is the learner's too
        assert as_account(ANNA, theirs.write_text, text) == str(len(text))
        (action,) = plan_reset(course, [ANNA], [15])
        action.do()
    with pytest.raises(UsageError, match="'no-such': no such account"):
        plan_class(course, ["no-such"])


@needs_root
def test_learners_make_clones_that_the_instructor_reads(course, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no ACLs
    shutil.chown(course, INSTRUCTOR)
    said = as_account(INSTRUCTOR, begin, course, [ANNA, BEN])
    assert said.count("python -m tools.course join") == 2 and "Error" not in said
    assert as_account(ANNA, join, course) == str(course / "learners" / ANNA)
    assert as_account(BEN, join, course) == str(course / "learners" / BEN)
    expect_private_clones(course, INSTRUCTOR)
    theirs = course / "learners" / ANNA / "exercises/15_collectives.py"
    as_account(ANNA, theirs.write_text, "x")
    said = as_account(INSTRUCTOR, lambda: [each.do() for each in plan_reset(course, [ANNA], [15])])
    assert "let daemon call reset" in said
    assert as_account(ANNA, main, ["reset", str(course), "--numbers", "15", "--write"]) == "0"


@needs_root
@pytest.mark.parametrize("who", [INSTRUCTOR, "learners"])
def test_in_one_group_clones_are_private_by_acls(course, monkeypatch, who):
    group = 100
    os.chown(course, pwd.getpwnam(INSTRUCTOR).pw_uid, group)
    accounts = [ANNA, BEN] if who == INSTRUCTOR else []
    as_account(INSTRUCTOR, begin, course, accounts, group=group)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", "")
    if who == "learners":
        assert "others of your group could read it: there is no setfacl" in as_account(ANNA, join, course, group=group)
    monkeypatch.setenv("PATH", path)
    if not shutil.which("setfacl"):
        pytest.skip("no setfacl")
    for name in (ANNA, BEN):
        said = as_account(name, join, course, group=group)
        assert said == str(course / "learners" / name), said
    expect_private_clones(course, INSTRUCTOR, group)


def test_the_timetable_has_commands_and_none_of_a_cluster():
    found = commands()
    assert "python -m tools.preflight" in found and len(found) >= 10
    assert not [command for command in found if "sbatch" in command or "make " in command]
    run = programs.run(["-m", "tools.course", "time", "--only", "utils.layout"])
    assert run.returncode == 0, run.stderr
    assert "python -m utils.layout --world_size 16" in run.stdout
