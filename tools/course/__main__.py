"""Give a course: folders for a class, answers checked at once, a quiz, and how long the timetable's commands take.

python -m tools.course init /project/course --accounts anna ben          # says what it would do; --write does it
python -m tools.course join                                              # a learner's own clone, in the class's one
python -m tools.course clone /tmp/tutorial                               # this repository without solutions
python -m tools.course check --all /project/course/learners              # a table of learners and exercises
python -m tools.course reset /project/course --accounts ben --numbers 2  # ben's exercise 2 as it was handed out
python -m tools.course quiz --take 2 --before                            # a learner answers ten questions
python -m tools.course quiz /project/course/learners                     # what a class knows before and after
python -m tools.course time                                              # the commands of docs/teaching.md
"""

import json
import os
import random
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from tools.course.checking import Bounds, check_all, find_answers, learners_in, tables
from tools.course.clones import account_of, closed_part_of, folder_of_class, join, write_class_clone
from tools.course.folders import Action, plan_class, plan_reset
from tools.course.quiz import RUNGS, quiz_tables, read_class, read_questions, take
from tools.course.timetable import commands, seconds_of
from tools.tables import format_table
from utils.errors import ArgumentParser, UsageError, int_in_range, run_main

WRONG_STATUS = 1
EVERYONE_READS = 0o022  # umask


def parse(argv: Sequence[str] | None) -> Namespace:
    """The options of a command line."""
    parser = ArgumentParser(prog="python -m tools.course", description="Give a course.")
    ways = parser.add_subparsers(dest="way", required=True)
    init = ways.add_parser("init", help="a site file, sample data, and a clone without solutions for each account")
    reset = ways.add_parser("reset", help="exercises as they were handed out")
    join_way = ways.add_parser("join", help="a learner's own clone")
    of_folder = "of the class, which everyone can read"
    init.add_argument("folder", type=Path, help=of_folder)
    # Learners call these in the class's clone or in their own, which lie in the folder.
    for way in (reset, join_way):
        way.add_argument("folder", type=Path, nargs="?", help=of_folder)
    init.add_argument("--accounts", nargs="+", default=[], metavar="NAME", help="of the learners")
    reset.add_argument("--accounts", nargs="+", metavar="NAME", help="of the learners; none: your own")
    for way in (init, reset):
        way.add_argument("--write", action="store_true", help="do it; without, only say what would be done")
    clone = ways.add_parser("clone", help="this repository without solutions")
    clone.add_argument("folder", type=Path, help="a new folder for it")
    check = ways.add_parser("check", help="check the answers of a class")
    check.add_argument("--all", type=Path, required=True, metavar="DIR", help="a folder for each learner in it")
    check.add_argument("--seconds", type=int_in_range(5, 3600), default=Bounds.seconds, help="for one answer")
    check.add_argument("--mebibytes", type=int_in_range(1024, 2**20), default=Bounds.mebibytes, help="of each process")
    check.add_argument("--workers", type=int_in_range(1, 256), default=max(1, (os.cpu_count() or 2) // 2))
    check.add_argument("--seed", type=int_in_range(0, 2**31 - 1), help="of the random sizes and values, for all alike")
    check.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    for way in (check, reset):
        way.add_argument("--numbers", nargs="+", type=int_in_range(1, 99), default=[], metavar="N", help="exercises")
    quiz = ways.add_parser("quiz", help="ten questions before and after each rung, or the results of a class")
    quiz.add_argument("folder", type=Path, nargs="?", default=Path(), help="of all learners; with --take: for answers")
    quiz.add_argument("--take", type=int, choices=RUNGS, metavar="RUNG", help="answer the questions of this rung")
    moment = quiz.add_mutually_exclusive_group()
    moment.add_argument("--before", dest="when", action="store_const", const="before", help="the rung")
    moment.add_argument("--after", dest="when", action="store_const", const="after", help="the rung")
    timed = ways.add_parser("time", help="seconds that the timetable's commands take here")
    timed.add_argument("--only", default="", metavar="WORDS", help="commands that contain these words")
    timed.add_argument("--seconds", type=int_in_range(1, 36000), default=1200, help="after which a command is ended")
    return parser.parse_args(argv)


def carry_out(actions: Sequence[Action], write: bool) -> int:
    """Do the actions, or say which there are."""
    if not actions:
        print("nothing to do")
    for action in actions:
        print(action.words if write else f"would {action.words}", flush=True)
        if write:
            action.do()
    if actions and not write:
        print("nothing was done: add --write")
    return 0


def clone_to(folder: Path) -> int:
    """Copy this repository without solutions to a new folder."""
    if folder.exists():
        raise UsageError(f"{folder}: there is something already")
    os.umask(EVERYONE_READS)
    write_class_clone(folder)
    print(f"{folder}: this repository without solutions")
    return 0


def check_class(options: Namespace) -> int:
    """Check all answers; 0 if each is right."""
    answers = find_answers(options.all, options.numbers)
    seed = options.seed
    if seed is None:
        seed = random.SystemRandom().randrange(10**6)
    bounds = Bounds(options.seconds, options.mebibytes)

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    results = check_all(answers, seed, bounds, options.workers, tell)
    folders = learners_in(options.all)
    for folder in folders:
        if not os.access(folder, os.R_OK | os.X_OK):
            tell(f"{folder}: you cannot read this folder")
    print(f"{tables(results, [folder.name for folder in folders])} Seed {seed}.")
    if options.json:
        rows = []
        for result in results:
            answer = result.answer
            rows.append(
                {
                    "learner": answer.learner,
                    "exercise": answer.number,
                    "verdict": result.verdict,
                    "reason": result.reason,
                }
            )
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return WRONG_STATUS if any(result.reason for result in results) else 0


def hold_quiz(options: Namespace) -> int:
    """Ask a learner, or show the results of a class; 1 if a file of answers does not count."""
    if options.take:
        if options.when is None:
            raise UsageError(f"quiz --take {options.take}: add --before or --after")
        questions = read_questions(options.take)[options.when]
        file = take(options.folder, questions, input, print)
        print(f"\nYour answers are in {file}.")
        return 0
    if options.when:
        raise UsageError(f"quiz --{options.when} goes with --take")
    handed, complaints = read_class(options.folder)
    for line in complaints:
        print(line, file=sys.stderr)
    if not handed:
        raise UsageError(f"{options.folder}: no answers that count")
    print(quiz_tables(handed, [folder.name for folder in learners_in(options.folder)]))
    return WRONG_STATUS if complaints else 0


def time_commands(options: Namespace) -> int:
    """A table of the timetable's commands; 1 if one fails."""
    chosen = [command for command in commands() if options.only in command]
    if not chosen:
        raise UsageError(f"--only {options.only!r}: no command of docs/teaching.md contains it")
    rows = []
    for command in chosen:
        print(f"$ {command}", file=sys.stderr, flush=True)
        rows.append([command, seconds_of(command, options.seconds)])
    print(format_table({"command": "", "s": ".0f"}, rows))
    return WRONG_STATUS if any(seconds is None for _, seconds in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    options = parse(argv)
    if options.way == "init":
        # Everyone reads what is made here, whatever the instructor's mask.
        os.umask(EVERYONE_READS)
        closed = closed_part_of(Path(sys.executable))
        if closed:
            print(f"learners cannot run {sys.executable}: {closed} is closed to others", file=sys.stderr)
        return carry_out(plan_class(options.folder, options.accounts), options.write)
    if options.way == "join":
        folder = options.folder or folder_of_class()
        print(f"Your clone is {join(folder.resolve())}. Work there.")
        return 0
    if options.way == "clone":
        return clone_to(options.folder.resolve())
    if options.way == "reset":
        accounts = options.accounts or [account_of(os.geteuid())]
        folder = options.folder or folder_of_class()
        return carry_out(plan_reset(folder, accounts, options.numbers), options.write)
    if options.way == "check":
        return check_class(options)
    if options.way == "quiz":
        return hold_quiz(options)
    return time_commands(options)


if __name__ == "__main__":
    run_main(main)
