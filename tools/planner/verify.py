"""The planner compared with real runs: small layouts run on this machine, over gloo, and are planned as well."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tools.instruments.assembly import build_step, random_batch
from tools.instruments.team import Case, Rank, Team
from tools.planner.trace import Trace, measured, trace_step
from tools.tables import format_table
from utils.config import SCRIPTS, load_config

WARMUP_STEPS = 3  # DDP arranges its buckets, fully_shard its order
MEMORY = ("parameters", "gradients", "optimizer", "activations")
TOLERANCE = 0.02  # of the tensors saved for the backward pass
RANKS = 2
CASES = {  # script and config: layouts of two ranks, each a list of options
    ("train.py", "quick"): (
        "data_parallel=ddp bucket_cap_mb=0.5", "data_parallel=zero1", "data_parallel=zero2", "data_parallel=fsdp",
        "activation_checkpointing=full", "activation_checkpointing=selective", "amp_mode=bf16",
        "data_parallel=fsdp amp_mode=fp16", "rollout_steps=2 forcings=hour", "rollout_steps=4 forcings=hour",
        "rollout_steps=4 data_parallel=fsdp activation_checkpointing=full",
    ),
    ("train_mp.py", "mp_quick"): (
        "tensor_parallel=2", "tensor_parallel=2 sequence_parallel=true", "context_parallel=2",
        "tensor_parallel=2 rollout_steps=3", "context_parallel=2 rollout_steps=3",
        "context_parallel=2 cp_method=ring", "context_parallel=2 cp_method=all_to_all",
        "pipeline_parallel=2 gradient_accumulation=2", "pipeline_parallel=2 gradient_accumulation=4 pp_schedule=gpipe",
        "pipeline_parallel=2 gradient_accumulation=2 pp_schedule=interleaved",
        "pipeline_parallel=2 gradient_accumulation=2 rollout_steps=2",
    ),
    ("train_shard.py", "shard_quick"): (
        "domain_parallel=2", "domain_parallel=2 rollout_steps=2", "domain_parallel=2 domain_method=ring",
        "domain_parallel=1x2 data_parallel=fsdp",
        "domain_parallel=2 domain_method=all_to_all",
    ),
    ("train_shard.py", "classify_quick"): ("domain_parallel=2 domain_method=ring",),
}  # fmt: skip


def build_cases() -> list[Case]:
    """The cases of CASES, with a small model."""
    cases = []
    for (script, name), layouts in CASES.items():
        for text in layouts:
            options = [f"--{option}" for option in text.replace("=true", "").split()]
            words = [f"--config={name}", "--depth=4", "--device=cpu", "--local_batch_size=4", *options]
            config = load_config(words, None, RANKS, *SCRIPTS[script][:2])
            cases.append(Case(f"{name} {text}", config, config.layout(RANKS)))
    return cases


def verify(cases: Sequence[Case] | None = None) -> int:
    """Run every case for real and plan it; print both and return the number of cases in which they differ.

    A case agrees where the messages of a step (number and bytes), the bytes of parameters, gradients and optimizer
    state, and the FLOP are equal, and saved activations are within 2 %.
    """
    cases, wrong = cases or build_cases(), 0
    with Team(RANKS, cases[0].config) as team:
        real = [team.call(_real_trace, case) for case in cases]
    rows = []
    for case, figures in zip(cases, real, strict=True):
        traces = trace_step(case.config, case.layout, "cpu")
        planned = [summary(trace) for trace in traces]
        problems = [text for own, plan in zip(figures, planned, strict=False) for text in differ(own, plan)]
        wrong += bool(problems)
        own, plan = figures[0], planned[0]
        rows.append(
            (case.name, own["messages"].total(),
             sum(sent * n for (_, _, sent), n in own["messages"].items()) / 2**20,
             own["memory"]["activations"] / 2**20, plan["memory"]["activations"] / 2**20,
             "; ".join(problems) or "equal")
        )  # fmt: skip
    columns = {
        "two ranks": "", "collectives": "d", "MiB sent": ".2f", "MiB saved": ".2f", "planned": ".2f", "plan": ""
    }  # fmt: skip
    print(format_table(columns, rows))
    return wrong


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


def _real_trace(rank: Rank, case: Case) -> dict[str, Any]:
    """On a rank: the summary of a real step."""
    rank.use_mesh(case.layout)
    x, y = random_batch(case.config, rank.device)
    step = build_step(case.config, rank.device, case.name)
    for i in range(WARMUP_STEPS):
        step(i, x, y)
    return summary(measured(step, x, y))
