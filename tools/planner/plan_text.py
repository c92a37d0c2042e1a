"""Plans as text."""

import math
from collections.abc import Sequence
from typing import Any

from tools.planner.layouts import command
from tools.planner.plan import CATEGORIES, VERDICTS, Plan
from tools.planner.search import Request, sample_bytes
from tools.planner.trace import STATES
from tools.tables import GIB, MIB, format_table, format_tables
from training.models.info import precision

REASONS = 12  # for which layouts were refused, of which a search tells the most frequent


def plan_text(plans: Sequence[Plan], request: Request) -> str:
    """Everything about one layout."""
    # All texts of plan.py take a sequence of plans, and this one shows a single plan.
    (plan,) = plans
    parts = [
        head(plan),
        memory_text(plan),
        messages_text(plan),
        time_text(plan),
    ]
    # The command trains, so a forward pass has none.
    if not plan.inference:
        parts.append(run_text(plan, request))
    return "\n\n".join(parts)


def head(plan: Plan) -> str:
    """The first line: config, GPUs, layout, batch, precision."""
    config = plan.config
    gpus = f"{plan.layout.world_size} x {plan.gpu.name}"
    nodes = f"{plan.nodes} nodes" if plan.nodes > 1 else f"{plan.nodes} node"
    share = config.global_batch_size // plan.layout.dp  # samples
    what = "a forward pass without gradients; " if plan.inference else ""
    return (
        f"{what}{config.config} on {gpus} ({nodes}): {layout_words(plan)}; "
        f"global batch {config.global_batch_size}, of which a data-parallel rank takes "
        f"{share}; {precision(config)}"
    )


def layout_words(plan: Plan) -> str:
    """The layout in words: tp 4 x dp 4, fsdp, recomputing full."""
    config = plan.config
    layout = plan.layout
    # The words of each option, and whether it has an effect in this layout.
    words = [
        (layout.describe("tp", "cp", "domain", "ens", "pp", "dp") or "one device", True),
        (config.data_parallel, layout.world_size > 1 and config.data_parallel != "ddp"),
        ("sequence parallel", config.sequence_parallel and layout.tp > 1),
        (config.cp_method, layout.cp > 1),
        (config.domain_method, math.prod(layout.domain) > 1),
        (f"{config.pp_schedule} of {config.gradient_accumulation}", layout.pp > 1),
        (f"recomputing {config.activation_checkpointing}", config.activation_checkpointing != "none"),
    ]
    return ", ".join(word for word, said in words if said)


def rate(plan: Plan) -> str:
    """Samples/s with three digits or more."""
    speed = plan.samples_per_sec
    return f"{speed:.1f}" if speed >= 10 else f"{speed:.3f}"


def figures(plan: Plan) -> dict[str, Any]:
    """The figures of a plan in a table of several."""
    # The columns in tools/tables.yaml take values by these names.
    return plan.to_json() | {
        "layout": layout_words(plan),
        "gpus": plan.layout.world_size,
        "batch": plan.config.global_batch_size,
        "gib": plan.needed / GIB,
        "rate": rate(plan),
        "ms": plan.time.seconds * 1e3,
    }


def memory_text(plan: Plan) -> str:
    """Memory by category as a table, and whether it fits."""
    is_offloaded = plan.config.cpu_offload and not plan.inference
    sizes: dict[str, float] = {}
    for name in CATEGORIES:
        # A forward pass holds neither.
        if plan.inference and name in ("gradients", "optimizer"):
            continue
        title = name
        # Host memory holds these, and the table says how much of it each rank takes.
        if is_offloaded and name in STATES:
            title = f"{name}, in host memory"
        sizes[title] = plan.memory[name]

    # The categories peak at different moments, so they do not add up to what is needed.
    moment = "in a forward pass" if plan.inference else "in training"
    sizes |= {
        f"at most at once, {moment}": plan.peak,
        "outside of the allocator, and its loss": plan.overhead,
        "needed": plan.needed,
        f"{plan.gpu.name} has": plan.gpu.memory,
    }
    columns = {"memory of the rank that holds most": "", "GiB": ".2f"}
    rows = [(name, size / GIB) for name, size in sizes.items()]
    table = format_table(columns, rows)
    return f"{table}\n\nThis {VERDICTS[plan.fits]}."


def messages_text(plan: Plan) -> str:
    """The messages of a step as a table."""
    if not plan.time.collectives:
        return "No messages." if plan.layout.world_size > 1 else "No messages: one device."
    rows = []
    for collective in plan.time.collectives:
        columns = {
            "members": len(collective["ranks"]),
            "where": "inside a node" if collective["inside"] else "across nodes",
            "mib": collective["bytes"] / MIB,
            "ms": collective["seconds"] * 1e3,
        }
        rows.append(collective | columns)
    return format_tables("inference_messages" if plan.inference else "plan_messages", rows)


def time_text(plan: Plan) -> str:
    """The time of a step by part as a table, its error and what bounds it."""
    time = plan.time
    config = plan.config
    rows = []
    for name, seconds in time.parts.items():
        # A part that takes no time would only lengthen the table.
        if seconds:
            rows.append((name, seconds * 1e3, seconds / time.seconds))
    what = "a forward pass" if plan.inference else "a step"
    columns = {f"time of {what}": "", "ms": ".2f", "share": ".0%"}
    table = format_table(columns, rows)

    # How good the times are depends on what the speeds of the GPU come from.
    rest = "data sheets: --calibrate on such GPUs to narrow it"
    measured = plan.gpu.measured
    if measured:
        rest = f"measurements of {measured.processor}, {measured.cores} cores"
    if plan.inference:
        return (
            f"{table}\n\nA forward pass takes {time.seconds * 1e3:.1f} ms, give or take {time.error:.0%} (it rests on "
            f"{rest}), and is bound by {time.bound}: {rate(plan)} samples/s, {plan.flops / 1e12:.2f} TFLOP."
        )
    return (
        f"{table}\n\n"
        f"A step takes {time.seconds * 1e3:.1f} ms, give or take {time.error:.0%} (it rests on {rest}), and is "
        f"bound by {time.bound}. Reading the data is not in it.\n"
        f"{rate(plan)} samples/s; {config.num_iters} iterations take {plan.node_hours:.2f} node-hours. "
        f"{plan.flops / 1e12:.2f} TFLOP a step."
    )


def run_text(plan: Plan, request: Request, words: str = "Run it:") -> str:
    """The command that runs a plan, after some words."""
    line = command(plan.config, plan.layout, request.words, plan.gpu.gpus_per_node)
    return f"{words}\n    {line}"


def search_text(plans: Sequence[Plan], request: Request) -> str:
    """The best layouts, why others were refused, and how to run the first; where none fits, those that need least."""
    if not plans:
        return f"No script runs this on so many GPUs.\n\n{refused_text(request.refused)}"
    rows = []
    for number, plan in enumerate(plans, 1):
        rows.append(figures(plan) | {"number": number})
    best = plans[0]  # a search gives the best plan first
    found = f"the best of {request.compared} layouts"
    run = run_text(best, request, "Run the first one:")
    if best.fits == "no":
        found = f"none of {request.compared} layouts fits; those that need least"
        # A layout that does not fit has no command.
        run = "Nothing to run: more GPUs, or ones with more memory."
    return (
        # The layout follows the colon in a head, and here there are several.
        f"{head(best).partition(':')[0]}, {found}:\n\n"
        f"{format_tables('plan_layouts', rows)}\n\n"
        f"Times are good to {best.time.error:.0%}; of two layouts that are closer the planner knows no better one.\n\n"
        f"{refused_text(request.refused)}\n\n{run}"
    )


def refused_text(refused: dict[str, int]) -> str:
    """The most frequent reasons as lines. refused: {reason: number of layouts}."""
    # A search refuses layouts for dozens of reasons, and the frequent ones tell what limits it.
    most_first = sorted(refused.items(), key=lambda item: -item[1])
    lines = [f"    {count:5}  {reason}" for reason, count in most_first[:REASONS]]
    return "Not among them, how many and why:\n" + "\n".join(lines)


def scaling_text(plans: Sequence[Plan], request: Request) -> str:
    """The curve as a table, and what it assumes. plans: from tools.planner.search.scaling."""
    gpu = request.gpu
    # A sample has the same size in every layout.
    megabytes = sample_bytes(request.any_layout()) / 1e6
    table = format_tables("plan_curve", map(figures, plans))
    return (
        f"{gpu.name}; strong: the same batch on more GPUs; weak: the batch grows with them; efficiency: "
        f"samples/s of a GPU to those of the first line.\n\n{table}\n\n"
        f"Assumed: step times of ranks vary by {gpu.jitter:.1%} (jitter), each step waits for the slowest; a "
        f"sample of {megabytes:.2f} MB is read at {gpu.node_read / 1e9:g} GB/s a node "
        f"(node_read), {gpu.total_read / 1e9:g} GB/s of all (total_read), while the step before computes."
    )
