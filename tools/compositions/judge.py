"""Run compositions on ranks of this machine, and hold them against one device and against their plans."""

import math
import multiprocessing
import re
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools.compositions.composition import Base, Composition, TooManyRanks, has_own_numbers, is_coarse
from tools.compositions.trial import HALF, STEPS, Outcome, Trial, try_out
from tools.instruments.ranks import Case, NoAnswer, OutOfMemory, Pool, Process, RankError, RanksFailed, Teams
from tools.planner.trace import is_exact, trace_step
from tools.planner.validate import counts, unplanned
from utils.errors import UsageError, first_line

# Imported once, by the process of which all ranks are copies.
PRELOADED = [
    "tools.compositions.judge",
    "tools.layout_check.check",
    "torch.distributed.pipelining",
    "torch._dynamo",
]
MESHES = 10  # of a team; each leaves threads of its groups behind, so a new team follows
HANG_SECONDS = 120  # without an answer
HANG = "hang"  # the kind of a finding: ranks, or the process that plans, did not answer
EQUAL, REFUSED, FINDING = "equal", "refused", "finding"
FINE = {"losses": 1e-8, "norms": 1e-7, "validation": 1e-8}  # relative, in float64
NUMBERS = (*FINE, "replicas")  # kinds of findings that one mistake may lead to
ROUGH = {"losses": 2e-2, "norms": 2e-1, "validation": 3e-2}  # where some options round to half precision
Counts = list[Counter[Any]]


@dataclass(frozen=True)
class Verdict:
    """What came out of a composition. result: equal, refused or finding. kind: of a finding: losses, traceback, ...

    text: what differs, the line of a refusal, or the error and its place.
    """

    result: str
    kind: str = ""
    text: str = ""

    @property
    def is_silence(self) -> bool:
        """Tell whether somebody did not answer, which a busy machine may be the reason of."""
        return self.kind.endswith(HANG)


class JudgeEnded(Exception):
    """A judge was ended while it judged."""


class Judge(AbstractContextManager):
    """It keeps the ranks, the references, and the process that plans.

    base: the options that all compositions share. patience: seconds for an answer of the ranks. teams: that run the
    trials; by default those that are made here. plans: whether ranks are held against their plan.
    """

    def __init__(
        self,
        base: Base,
        patience: float = HANG_SECONDS,
        teams: Any = None,
        plans: bool = True,
    ):
        self.base = base
        self.plans = plans
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # Ranks wait for one another no longer than the judge waits for them.
        config = base.config.model_copy(update={"comm_timeout": max(1, int(patience))})
        self.opened = ExitStack()
        if teams is None:
            made = Teams(config, patience=patience, context=context, tells=False, many_meshes=True)
            teams = self.opened.enter_context(made)
        self.teams = teams
        self.planner = self.opened.enter_context(Pool(context, name="planner"))
        self.patience = patience
        self.folder = Path(self.opened.enter_context(tempfile.TemporaryDirectory()))
        self.references: dict[str, Outcome | Verdict] = {}
        self.meshes: dict[int, set[Any]] = {}  # of the teams, by their size
        self.is_ended = False

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)

    def end(self) -> None:
        """End the processes. In a thread that judges, JudgeEnded is raised."""
        self.is_ended = True
        self.opened.close()

    def judge(self, composition: Composition) -> Verdict:
        """Run a composition, and tell what came out. Raises TooManyRanks for one that is not tried."""
        choices = composition.choices
        try:
            case = self.base.case(choices)
            reference = self.base.reference(choices)
            then = None
            if composition.then is not None:
                then = self.base.case(self.base.resumed(composition))
        except TooManyRanks:
            raise
        except UsageError as refusal:
            return Verdict(REFUSED, text=first_line(refusal))
        # Half precision would drown every other difference, so all else is compared in float64.
        wide = not is_coarse([*choices, *(composition.then or ())])
        wanted = self.reference(reference, wide)
        if isinstance(wanted, Verdict):
            return wanted
        if wanted.refused:
            return Verdict(REFUSED, text=wanted.refused)
        is_own = has_own_numbers(choices)
        tolerances = FINE if wide else ROUGH

        # The plan is traced by another process while the ranks train.
        is_stopped = then is not None
        stop = HALF if is_stopped else STEPS
        counting = None
        if self.plans and is_exact(case.config):
            counting = Planning(self, case, wide)
        first = Trial(case, 0, stop, wide, self.folder, saves=is_stopped, counts=counting is not None)
        outcomes = self.run(first)
        if counting:
            counting.thread.join()  # whatever came out: the next one has the same process
        if isinstance(outcomes, Verdict):
            return outcomes
        problem = faults(outcomes, wanted, 0, stop, tolerances, is_own)
        if problem is None and counting:
            problem = counting.differences(outcomes)
        if problem:
            return problem
        if then is None or outcomes[0].refused:
            return self.fair(outcomes)

        # Another layout goes on from the checkpoint, and has to give the numbers of one device as well.
        outcomes = self.run(Trial(then, HALF, STEPS, wide, self.folder, loads=True))
        if isinstance(outcomes, Verdict):
            return outcomes
        problem = faults(outcomes, wanted, HALF, STEPS, tolerances, is_own)
        if problem:
            return Verdict(FINDING, f"resumed: {problem.kind}", problem.text)
        return self.fair(outcomes)

    def fair(self, outcomes: Sequence[Outcome]) -> Verdict:
        """The verdict where nothing differs: refused in one line, or equal."""
        if outcomes[0].refused:
            return Verdict(REFUSED, text=first_line(UsageError(outcomes[0].refused)))
        return Verdict(EQUAL)

    def reference(self, case: Case, wide: bool) -> Outcome | Verdict:
        """The outcome of one device, computed once."""
        key = f"{wide} {case.config!r}"
        if key not in self.references:
            found = self.run(Trial(case, wide=wide))
            if isinstance(found, Verdict):
                of_one_device = Verdict(found.result, f"one device: {found.kind}", found.text)
                if found.is_silence:  # not kept: it may answer the next time
                    return of_one_device
                self.references[key] = of_one_device
            else:
                self.references[key] = found[0]
        return self.references[key]

    def run(self, trial: Trial) -> list[Outcome] | Verdict:
        """The outcomes of all ranks; a finding where one fails by more than a UsageError, or does not answer."""
        size = trial.case.ranks
        seen = self.meshes.setdefault(size, set())
        # Groups of processes are never given up: a team that has made many is replaced.
        if len(seen) == MESHES and trial.case.layout not in seen:
            self.teams.end(size)
            seen.clear()
        seen.add(trial.case.layout)
        if self.is_ended:
            raise JudgeEnded
        try:
            return self.teams.call(size, try_out, trial)
        except UsageError as error:
            if self.is_ended:
                raise JudgeEnded from None
            seen.clear()  # whatever failed, its team has been ended
            return self._finding(error)

    def _finding(self, error: UsageError) -> Verdict:
        """The finding of an error on ranks."""
        # NoAnswer and OutOfMemory are RankErrors, so they come first.
        if isinstance(error, NoAnswer):
            return Verdict(FINDING, HANG, f"no answer within {self.patience:.0f} s")
        if isinstance(error, OutOfMemory):
            return Verdict(FINDING, "out of memory", first_line(error))
        if isinstance(error, RankError):
            return Verdict(FINDING, "traceback", described(error))
        # In one line, but in a run that has begun.
        return Verdict(FINDING, "late refusal", described(error))


class Planning:
    """The plan of a case, which a process of its own traces while the ranks train."""

    def __init__(self, judge: Judge, case: Case, wide: bool):
        self.pool = judge.planner
        self.case = case
        self.found: Counts | Exception | None = None
        self.thread = threading.Thread(target=self._trace, args=(wide, judge.patience))
        self.thread.start()

    def _trace(self, wide: bool, patience: float) -> None:
        try:
            # An error is kept, and `differences` tells it as a finding.
            (self.found,) = self.pool.call(1, planned_counts, self.case, wide, timeout=patience)
        except RanksFailed as failed:
            self.found = next(iter(failed.failures.values()))

    def differences(self, outcomes: Sequence[Outcome]) -> Verdict | None:
        """The finding where ranks hold, send or compute what is not planned; None where they do not, or refused."""
        found = self.found
        if outcomes[0].refused:
            return None
        if isinstance(found, NoAnswer):
            return Verdict(FINDING, f"plan: {HANG}", first_line(found))
        if isinstance(found, Exception) or found is None:
            text = described(found) if found else "no plan"
            return Verdict(FINDING, "plan", f"it cannot be planned: {text}")
        # Traced are rank 0 and the last stage of its pipeline.
        pipeline, *_ = self.case.layout.groups("pp")
        ranks = sorted({0, int(pipeline[-1])})
        problems = []
        for rank, plan in zip(ranks, found, strict=True):
            problems += unplanned(outcomes[rank].counted or Counter(), plan)
        return Verdict(FINDING, "plan", "; ".join(problems[:6])) if problems else None


def planned_counts(_: Process, case: Case, wide: bool) -> Counts:
    """In a process that is no rank: the counts of the plan of a case."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if wide else torch.float32)
    try:
        with warnings.catch_warnings(action="ignore"):  # those of torch, many times over
            return [counts(trace) for trace in trace_step(case.config, case.layout, "cpu")]
    finally:
        torch.set_default_dtype(torch.float32)


def faults(
    outcomes: Sequence[Outcome],
    wanted: Outcome,
    start: int,
    stop: int,
    tolerances: dict[str, float],
    is_own: bool,
) -> Verdict | None:
    """The finding where ranks differ from one device, or from one another; None where they do not.

    start, stop: the steps that they made. is_own: they have numbers of their own by design.
    """
    first = outcomes[0]
    # Ranks that go on while another refuses would wait for it.
    refusals = [outcome.refused for outcome in outcomes]
    if any(refusals):
        if all(refusals):
            return None
        return Verdict(FINDING, "refusal", f"some ranks alone refuse: {next(filter(None, refusals))}")
    # A run that diverges on one device may diverge in a layout.
    is_finite = all(map(math.isfinite, [*first.losses, first.validation]))
    should_be_finite = all(map(math.isfinite, [*wanted.losses, wanted.validation]))
    if should_be_finite and not is_finite:
        return Verdict(FINDING, "losses", f"not finite: {first.losses}, validation {first.validation}")
    if is_own:
        return None
    # Numbers first: copies that differ are often what wrong gradients lead to.
    measured = {"losses": first.losses, "norms": first.norms}
    expected = {"losses": wanted.losses[start:stop], "norms": wanted.norms[start:stop]}
    if stop == STEPS:
        measured["validation"] = [first.validation]
        expected["validation"] = [wanted.validation]
    for name, values in measured.items():
        for number, (value, right) in enumerate(zip(values, expected[name], strict=True), start + 1):
            error = abs(value - right) / max(abs(right), 1e-30)
            if error > tolerances[name]:
                step = f" of step {number}" if name != "validation" else ""
                return Verdict(FINDING, name, f"{name}{step} {value:.9g} in place of {right:.9g}, by {error:.1e}")
    if first.apart:
        more = f" and {len(first.apart) - 1} more" if len(first.apart) > 1 else ""
        return Verdict(FINDING, "replicas", f"ranks hold other copies of {first.apart[0]}{more}")
    return None


def described(error: BaseException) -> str:
    """The first line of an error on a rank, and the last place in our code that its traceback names."""
    traceback = "".join(getattr(error, "__notes__", []))
    places = re.findall(r'File "([^"]*)", line (\d+)', traceback)
    # Tools only run the composition; the mistake lies in the code that they call.
    ours = [(file, line) for file, line in places if "site-packages" not in file and "/tools/" not in file]
    text = first_line(error)
    if not ours:
        return text
    file, line = ours[-1]
    return f"{text} ({'/'.join(Path(file).parts[-2:])}, line {line})"
