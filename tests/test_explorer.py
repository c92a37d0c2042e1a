"""The page to play with computes what the planner computes by its formulas, and refuses what the scripts refuse."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from docs import explorer_data
from docs.explorer_data import BASE, BATCHES, FIXED, IMAGES, MODELS
from tools.planner.hardware import load_gpu
from tools.planner.layouts import trial
from tools.planner.plan import CATEGORIES, plan_layout
from tools.planner.search import Request
from tools.planner.textbook import textbook_traces
from utils.config import check_config
from utils.errors import UsageError

ROOT = Path(__file__).parents[1]
MIB = 2**20
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")


def draw_choice(draw):
    """A layout of the page, mostly one that can be: sizes that divide, of which one may be wrong."""
    n = draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512])
    left = n
    sizes = {}
    for name in draw.sample(["tp", "cp", "pp", "rows", "columns", "ens"], 6):
        divisors = [size for size in range(1, min(left, 32) + 1) if left % size == 0]
        sizes[name] = draw.choice([1, 1, 1, *divisors])
        left //= sizes[name]
    if draw.random() < 0.05:
        sizes["tp"] = 5
    rows, columns = sizes.pop("rows"), sizes.pop("columns")
    if draw.random() < 0.7 and rows * columns > 1:
        sizes["cp"] = sizes["pp"] = 1
    parts = draw.choice([1, 4]) if sizes["pp"] == 1 else sizes["pp"] * draw.choice([1, 2, 4])
    ways = {"strategy": draw.choice(STRATEGIES), "parts": parts, "again": draw.choice(["none", "full"])}
    return {"n": n, **sizes, "domain": f"{rows}x{columns}", **ways}


def settings_of(choice):
    return {
        "tensor_parallel": choice["tp"],
        "context_parallel": choice["cp"],
        "pipeline_parallel": choice["pp"],
        "domain_parallel": choice["domain"],
        "ensemble_parallel": choice["ens"],
        "data_parallel": choice["strategy"],
        "gradient_accumulation": choice["parts"],
        "activation_checkpointing": choice["again"],
    }


REFUSALS = {}


def planned(key, choice):
    """What the planner says of a layout: its reason to refuse it, or its numbers."""
    gpu = load_gpu(key["gpu"])
    words = f"{BASE} {MODELS[key['model']]} {IMAGES[key['image']]} {BATCHES[key['batch']]} {FIXED}".split()
    base = Request(words, gpu).any_layout()
    wanted = base.model_dump(exclude={"config"}) | settings_of(choice)
    try:
        config = check_config(wanted, base.config, "", (), choice["n"])
    except UsageError as error:
        return {"refused": str(error).removeprefix(": ")}
    refusal = REFUSALS.setdefault((key["model"], key["image"]), trial(base))
    of_split = {name: value for name, value in settings_of(choice).items() if name.endswith("_parallel")}
    del of_split["data_parallel"]
    reason = refusal(of_split | {"gradient_accumulation": choice["parts"]})
    if reason:
        return {"refused": reason}
    layout = config.layout(choice["n"], gpu.gpus_per_node)
    plan = plan_layout(config, layout, gpu, textbook_traces(config, layout))
    messages = []
    for each in plan.time.collectives:
        messages.append(
            [each["phase"], each["kind"], each["group"], each["inside"], each["count"], each["bytes"] / MIB]
        )
    return {
        "dp": layout.dp,
        "memory": [plan.memory[name] / MIB for name in CATEGORIES],
        "needed": plan.needed / MIB,
        "ms": plan.time.seconds * 1e3,
        "messages": messages,
    }


def test_each_number_and_each_refusal_is_the_planners():
    """300 drawn layouts of any machine, model and image: to a part in a thousand million, and word by word."""
    node = shutil.which("node")
    if not node:
        pytest.skip("no node to run the script of the page")
    draw = random.Random(7)
    gpus = list(explorer_data.constants()["gpus"])
    names = {"gpu": gpus, "model": list(MODELS), "image": list(IMAGES), "batch": list(BATCHES)}
    drawn = []
    for _ in range(300):
        key = {name: draw.choice(choices) for name, choices in names.items()}
        drawn.append((key, draw_choice(draw)))
    code = explorer_data.script() + (ROOT / "docs/explorer/planner.js").read_text()
    code += f"""
    const answer = ([key, choice]) => {{
        const refused = PLANNER.refusal(key, choice);
        return refused ? {{ refused }} : PLANNER.plan(key, choice);
    }};
    console.log(JSON.stringify({json.dumps(drawn)}.map(answer)));"""
    done = subprocess.run([node, "-"], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    refused = 0
    for (key, choice), shown in zip(drawn, json.loads(done.stdout), strict=True):
        wanted = planned(key, choice)
        refused += "refused" in wanted
        assert shown.keys() == wanted.keys(), (key, choice, shown, wanted)
        for name, value in wanted.items():
            if name == "messages":
                assert [each[:5] for each in shown[name]] == [each[:5] for each in value], (key, choice)
                assert [each[5] for each in shown[name]] == pytest.approx([each[5] for each in value]), (key, choice)
            elif name == "refused":
                assert shown[name] == value, (key, choice)
            else:
                assert shown[name] == pytest.approx(value, rel=1e-9), (name, key, choice)
    assert 50 < refused < 200
