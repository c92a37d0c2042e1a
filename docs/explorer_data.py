"""The constants of the page to play with (docs/explorer.md): its machines, models, images and batches.

The page computes all else by the planner's formulas (docs/explorer/planner.js).
"""

import json
from typing import Any

from tools.planner.hardware import load_gpu, read_gpus
from tools.planner.plan import CATEGORIES
from tools.planner.step_time import UNCALIBRATED
from tools.planner.symbols import Symbols
from training.forecasting.crps import MOST_IN_PAIRS
from utils.config import load_config

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
BASE = "--yaml_config=config/mp.yaml --config=mp"
# The page has no choice for these options.
FIXED = "--no-sequence_parallel --cp_method=gather --domain_method=gather --pp_schedule=1f1b"
# What the formulas need of a machine.
OF_GPU = (
    "gpus_per_node memory workspace_mib overhead_gib bf16 bandwidth link nic hop_inside hop_across launch kernel"
    " matmul_efficiency memory_efficiency network_efficiency attention"
)


def constants() -> dict[str, Any]:
    """Names and numbers of everything that the page has a choice of."""
    gpus = {}
    for name in read_gpus():
        gpu = load_gpu(name)
        gpus[name] = {key: getattr(gpu, key) for key in OF_GPU.split()}
    models = {}
    for name, options in MODELS.items():
        s = _symbols(options)
        models[name] = {
            "options": options,
            "features": s.D,
            "heads": s.config.num_heads,
            "depth": s.config.depth,
            "members": s.config.ensemble_size,
            "noise": s.config.noise_of_model,
        }
    images = {}
    for name, options in IMAGES.items():
        s = _symbols(options)
        rows, columns = s.patches
        images[name] = {
            "options": options,
            "rows": rows,
            "columns": columns,
            "inputs": s.inputs,
            "outputs": s.outputs,
        }
    batches = {}
    for name, options in BATCHES.items():
        batches[name] = {"options": options, "samples": _symbols(options).config.global_batch_size}
    return {
        "gpus": gpus,
        "models": models,
        "images": images,
        "batches": batches,
        "kinds": CATEGORIES,
        "base": BASE,
        "error": UNCALIBRATED,
        "most_in_pairs": MOST_IN_PAIRS,
    }


def _symbols(options: str) -> Symbols:
    """The symbols of a config on one device."""
    config = load_config(f"{BASE} {options} {FIXED}".split(), world_size=1)
    return Symbols(config, config.layout(1), 0)


def script() -> str:
    """The constants as a script, which a page takes from a file too."""
    return f"const CONSTANTS = {json.dumps(constants(), separators=(',', ':'))};\n"
