"""The planner compared with real runs: small layouts run on this machine, over gloo, and are planned as well.

python plan.py --verify               memory and messages
python -m tools.planner.validate      and time: the machine is measured in turns with the layouts
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from tools.instruments.rank_case import build_case, seconds_of, take_case
from tools.instruments.ranks import Case, Process, Teams
from tools.planner import calibrate
from tools.planner.compare import beside
from tools.planner.hardware import gpu_of
from tools.planner.plan import plan_layout
from tools.planner.plan_text import layout_words
from tools.planner.search import Request, best_layouts
from tools.planner.trace import HELD, Trace, observe_step, trace_step
from tools.tables import MIB, format_tables
from utils.errors import run_main
from utils.yaml_files import read_mappings

RANKS = 2
SMALL = ("--depth=4", "--device=cpu", "--local_batch_size=4")
LAYOUTS = "tools/planner/verify.yaml"
# The search ranks layouts of this config, and they are timed as well.
SEARCHED = (
    "--yaml_config=config/mp.yaml",
    "--config=mp_quick",
    "--depth=4",
    "--device=cpu",
    "--global_batch_size=8",
)
STEPS = 3  # of a turn, and as many that are not timed
ROUNDS = 4  # turns


def build_cases(times: bool = False) -> list[Case]:
    """The cases of tools/planner/verify.yaml, with a small model. times: those for times as well."""
    cases = []
    for group in read_mappings(LAYOUTS, "groups of layouts").values():
        # Some layouts are of interest for their time alone.
        if group.get("time") and not times:
            continue
        config = group["config"]
        ranks = group["ranks"]
        for text in group["layouts"]:
            words = [f"--config={config}", *SMALL, *text.split()]
            name = f"{config} {text.replace('--', '')}"
            if ranks == 1:
                name += " (1 rank)"
            cases.append(build_case(name, group["script"], words, ranks))
    return cases


def verify(cases: Sequence[Case]) -> int:
    """Run every case for real and plan it; print both and return the number of cases in which they differ.

    A case agrees where the messages of a step (number and bytes), the bytes of parameters, gradients, optimizer state
    and saved activations, and the FLOP are equal.
    """
    with Teams(cases[0].config) as teams:
        real = [teams.call(case.ranks, real_trace, case) for case in cases]
    rows: list[dict[str, Any]] = []
    for case, found in zip(cases, real, strict=True):
        traces = trace_step(case.config, case.layout, "cpu")
        # Rank 0 and the first trace stand for all in the table; the counts are compared for every rank.
        messages = found[0].messages
        sent = sum(message.sent * calls for message, calls in messages.items()) / MIB
        planned = traces[0].held["activations"] / MIB
        kept = found[0].held["activations"] / MIB
        row = {
            "name": case.name,
            "planned": planned,
            "measured": kept,
            "ratio": kept / planned,
            "sent": f"{sent:.2f} MiB in {messages.total()}",
            "counts": differ(found, traces),
        }
        rows.append(row)
    print(format_tables("verify", rows))
    return sum(row["counts"] != "equal" for row in rows)


def differ(found: Sequence[Trace], traces: Sequence[Trace]) -> str:
    """Name the differences between a run and its plan, or 'equal'. found: traces of each rank."""
    problems = []
    # A plan has the traces of some ranks, a run those of all.
    for real_trace_of_rank, trace in zip(found, traces, strict=False):
        problems += unplanned(counts(real_trace_of_rank), counts(trace))
    return "; ".join(problems) or "equal"


def unplanned(counted: Counter[Any], plan: Counter[Any]) -> list[str]:
    """What a rank has counted otherwise than planned, in words."""
    problems = []
    # The union shows also what only one of the two has.
    for key in counted | plan:
        if counted[key] != plan[key]:
            problems.append(f"{counted[key]} {words_of_count(key)} planned as {plan[key]}")
    return problems


def words_of_count(key: Any) -> str:
    """What is counted: bytes of a kind, FLOP, or messages."""
    if isinstance(key, str):
        return key
    return f"x {key.kind} of {key.sent} bytes ({key.phase}, {key.group})"


def counts(trace: Trace) -> Counter[Any]:
    """The part of a Trace that must be the same in a real run and in a plan: messages, bytes HELD, FLOP."""
    numbers = Counter[Any]({name: int(trace.held[name]) for name in HELD})
    flops: Any = sum(operation.flops * calls for operation, calls in trace.operations.items())
    numbers["FLOP"] = flops
    return trace.messages + numbers  # a sum of Counters leaves out what is zero


def real_trace(rank: Process, case: Case) -> Trace:
    """On a rank: the Trace of a real step."""
    own = take_case(rank, case)
    return observe_step(own.step, own.x, own.y)


def validate(rounds: int = ROUNDS) -> int:
    """Verify layouts, time them, and print planned and measured times; returns 1 where counts differ.

    In each round the machine is measured, and each layout makes a few steps. The median counts, of measurements and of
    steps: what the machine does besides is then in both. A sum of the fastest would be faster than any step.
    """
    cases = build_cases(times=True)
    differing = verify(cases)
    seconds = defaultdict[str, list[float]](list)  # of the slowest rank, by name of the case
    with Teams(cases[0].config) as teams:

        def take_turns(cases):
            for case in cases:
                for _ in range(STEPS):
                    of_ranks = teams.call(case.ranks, seconds_of, case)
                    # A step ends with its slowest rank.
                    seconds[case.name].append(max(of_ranks))

        # The machine and the layouts, in turns.
        figures: list[calibrate.Figures] = []
        for _ in range(rounds):
            own, traces = teams.call(RANKS, calibrate.measure_machine, [range(RANKS)])[0]
            figures.append(own)
            take_turns(cases)

        # The layouts that the search would choose on such a machine.
        cpu = torch.device("cpu")
        entry = calibrate.entry(calibrate.usual(figures), traces, cpu, RANKS)
        gpu = gpu_of("here", entry | calibrate.memory_sizes(cpu, RANKS))
        plans = best_layouts(Request(SEARCHED, gpu), RANKS, 20)
        ranked = [Case(layout_words(plan), plan.config, plan.layout) for plan in plans]
        for _ in range(2 * rounds):
            take_turns(ranked)

    # How far plans are off.
    measured = {name: statistics.median(own) * 1e3 for name, own in seconds.items()}
    planned = {}
    for case in cases:
        planned[case.name] = plan_layout(case.config, case.layout, gpu).time.seconds * 1e3
    print(f"\n{beside('ms a step', planned, measured)}")
    errors = {name: abs(planned[name] / measured[name] - 1) for name in planned}
    worst = max(errors, key=lambda name: errors[name])
    print(
        f"\n{len(cases)} layouts, {differing} differ in counts (messages, bytes sent and held, FLOP).\n"
        f"Time: median error {statistics.median(errors.values()):.1%}, worst {errors[worst]:.1%} ({worst}).\n"
    )

    # What following the search costs.
    planned = {}
    for plan, case in zip(plans, ranked, strict=True):
        planned[case.name] = plan.time.seconds * 1e3
    print(beside("ms a step of mp_quick, as the search ranks it", planned, measured))
    first = next(iter(planned))
    best = min(planned, key=lambda name: measured[name])
    print(f"\nThe first takes {measured[first] / measured[best]:.2f} times as long as the best measured, {best}.")
    return differing > 0


if __name__ == "__main__":
    run_main(validate)
