"""`python plan.py check --all`: draw compositions of options, run them, and show the smallest that are wrong."""

import argparse
import itertools
import random
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.compositions.choices import (
    DP,
    EXAMPLES,
    Choice,
    all_choices,
    keys_without_values,
)
from tools.compositions.composition import Base, Composition, TooManyRanks, ranks_of
from tools.compositions.drawing import Draws
from tools.compositions.judge import EQUAL, FINDING, HANG_SECONDS, NUMBERS, REFUSED, Judge, JudgeEnded, Verdict
from tools.planner.layouts import SPLITS
from utils.command_line import parse_command_line
from utils.errors import ArgumentParser, UsageError, float_in_range, int_in_range, status_of
from utils.files import write_json

MOST_SHRINKING = 40  # runs to make a finding smaller
JOBS = 2  # at one time; more would only take turns on few cores


@dataclass
class Finding:
    """A composition that came out wrong, made as small as it stays wrong. seen: how often it was met."""

    composition: Composition
    verdict: Verdict
    command: str
    seen: int = 1

    def lines(self) -> list[str]:
        """The finding in words."""
        times = f" (met {self.seen} times)" if self.seen > 1 else ""
        return [
            f"{self.verdict.kind}: {self.composition.name}{times}",
            f"    {self.verdict.text}",
            f"    {self.command}",
        ]


@dataclass
class Report:
    """The result of a search."""

    seed: int
    results: Counter[str] = field(default_factory=Counter)  # by Verdict.result
    refusals: Counter[str] = field(default_factory=Counter)  # by the line of the refusal
    findings: list[Finding] = field(default_factory=list)
    pairs: int = 0  # all pairs of choices with different keys
    pairs_left: int = 0  # not reached within the time
    pairs_refused: int = 0  # whatever stood beside them
    without_values: list[str] = field(default_factory=list)  # keys whose type names no values to try

    def to_json(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        findings = []
        for finding in self.findings:
            findings.append(
                {
                    "kind": finding.verdict.kind,
                    "text": finding.verdict.text,
                    "composition": finding.composition.name,
                    "command": finding.command,
                    "seen": finding.seen,
                }
            )
        return {
            "seed": self.seed,
            **{name: self.results[name] for name in (EQUAL, REFUSED, FINDING)},
            "pairs": {
                "all": self.pairs,
                "left": self.pairs_left,
                "refused": self.pairs_refused,
            },
            "refusals": dict(self.refusals.most_common()),
            "findings": findings,
            "keys_without_values": self.without_values,
        }

    def text(self) -> str:
        """The report for people."""
        total = self.results.total()
        covered = self.pairs - self.pairs_left - self.pairs_refused
        lines = [
            f"seed {self.seed}: {total} compositions: {self.results[EQUAL]} equal, {self.results[REFUSED]} refused, "
            f"{self.results[FINDING]} with findings",
            f"{self.pairs} pairs of choices: {covered} run, {self.pairs_refused} refused, {self.pairs_left} left",
        ]
        for finding in self.findings:
            lines += ["", *finding.lines()]
        return "\n".join(lines)


class Search:
    """A search by several judges at one time, each in a thread of its own: ranks of one wait while others compute.

    base: the options that all compositions share. draws: where compositions come from. report: takes what comes out.
    """

    def __init__(self, base: Base, draws: Draws, report: Report):
        self.base = base
        self.draws = draws
        self.report = report
        self.compositions = iter(draws)
        self.lock = threading.Lock()  # of draws and report
        self.is_ended = False  # before its time
        self.at_work: list[threading.Lock] = []  # one for each judge, held while it judges

    def run(self, judges: Sequence[Judge], end: float) -> None:
        """Run drawn compositions until the time `end`.

        Raises KeyboardInterrupt, as soon as the ranks are ended, and what a judge raises.
        """
        self.at_work = [threading.Lock() for _ in judges]
        threads = ThreadPoolExecutor(len(judges))
        working = []
        for judge, at_work in zip(judges, self.at_work, strict=True):
            working.append(threads.submit(self._work, judge, at_work, end))
        try:
            # The first error, of whichever judge, ends the search.
            for done in as_completed(working):
                done.result()
        except BaseException as error:
            self.is_ended = True
            for judge in judges:
                judge.end()
            # A thread may be starting ranks, which takes longer than whoever interrupts waits.
            threads.shutdown(wait=not isinstance(error, KeyboardInterrupt))
            raise
        finally:
            self._count_pairs()
        threads.shutdown()

    def _work(self, judge: Judge, at_work: threading.Lock, end: float) -> None:
        """Judge one composition after the other, until the judge is ended."""
        # A composition that has begun is finished, so that a search may last a little longer.
        while time.monotonic() <= end:
            with self.lock:
                composition = next(self.compositions)
            try:
                with at_work:
                    verdict = judge.judge(composition)
                if verdict.is_silence:
                    verdict = self._judge_alone(judge, composition)
                # That processes were ended is no finding.
                if self.is_ended:
                    return
                self._count(verdict)
                if verdict.result == FINDING:
                    self.note(composition, verdict, judge)
            except JudgeEnded:
                return

    def _judge_alone(self, judge: Judge, composition: Composition) -> Verdict:
        """Judge a composition once more, while no other judge of this search takes cores from it."""
        # On a busy machine ranks may only have been slow. Those that really hang do so again.
        with ExitStack() as waited:
            # All threads take the locks in this one order, so that no two wait for each other.
            for at_work in self.at_work:
                waited.enter_context(at_work)
            return judge.judge(composition)

    def _count(self, verdict: Verdict) -> None:
        with self.lock:
            self.report.results[verdict.result] += 1
            if verdict.result == REFUSED:
                self.report.refusals[verdict.text] += 1

    def note(self, composition: Composition, verdict: Verdict, judge: Judge) -> None:
        """Count a finding that is known, or make a new one small and print it."""
        # Shrinking costs many runs, and would only lead to what is known.
        with self.lock:
            for known in self.report.findings:
                if known.verdict.kind == verdict.kind and composition.holds(known.composition):
                    known.seen += 1
                    return
        smallest, why = shrink(composition, verdict, judge)
        with self.lock:
            # Made small, it may turn out to be a known one.
            for known in self.report.findings:
                if known.verdict.kind == why.kind and known.composition == smallest:
                    known.seen += 1
                    return
            finding = Finding(smallest, why, self.base.command(smallest))
            self.report.findings.append(finding)
            print("\n".join(finding.lines()), flush=True)

    def _count_pairs(self) -> None:
        """Put into the report what was drawn, and what was refused while drawing, which was never run."""
        draws = self.draws
        self.report.refusals += draws.refusals
        self.report.pairs = len(draws.pairs)
        self.report.pairs_left = len(draws.uncovered)
        self.report.pairs_refused = len(draws.illegal)


def shrink(composition: Composition, verdict: Verdict, judge: Judge) -> tuple[Composition, Verdict]:
    """Leave out one choice after the other, as long as the same kind of finding stays."""
    runs = itertools.count()
    is_smaller = True
    # Each choice that is left out begins anew: what was needed beside it may not be needed any more.
    while is_smaller and next(runs) < MOST_SHRINKING:
        is_smaller = False
        for candidate in composition.smaller():
            if next(runs) >= MOST_SHRINKING:
                break
            try:
                found = judge.judge(candidate)
            except TooManyRanks:
                continue
            if found.result == FINDING and is_same_kind(found.kind, verdict.kind):
                composition = candidate
                verdict = found
                is_smaller = True
                break
    return composition, verdict


def is_same_kind(found: str, before: str) -> bool:
    """Tell whether two findings are of one kind: numbers that differ, or the same other one."""
    # A smaller composition may show the same mistake in another number, or without a stop and resume.
    one = found.removeprefix("resumed: ")
    other = before.removeprefix("resumed: ")
    are_numbers = one in NUMBERS and other in NUMBERS
    return one == other or are_numbers


def named_composition(ranks: int, words: Sequence[str], then: str | None) -> Composition:
    """The composition that a command names."""
    choices = choices_of(ranks, words)
    others = None
    if then is not None:
        # The words of --then are a command line of their own.
        parser = ArgumentParser(prog="--then", allow_abbrev=False)
        parser.add_argument("--ranks", type=int_in_range(1, 64), default=1)
        known, rest = parser.parse_known_args(shlex.split(then))
        others = tuple(choices_of(known.ranks, rest))
    return Composition(tuple(choices), others)


def choices_of(ranks: int, words: Sequence[str]) -> list[Choice]:
    """The choices that the words of a command line make, with so many ranks."""
    options = parse_command_line(words, None, "config/ViT.yaml")
    found = []
    for key, value in options.items():
        # File and name of a config say where keys come from, and choose nothing.
        if key not in ("yaml_config", "config"):
            found.append(Choice(f"{key}={value}", {key: value}))
    return [*found, *choices_of_ranks(ranks, options)]


def choices_of_ranks(ranks: int, options: dict[str, Any]) -> Iterator[Choice]:
    """The choice of DP that leaves so many ranks to the other dimensions of the mesh."""
    others = ranks_of({key: options[key] for key in SPLITS if key in options})
    if ranks % others:
        raise UsageError(f"--ranks {ranks}: not a multiple of the {others} that the other dimensions have")
    dp = ranks // others
    if dp > 1:
        yield Choice(f"{DP}={dp}", {DP: dp})


def main(argv: Sequence[str]) -> int:
    """Command line of `plan.py check --all`; returns the exit status: 0 where nothing was found, else 1."""
    parser = ArgumentParser(
        prog="plan.py check --all",
        description=__doc__.partition("\n")[0],
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--all", action="store_true", help="compositions of options, in place of --layouts")
    option("--minutes", type=float_in_range(0, 10**4), default=20, help="how long to draw compositions (%(default)s)")
    option("--seed", type=int_in_range(0, 2**32), help="of what is drawn; a number that is told, unless given")
    option("--jobs", type=int_in_range(1, 64), default=JOBS, help="compositions that run at one time (%(default)s)")
    option("--patience", type=float_in_range(1, 10**4), default=HANG_SECONDS, help="seconds of a hang (%(default)s)")
    option("--ranks", type=int_in_range(1, 64), help="run the one composition that the options name, on so many ranks")
    option("--then", metavar="WORDS", help="with --ranks: the layout that goes on from a checkpoint")
    option("--json", type=Path, metavar="FILE", help="write the report")
    options, words = parser.parse_known_args(argv)
    # The report tells the seed, so that a search can be repeated.
    seed = options.seed
    if seed is None:
        seed = random.SystemRandom().randrange(2**32)
    report = Report(seed)
    interruption: KeyboardInterrupt | None = None
    if options.ranks is None:
        if options.then is not None:
            raise UsageError("--then belongs to --ranks, the composition that it goes on from")
        base = Base(words)
        # Keys that the words set keep their value, so they are not drawn.
        given = parse_command_line(words, None, "config/ViT.yaml").keys()
        report.without_values = [key for key in keys_without_values(base.config) if key not in EXAMPLES]
        draws = Draws(base, all_choices(base.config, given), seed)
        with ExitStack() as opened:
            judges = [opened.enter_context(Judge(base, options.patience)) for _ in range(options.jobs)]
            end = time.monotonic() + 60 * options.minutes
            try:
                Search(base, draws, report).run(judges, end)
            except KeyboardInterrupt as error:
                interruption = error  # what was found by then is told all the same
    else:
        run_one(report, options, words)  # told as it is, without shrinking
    print(report.text())
    if options.json:
        write_json(options.json, report.to_json())
    if interruption is not None:
        return status_of(interruption)
    return 1 if report.findings else 0


def run_one(report: Report, options: argparse.Namespace, words: Sequence[str]) -> None:
    """Run the composition that a command names, and put what comes out into a report."""
    # The words are choices of the composition, so nothing is left for the base.
    base = Base([])
    composition = named_composition(options.ranks, words, options.then)
    with Judge(base, options.patience) as judge:
        verdict = judge.judge(composition)
    report.results[verdict.result] += 1
    if verdict.result == REFUSED:
        # Whoever names one composition wants to know why it is refused.
        raise UsageError(verdict.text)
    if verdict.result == FINDING:
        report.findings.append(Finding(composition, verdict, base.command(composition)))
