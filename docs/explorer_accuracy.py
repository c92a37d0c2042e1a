"""How far the formulas of the page to play with are from traces: python -m docs.explorer_accuracy."""

import sys

from docs.explorer_data import BASE, BATCHES, IMAGES, MODELS
from tools.planner.hardware import load_gpu
from tools.planner.plan import Plan, plan_layout
from tools.planner.textbook import textbook_traces
from tools.tables import format_table
from utils.config import SPLITS, load_config

GPU = "a100-40gb"
# (GPUs, first word of the model, options): the page's first choice, its layouts to start from, and one of each split.
LAYOUTS = (
    (1, "small", ""),
    (8, "medium", ""),
    (8, "small", ""),
    (8, "large", "--data_parallel=fsdp --gradient_accumulation=4 --activation_checkpointing=full"),
    (8, "large", "--tensor_parallel=4 --no-sequence_parallel"),
    (8, "medium", "--context_parallel=4 --cp_method=gather --data_parallel=zero1"),
    (8, "medium", "--pipeline_parallel=4 --gradient_accumulation=8"),
    (8, "ensembles", "--ensemble_parallel=2"),
    (8, "medium", "--domain_parallel=2x2 --domain_method=gather --data_parallel=fsdp"),
)


def plans(gpus: int, model: str, options: str) -> tuple[Plan, Plan]:
    """The plan of a layout by formula, and by a trace."""
    (of_model,) = [words for name, words in MODELS.items() if name.startswith(model)]
    image, batch = next(iter(IMAGES.values())), next(iter(BATCHES.values()))
    words = f"{BASE} {of_model} {image} {batch} {options}".split()
    config = load_config(words, world_size=gpus, splits=SPLITS)
    gpu = load_gpu(GPU)
    layout = config.layout(gpus, gpu.gpus_per_node)
    return plan_layout(config, layout, gpu, textbook_traces(config, layout)), plan_layout(config, layout, gpu)


def main() -> None:
    """Print a table: each number by formula, as a share of that of the trace."""
    rows = []
    for gpus, model, options in LAYOUTS:
        print(f"{gpus} {model} {options}", file=sys.stderr, flush=True)
        formula, trace = plans(gpus, model, options)
        counts = []
        sizes = []
        for plan in (formula, trace):
            counts.append(sum(each["count"] for each in plan.time.collectives))
            sizes.append(sum(each["bytes"] for each in plan.time.collectives))
        temporaries = formula.memory["temporaries"] / trace.memory["temporaries"]
        sent = sizes[0] / sizes[1] if sizes[1] else None
        time = formula.time.seconds / trace.time.seconds
        needed = formula.needed / trace.needed
        rows.append([f"{gpus} x {model} {options}".rstrip(), time, needed, temporaries, sent, *counts])
    columns = {"layout": "", "time": ".2f", "needed": ".2f", "temporaries": ".2f", "bytes sent": ".2f"}
    print(format_table(columns | {"messages": "d", "traced": "d"}, rows))


if __name__ == "__main__":
    main()
