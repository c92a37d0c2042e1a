"""The numbers of the page to play with (docs/explorer.md): plans by formula of every layout, for a few sizes.

The page computes nothing that the planner computes: it looks the layout up. `make site` counts them, which takes about
a minute, and keeps them in .cache until the planner changes.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tools.planner.hardware import load_gpu
from tools.planner.plan import CATEGORIES, Plan
from tools.planner.search import Request, formula_plans

ROOT = Path(__file__).parents[1]
GPUS = ("a100-40gb", "h100")
COUNTS = (1, 2, 4, 8, 16, 32)
MODELS = {
    "small: 12 blocks of 384 features": "--embed_dim=384 --num_heads=8",
    "medium: 12 blocks of 1024 features": "--embed_dim=1024 --num_heads=8",
    "large: 24 blocks of 2048 features": "--embed_dim=2048 --num_heads=16 --depth=24",
}
IMAGES = {
    "360 x 720 points, 4,050 tokens": "",
    "720 x 1440 points, 16,200 tokens": "--img_size 720 1440",
}
BASE = "--yaml_config=config/mp.yaml --config=mp --global_batch_size=32"
FIXED = "--no-sequence_parallel --cp_method=gather --domain_method=gather --pp_schedule=1f1b"
FIXED += " --activation_checkpointing=none"
MIB = 2**20


def row(plan: Plan, sorts: list[list[Any]]) -> list[Any]:
    """A layout and its plan: sizes, strategy, MiB by kind, ms of a step, messages of a step.

    sorts: of messages: [phase, kind, group, inside a node]; new ones are added. A message is [its sort, count, MiB].
    """
    layout, fields = plan.layout, plan.to_json()
    memory = [round(plan.memory[name] / MIB, 1) for name in CATEGORIES]
    messages = []
    for each in fields["collectives"]:
        sort = [each["phase"], each["kind"], each["group"], int(each["inside"])]
        if sort not in sorts:
            sorts.append(sort)
        messages.append([sorts.index(sort), each["count"], round(each["bytes"] / MIB, 2)])
    sizes = [layout.world_size, layout.tp, layout.cp, layout.pp, "x".join(map(str, layout.domain)), layout.dp]
    strategy = plan.config.data_parallel, plan.config.gradient_accumulation
    needed = round(plan.needed / MIB, 1)
    return [*sizes, *strategy, memory, needed, round(plan.time.seconds * 1e3, 2), messages]


def layouts(gpu: str, model: str, image: str, counts: Sequence[int], sorts: list[list[Any]]) -> list[list[Any]]:
    """Rows of all layouts of these numbers of GPUs."""
    request = Request(f"{BASE} {MODELS[model]} {IMAGES[image]} {FIXED}".split(), load_gpu(gpu))
    return [row(plan, sorts) for n in counts for plan in formula_plans(request, n)[0]]


def data(counts: Sequence[int] = COUNTS) -> dict[str, Any]:
    """{"gpus": ..., "models": ..., "images": ..., "base": ..., "rows": {"gpu|model|image": rows}}."""
    sorts: list[list[Any]] = []
    rows = {"|".join(names): layouts(*names, counts, sorts) for names in product(GPUS, MODELS, IMAGES)}
    gpus = {name: load_gpu(name) for name in GPUS}
    return {
        "gpus": {name: {"per_node": gpu.gpus_per_node, "mib": round(gpu.memory / MIB)} for name, gpu in gpus.items()},
        "models": MODELS,
        "images": IMAGES,
        "counts": counts,
        "kinds": CATEGORIES,
        "base": BASE,
        "sorts": sorts,
        "rows": rows,
    }


def script() -> str:
    """The data as a script, which a page takes from a file too. EXPLORER_GPUS: the most GPUs (32)."""
    most = int(os.environ.get("EXPLORER_GPUS", COUNTS[-1]))
    sources = [Path(__file__), ROOT / "config/hardware.yaml", ROOT / "config/mp.yaml", ROOT / "utils/layout.py"]
    sources += [*sorted(ROOT.glob("tools/planner/*.py")), *sorted(ROOT.glob("distributed/*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    kept = ROOT / ".cache" / f"explorer-{most}-{digest}.js"
    if not kept.exists():
        counts = tuple(n for n in COUNTS if n <= most)
        text = f"const LAYOUTS = {json.dumps(data(counts), separators=(',', ':'))};\n"
        kept.parent.mkdir(exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text(text)
        partial.replace(kept)
    return kept.read_text()
