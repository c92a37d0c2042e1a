"""The planner compared with real runs: small layouts run on this machine, over gloo, and are planned as well.

python plan.py --verify               memory and messages
python -m tools.planner.validate      time as well: the machine is measured in turns with the layouts
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tools.instruments.rank_case import build_case, held, seconds_of
from tools.instruments.team import Case, Rank, Teams
from tools.planner import calibrate
from tools.planner.hardware import Gpu, gpu_of, load_gpu
from tools.planner.plan_text import layout_words
from tools.planner.request import Request
from tools.planner.search import best_layouts
from tools.planner.step_time import step_time
from tools.planner.trace import Trace, measured, trace_step
from tools.tables import MIB, format_table
from utils.config import read_mappings
from utils.errors import ArgumentParser, UsageError, run_main, whole

MEMORY = ("parameters", "gradients", "optimizer", "activations")
TOLERANCE = 0.02  # of the tensors saved for the backward pass
RANKS = 2
SMALL = "--depth=4", "--device=cpu", "--local_batch_size=4"
LAYOUTS = "config/verify.yaml"
SEARCHED = "--yaml_config=config/mp.yaml", "--config=mp_quick", "--depth=4", "--device=cpu", "--global_batch_size=8"
STEPS = 4  # of a turn, and as many that are not timed


def build_cases(times: bool = False) -> list[Case]:
    """The cases of config/verify.yaml, with a small model. times: those for times as well."""
    cases = []
    for group in read_mappings(LAYOUTS, "groups of layouts").values():
        for text in group["layouts"] if times or not group.get("time") else ():
            words = text.replace("=true", "").replace("img_size=", "img_size,").replace(" ", " --").replace(",", " ")
            words = [f"--config={group['config']}", *SMALL, *(f"--{words}".split() if text else ())]
            name = f"{group['config']} {text}{' (1 rank)' * (group['ranks'] == 1)}"
            cases.append(build_case(name, group["script"], words, group["ranks"]))
    return cases


def verify(cases: Sequence[Case] | None = None) -> int:
    """Run every case for real and plan it; print both and return the number of cases in which they differ.

    A case agrees where the messages of a step (number and bytes), the bytes of parameters, gradients and optimizer
    state, and the FLOP are equal, and saved activations are within 2 %.
    """
    cases = cases or build_cases()
    with Teams(cases[0].config) as teams:
        real = [teams.call(case.ranks, real_trace, case) for case in cases]
    rows, wrong = compared(cases, real, [trace_step(case.config, case.layout, "cpu") for case in cases])
    columns = {
        "two ranks": "", "collectives": "d", "MiB sent": ".2f", "MiB saved": ".2f", "planned": ".2f", "plan": ""
    }  # fmt: skip
    print(format_table(columns, rows))
    return wrong


def compared(
    cases: Sequence[Case], real: Sequence[list[dict[str, Any]]], traces: Sequence[list[Trace]]
) -> tuple[list[tuple], int]:
    """(a row for each case, number of cases in which plan and run differ). real: a summary of each rank."""
    rows, wrong = [], 0
    for case, figures, own_traces in zip(cases, real, traces, strict=True):
        planned = [summary(trace) for trace in own_traces]
        problems = [text for own, plan in zip(figures, planned, strict=False) for text in differ(own, plan)]
        wrong += bool(problems)
        own, plan = figures[0], planned[0]
        rows.append(
            (case.name, own["messages"].total(),
             sum(sent * n for (_, _, sent), n in own["messages"].items()) / 2**20,
             own["memory"]["activations"] / 2**20, plan["memory"]["activations"] / 2**20,
             "; ".join(problems) or "equal")
        )  # fmt: skip
    return rows, wrong


def summary(trace: Trace) -> dict[str, Any]:
    """The part of a Trace that must be the same in a real run and in a plan."""
    messages: Counter[tuple[str, str, int]] = Counter()
    for message, calls in trace.messages.items():
        messages[message.phase, message.kind, message.sent] += calls
    flops = sum(operation.flops * calls for operation, calls in trace.operations.items())
    return {"memory": {name: trace.held[name] for name in MEMORY}, "messages": messages, "flops": flops}


def differ(real: dict[str, Any], plan: dict[str, Any]) -> Iterator[str]:
    """What differs, in words."""
    for name in MEMORY:
        a, b = real["memory"][name], plan["memory"][name]
        if abs(a - b) > (TOLERANCE * a if name == "activations" else 0):
            yield f"{name} {a} planned as {b}"
    for key in real["messages"] | plan["messages"]:
        a, b = real["messages"][key], plan["messages"][key]
        if a != b:
            yield f"{a} messages {key} planned as {b}"
    if real["flops"] != plan["flops"]:
        yield f"{real['flops']} FLOP planned as {plan['flops']}"


def real_trace(rank: Rank, case: Case) -> dict[str, Any]:
    """On a rank: the summary of a real step."""
    own = held(rank, case)
    return summary(measured(own.step, own.x, own.y))


def validate(rounds: int, gpu: Gpu | None = None, only: str = "") -> None:
    """Run layouts, plan them and print both. only: a part of the names.

    gpu: measured before, else here: in each round the machine is measured, and each layout makes a few steps. The least
    seconds count, of a layout its fastest step: other work on the machine only adds.
    Raises UsageError where gpu was measured on another machine or with another number of ranks, or no name fits.
    """
    if gpu and (other := gpu.measured.elsewhere() if gpu.measured else "it is a data sheet"):
        raise UsageError(f"--gpu {gpu.name} cannot be validated on this machine: {other}: plan.py --calibrate")
    if gpu and gpu.measured and (gpu.measured.ranks, gpu.measured.threads) != (RANKS, 1):
        raise UsageError(
            f"--gpu {gpu.name}: measured with {gpu.measured.ranks} rank(s) of {gpu.measured.threads} thread(s), and "
            f"layouts run on {RANKS} of one: OMP_NUM_THREADS=1 torchrun --nproc_per_node {RANKS} plan.py --calibrate"
        )
    cases = [case for case in build_cases(times=True) if only in case.name]
    if not cases:
        raise UsageError(f"--only {only}: no layout has this in its name")
    seconds: dict[str, list[float]] = {}
    with Teams(cases[0].config) as teams:

        def turns(cases: Sequence[Case]) -> None:
            for case in [case for case in cases for _ in range(STEPS)]:
                seconds.setdefault(case.name, []).append(max(teams.call(case.ranks, seconds_of, case, 1)))

        figures: calibrate.Figures = {}
        for _ in range(rounds):
            if gpu is None:
                own, traces = teams.call(RANKS, calibrate.measure, [range(RANKS)])[0]
                figures = calibrate.least(figures, own)
            turns(cases)
        real = [teams.call(case.ranks, real_trace, case) for case in cases]
        if gpu is None:
            cpu = torch.device("cpu")
            entry = calibrate.entry(figures, traces, cpu, RANKS) | calibrate.memory_sizes(cpu, RANKS)
            gpu = gpu_of("here", entry)
        plans = best_layouts(Request(SEARCHED, gpu), RANKS, 20) if not only else []
        ranked = [Case(f"searched: {layout_words(plan)}", plan.config, plan.layout) for plan in plans]
        for _ in range(2 * rounds):
            turns(ranked)
    table(cases, real, seconds, gpu)
    if ranked:
        search_table(ranked, [plan.time.seconds for plan in plans], seconds)


def table(cases: Sequence[Case], real: Sequence[Any], seconds: dict[str, list[float]], gpu: Gpu) -> None:
    """Print planned beside measured: memory, messages, time; and the median and worst errors."""
    rows, errors, worst_memory = [], {}, 0.0
    of_cases = [trace_step(case.config, case.layout, gpu.device) for case in cases]
    differences, wrong = compared(cases, real, of_cases)
    for case, (own, *_), (*_, counts), traces in zip(cases, real, differences, of_cases, strict=True):
        planned, actual = step_time(traces, case.config, case.layout, gpu).seconds, min(seconds[case.name])
        errors[case.name] = planned / actual - 1
        memory = [f"{traces[0].held[name] / MIB:.2f} / {own['memory'][name] / MIB:.2f}" for name in MEMORY]
        off = [abs(traces[0].held[name] / own["memory"][name] - 1) for name in MEMORY]
        worst_memory = max(worst_memory, *off)
        noise = statistics.median(seconds[case.name]) / actual
        rows.append((case.name, planned * 1e3, actual * 1e3, errors[case.name], noise, *memory, counts))
    columns = {"layout": "", "planned ms": ".1f", "measured": ".1f", "error": "+.0%", "median step": ".2f"}
    print(format_table(columns | dict.fromkeys(MEMORY, "") | {"counts": ""}, rows))
    size, name = max((abs(error), name) for name, error in errors.items())
    print(
        f"\n{len(cases)} layouts, {wrong} differ in counts (messages, bytes, FLOP); memory, MiB planned / measured, "
        f"is off by {worst_memory:.1%} at most.\n"
        f"Time: median error {statistics.median(map(abs, errors.values())):.1%}, worst {size:.1%} ({name}). "
        f"Measured is the fastest step; the median one took "
        f"{statistics.median(row[4] for row in rows):.2f} times as long."
    )


def search_table(ranked: Sequence[Case], planned: Sequence[float], seconds: dict[str, list[float]]) -> None:
    """Print the layouts of a search in their order, and how the first one compares with the best."""
    actual = [min(seconds[case.name]) for case in ranked]
    rows = [(c.name.partition(": ")[2], p * 1e3, a * 1e3) for c, p, a in zip(ranked, planned, actual, strict=True)]
    print("\n" + format_table({"mp_quick, as the search ranks it": "", "planned ms": ".1f", "measured": ".1f"}, rows))
    best = min(range(len(actual)), key=actual.__getitem__)
    print(f"\nThe first takes {actual[0] / actual[best]:.2f} times as long as the best measured, number {best + 1}.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; returns the exit status."""
    parser = ArgumentParser(prog="tools.planner.validate", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=whole(1, 100), default=2, metavar="N", help="of turns (%(default)s)")
    parser.add_argument("--gpu", metavar="NAME", help="an entry of plan.py --calibrate (measured anew)")
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts with this in their names")
    options = parser.parse_args(argv)
    validate(options.rounds, load_gpu(options.gpu) if options.gpu else None, options.only)
    return 0


if __name__ == "__main__":
    run_main(main)
