"""A layout must fit and be nearly as fast as the best that the planner finds."""

import shlex
from collections.abc import Sequence
from types import ModuleType

from exercises.checks.common import Draw, Wrong, expect
from tools.planner.hardware import Gpu, load_gpu
from tools.planner.search import Request, best_layouts
from utils.errors import UsageError

WORLD_SIZES = (1,)
PATIENCE_SECONDS = 120  # the planner traces some layouts
CONFIG = "--yaml_config=config/mp.yaml", "--config=mp"
OTHERS = "--context_parallel=1", "--pipeline_parallel=1", "--domain_parallel=1"  # are not asked for
QUESTIONS = {
    "few samples": (16, ("--global_batch_size=4",)),
    "very wide": (16, ("--global_batch_size=16", "--embed_dim=6144", "--num_heads=48")),
    "wide": (8, ("--global_batch_size=8", "--embed_dim=4096", "--num_heads=32")),
}
ALLOWED = {"tensor_parallel", "sequence_parallel", "data_parallel", "activation_checkpointing"}
NEAR = 0.9


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check each of ANSWERS beside the best layout of the planner. Raises Wrong, with a line for each question."""
    gpu = load_gpu("a100-40gb")
    wrong = []
    for name, (gpus, words) in QUESTIONS.items():
        try:
            check_answer(exercise, name, gpu, gpus, words)
        except Wrong as error:
            wrong.append(f"{name}: {error}")
    if wrong:
        raise Wrong("\n  - ".join(wrong))


def check_answer(exercise: ModuleType, name: str, gpu: Gpu, gpus: int, words: Sequence[str]) -> None:
    """Check the answer to one question. Raises Wrong."""
    expect(name in exercise.ANSWERS, "no answer")
    answer = shlex.split(exercise.ANSWERS[name])
    request = Request([*CONFIG, *words, *answer], gpu)
    options = {word[2:].split("=")[0] for word in answer if word.startswith("--")}
    others = options - ALLOWED
    expect(not others, f"{', '.join(sorted(others))} is not asked for, only {', '.join(sorted(ALLOWED))}")
    try:
        plan = request.plan(gpus)
    except UsageError as error:
        raise Wrong(str(error)) from None
    needed = (plan.peak + plan.overhead) / 2**30
    there = gpu.memory / 2**30
    largest = max(plan.memory, key=plan.memory.__getitem__)
    expect(
        plan.fits == "fits",
        f"it needs {needed:.1f} GiB and 85 % of {there:.1f} are to be had; most are {largest}: which strategy shares "
        "them out?",
    )
    best = best_layouts(Request([*CONFIG, *OTHERS, *words], gpu), gpus, 1)[0]
    hint = "does it compute more than it must, or send more?"
    if plan.config.activation_checkpointing == "full" and best.config.activation_checkpointing == "none":
        hint = "it computes activations twice; is there a split that leaves room for them?"
    elif plan.layout.tp > best.layout.tp:
        hint = "it splits layers more than it must, and sends in every block"
    expect(
        plan.samples_per_sec >= NEAR * best.samples_per_sec,
        f"{plan.samples_per_sec:.1f} samples/s, the best reaches {best.samples_per_sec:.1f}: {hint}",
    )
