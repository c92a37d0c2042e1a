"""The numbers of the page to play with (docs/explorer.md): plans by formula of every layout, for a few sizes.

The page computes nothing that the planner computes: it looks the layout up. `make site` counts them, which takes some
minutes, and keeps them in .cache until the planner changes.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tools.planner.hardware import load_gpu
from tools.planner.plan import CATEGORIES, Plan, plan_layout
from tools.planner.search import Request, formula_plans
from tools.planner.textbook import textbook_traces
from utils.files import whole_file

ROOT = Path(__file__).parents[1]
GPUS = ("a100-40gb", "h100", "mi300x")
COUNTS = (1, 2, 4, 8, 16, 32, 128, 512)
MOST_APART = 32  # GPUs that split a model or an image between them; more are slow, and would be most of the page
# Each choice of the page: {its words: options of the config}. The first word is its name in an address.
MODELS = {
    "small: 12 blocks of 384 features": "--embed_dim=384 --num_heads=8",
    "medium: 12 blocks of 1024 features": "--embed_dim=1024 --num_heads=8",
    "ensembles: 4 members of the small one": "--embed_dim=384 --num_heads=8 --loss=crps --ensemble_size=4",
    "large: 24 blocks of 2048 features": "--embed_dim=2048 --num_heads=16 --depth=24",
}
IMAGES = {
    "360 x 720 points, 4,050 tokens": "",  # that of config mp
    "720 x 1440 points, 16,200 tokens": "--img_size 720 1440",
}
BATCHES = {
    "32 samples": "--global_batch_size=32",
    "256 samples": "--global_batch_size=256",
}
ACCUMULATED = 4  # micro-batches of a layout without a pipeline, beside one
BASE = "--yaml_config=config/mp.yaml --config=mp"
# The page has no choice for these options.
FIXED = "--no-sequence_parallel --cp_method=gather --domain_method=gather --pp_schedule=1f1b"
MIB = 2**20


def row(plan: Plan, sent: dict[str, int]) -> list[Any]:
    """A layout and its plan: sizes, strategy, micro-batches, checkpointing, MiB by kind, ms and messages of a step.

    sent: the number of each message, as JSON: [phase, kind, group, inside a node, count, MiB]; new ones are added.
    """
    # Many layouts send the same message. A row has only its number, so that the page stays small.
    messages = []
    for each in plan.to_json()["collectives"]:
        fields = [
            each["phase"],
            each["kind"],
            each["group"],
            int(each["inside"]),
            each["count"],
            round(each["bytes"] / MIB, 2),
        ]
        message = json.dumps(fields)
        messages.append(sent.setdefault(message, len(sent)))
    layout = plan.layout
    config = plan.config
    return [
        # explorer.js names these values in its FIELDS, in the same order.
        layout.world_size,
        layout.tp,
        layout.cp,
        layout.pp,
        "x".join(map(str, layout.domain)),
        layout.ens,
        layout.dp,
        config.data_parallel,
        config.gradient_accumulation,
        config.activation_checkpointing,
        [round(plan.memory[name] / MIB, 1) for name in CATEGORIES],
        round(plan.needed / MIB, 1),
        round(plan.time.seconds * 1e3, 2),
        messages,
    ]


def layouts(
    gpu: str, model: str, image: str, batch: str, counts: Sequence[int], sent: dict[str, int]
) -> list[list[Any]]:
    """Rows of all layouts of these numbers of GPUs."""
    words = f"{BASE} {MODELS[model]} {IMAGES[image]} {BATCHES[batch]} {FIXED}".split()
    request = Request(words, load_gpu(gpu))
    rows = []
    for n in counts:
        plans, *_ = formula_plans(request, n)
        for plan in plans:
            # The ranks that are not data parallel share a model and an image.
            if n > MOST_APART * plan.layout.dp:
                continue
            for each in (plan, *accumulated(plan)):
                rows.append(row(each, sent))
    return rows


def accumulated(plan: Plan) -> list[Plan]:
    """The plan of the same layout that splits its batch into micro-batches, where it can and does not yet."""
    config, layout = plan.config, plan.layout
    samples = config.global_batch_size // layout.dp
    # A pipeline has micro-batches of its own.
    if layout.pp > 1 or samples % ACCUMULATED:
        return []
    config = config.model_copy(update={"gradient_accumulation": ACCUMULATED})
    return [plan_layout(config, layout, plan.gpu, textbook_traces(config, layout))]


def data(counts: Sequence[int] = COUNTS) -> dict[str, Any]:
    """{"gpus": ..., "models": ..., "images": ..., "base": ..., "rows": {"gpu|model|image|batch": rows}}."""
    sent: dict[str, int] = {}
    rows = {}
    for names in product(GPUS, MODELS, IMAGES, BATCHES):
        rows["|".join(names)] = layouts(*names, counts, sent)
    gpus = {}
    for name in GPUS:
        gpu = load_gpu(name)
        gpus[name] = {"per_node": gpu.gpus_per_node, "mib": round(gpu.memory / MIB)}
    return {
        "gpus": gpus,
        "models": MODELS,
        "images": IMAGES,
        "batches": BATCHES,
        "counts": counts,
        "kinds": CATEGORIES,
        "base": BASE,
        "messages": [json.loads(message) for message in sent],  # by number, since a dict keeps its order
        "rows": rows,
    }


def script() -> str:
    """The data as a script, which a page takes from a file too. EXPLORER_GPUS: the most GPUs (512)."""
    most = int(os.environ.get("EXPLORER_GPUS", COUNTS[-1]))
    # Plans follow from these files, so a change in any of them makes the data anew.
    sources = [
        Path(__file__),
        ROOT / "config/hardware.yaml",
        ROOT / "config/mp.yaml",
        ROOT / "utils/layout.py",
        *sorted(ROOT.glob("tools/planner/*.py")),
        *sorted(ROOT.glob("distributed/*.py")),
    ]
    content = b"".join(path.read_bytes() for path in sources)
    digest = hashlib.sha256(content).hexdigest()[:16]
    kept = ROOT / ".cache" / f"explorer-{most}-{digest}.js"
    if not kept.exists():
        # A test counts few GPUs, which takes seconds.
        counts = tuple(n for n in COUNTS if n <= most)
        text = f"const LAYOUTS = {json.dumps(data(counts), separators=(',', ':'))};\n"
        with whole_file(kept) as part:
            part.write_text(text)
    return kept.read_text()
