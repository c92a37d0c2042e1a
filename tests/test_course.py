"""Tools of an instructor: thirty answers are checked at once, each bounded and without the instructor's rights."""

import json
import sys
from pathlib import Path

import pytest

from tests.support import programs
from tools.course.bounded import ALL
from tools.course.checking import Answer, Bounds, Result, check_answer, find_answers, tables
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
    return Answer(learner, int(name[:2]), file)


def solution(name):
    return (ROOT / "exercises/solutions" / name).read_text()


def checked(tmp_path, before, bounds=None):
    """The result of a right answer that does something else first, when it is loaded."""
    text = solution(TOKENS)
    marker = "from torch import Tensor\n"
    assert marker in text
    answer = hand_in(tmp_path, "anna", TOKENS, text.replace(marker, f"{marker}{before}\n"))
    return check_answer(answer, 3, bounds or Bounds())


def test_a_class_is_a_table_with_the_first_reason_of_each(tmp_path):
    hand_in(tmp_path, "anna", TOKENS, solution(TOKENS))
    hand_in(tmp_path, "anna", "15_collectives.py", solution("15_collectives.py"))
    hand_in(tmp_path, "ben", TOKENS, (ROOT / "exercises" / TOKENS).read_text())
    hand_in(tmp_path / "ben", "solutions", "15_collectives.py", "is none of ben's")
    words = [
        "-m",
        "tools.course",
        "check",
        "--all",
        str(tmp_path),
        "--seed",
        "3",
        "--json",
        str(tmp_path / "found.json"),
    ]
    run = programs.run(words)
    assert run.returncode == 1, run.stderr
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in run.stdout.splitlines()]
    assert ["learner", "14", "15", "right"] in lines
    assert ["anna", "right", "right", "2"] in lines and ["ben", "not yet", "-", "0"] in lines
    assert "| ben     |       14 | token 0 is not the patch at its place" in run.stdout
    assert "3 of 3: ben, exercise 14: not yet" in run.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["reason"] == "" for each in found] == [True, True, False]


@needs_linux
def test_an_answer_has_no_network_and_writes_in_its_folder_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    plain = checked(tmp_path, "open('mine.txt', 'w').close()")
    if plain.taken != list(ALL):
        pytest.skip(f"this system takes away {plain.taken} alone")
    assert plain.reason == ""
    wrote = checked(tmp_path, f"open({str(outside / 'theirs.txt')!r}, 'w').close()")
    assert "Read-only file system" in wrote.reason and not list(outside.iterdir())
    text = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
    assert "unreachable" in checked(tmp_path, text).reason
    text = "import ctypes; assert ctypes.CDLL(None).mount(None, b'/', None, 0x1020, None) == 0, 'no right to mount'"
    assert "no right to mount" in checked(tmp_path, text).reason


def test_time_and_memory_of_an_answer_are_bounded(tmp_path):
    assert checked(tmp_path, "import time; time.sleep(600)", Bounds(seconds=8)).reason != ""
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


def test_init_says_what_it_would_do_and_reset_keeps_what_was_there(tmp_path, capsys):
    (tmp_path / "quick").mkdir()  # the data are there
    plan = plan_class(tmp_path, ["anna", "ben"])
    assert len(plan) == 3 and not (tmp_path / "learners").exists()
    for action in plan:
        action.do()
    assert plan_class(tmp_path, ["anna", "ben"]) == []
    own = tmp_path / "learners/anna"
    assert len(list(own.iterdir())) == len(originals()) > 10
    assert f"DATA_DIR:={tmp_path / 'quick'}" in (tmp_path / "site.sh").read_text()

    theirs = own / TOKENS
    for text in ("first", "second"):
        theirs.write_text(text)
        assert plan_reset(tmp_path, ["anna"], [15]) == []
        (action,) = plan_reset(tmp_path, ["anna"], [])
        action.do()
    assert theirs.read_bytes() == (ROOT / "exercises" / TOKENS).read_bytes()
    assert [(own / f"{TOKENS}.{n}").read_text() for n in (1, 2)] == ["first", "second"]
    with pytest.raises(UsageError, match="no such folder"):
        plan_reset(tmp_path, ["carl"], [])
    for account in ("../carl", "", "."):
        with pytest.raises(UsageError, match="no name of an account"):
            plan_class(tmp_path, [account])


def test_the_timetable_has_commands_and_none_of_a_cluster():
    found = commands()
    assert "python -m tools.preflight" in found and len(found) >= 10
    assert not [command for command in found if "sbatch" in command or "make " in command]
    run = programs.run(["-m", "tools.course", "time", "--only", "utils.layout"])
    assert run.returncode == 0, run.stderr
    assert "python -m utils.layout --world_size 16" in run.stdout
