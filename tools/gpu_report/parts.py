"""The parts of the report, most valuable first, and the figures that they have left."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu_report.running import Command, Failure, Part
from training.flops import training_flops
from utils.config import check_config, read_mappings, read_named_config
from utils.schema import Config

GIB = 2**30

SMALL = ["--img_size", "16", "32", "--patch_size=4", "--embed_dim=32", "--num_heads=4", "--depth=2"]
PATHS = {"train_data": "train", "valid_data": "valid", "inf_data": "test"} | {
    name: f"stats/{name}.npy" for name in ("global_means", "global_stds", "time_means")
}
PARTS = "config/gpu_report.yaml"


@dataclass(frozen=True)
class Machine:
    """What the parts depend on; and their figures, {name: value}, read from the files that their commands have left.

    device: cuda; or cpu, where sizes are tiny and what needs a GPU is left out. count: GPUs. gpu: the entry of
    config/hardware.yaml, '' without one. work: folder of all that is written.
    """

    device: str
    count: int
    gpu: str
    work: Path

    def values(self) -> dict[str, Any]:
        """What stands in braces in config/gpu_report.yaml. split: ranks that divide 4 heads and 4 blocks."""
        workers = 1 if self.device == "cpu" else 8
        return vars(self) | {"split": math.gcd(self.count, 4), "workers": workers}

    def words(self) -> dict[str, list[str]]:
        """The words that stand for several: data and settings of each config, and what is tiny without a GPU."""
        tiny, found = self.device == "cpu", {}
        for config in ("quick", "mp_quick", "shard_quick", "short"):
            data = "short" if config == "short" else "quick"
            paths = [f"--{key}_path={self.work}/data/{data}/{path}" for key, path in PATHS.items()]
            own = [f"--config={config}", f"--device={self.device}", *paths, *(SMALL if tiny else [])]
            found[f"$data_of_{config}"] = own
            # Without validation on the way.
            found[f"${config}"] = [*own, f"--expdir={self.work}/runs", "--warmup=5", "--validate_every=1000"]
        found["$short"] += [f"--num_iters={30 if tiny else 60}"]
        return found | {
            "$few": [f"--num_iters={30 if tiny else 300}"],
            "$many": [f"--num_iters={400 if tiny else 2000}", f"--checkpoint_every={40 if tiny else 200}"],
            "$points_of_quick": SMALL[:3] if tiny else ["--img_size", "32", "64"],
            "$points_of_short": SMALL[:3] if tiny else ["--img_size", "360", "720"],
            "$torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", f"{self.count}"],
            "$steps": ["--steps=1" if tiny else "--steps=4"], "$fast": ["--amp_mode=bf16", "--enable_fused"],
            "$graphs": [] if tiny else ["--amp_mode=fp16", "--enable_fused", "--enable_cuda_graphs"],
            "$compiled": [] if tiny else ["--enable_jit"],  # a CPU compiles for minutes
            "$large": [] if tiny else ["--embed_dim=1024"],
        }  # fmt: skip

    def _json(self, name: str) -> Any:
        return json.loads((self.work / name).read_text())

    def _run(self, config: str, name: str) -> tuple[Config, dict[str, Any]]:
        folder = f"runs/{config}/{name}"
        settings = read_named_config(self.work / folder / "config.yaml", config)
        return check_config(settings, config, folder), self._json(f"{folder}/summary.json")

    def trained(self, config: str, name: str) -> dict[str, Any]:
        """Speed, memory and loss of a training run; MFU of the products in bfloat16 that were measured before."""
        settings, summary = self._run(config, name)
        speed = summary["samples_per_sec"]
        flops = speed * training_flops(settings) / summary["world_size"]
        known = config == "short" and (self.work / "on_device.json").exists()
        peak = self._json("on_device.json")["matmul_flops_per_sec"] if known else None
        return {
            "samples/s": speed, "data wait": summary["data_wait_fraction"], "TFLOP/s": flops / 1e12,
            "MFU": peak and flops / peak, "peak GiB": summary["peak_memory_bytes"] / GIB,
            "loss": summary["train_loss"], "validation": summary["val_loss"],
        }  # fmt: skip

    def resumed(self, config: str, name: str) -> dict[str, Any]:
        """The same of a run that was stopped. Raises Failure where it began anew."""
        said = (self.work / "runs" / config / name / "out.log").read_text()
        if not (resumed := re.search(r"Resuming at iteration (\d+)", said)):
            raise Failure("the second start did not resume")
        return {"resumed at": int(resumed[1])} | self.trained(config, name)

    def planned(self, config: str, name: str) -> dict[str, Any]:
        """Memory and step time of a run: planned, measured, and planned / measured - 1."""
        (settings, summary), (plan,) = self._run(config, name), self._json(f"plan_{name}.json")
        computing = 1 - summary["data_wait_fraction"]  # a plan leaves reading out
        seconds = settings.global_batch_size / summary["samples_per_sec"] * computing
        planned, measured = plan["peak_allocated_bytes"], summary["peak_memory_bytes"]
        return {
            "planned GiB": planned / GIB, "measured GiB": measured / GIB, "memory off": planned / measured - 1,
            "planned s": plan["step_time_s"], "measured s": seconds, "time off": plan["step_time_s"] / seconds - 1,
        }  # fmt: skip

    def ladder(self, config: str) -> dict[str, Any]:
        """The fastest step beside float32, with or without reading ahead."""
        steps = self._json(f"ladder_{config}.json")["steps"]
        plain = max(step["samples_per_sec"] for step in steps[:2])
        best = max(steps, key=lambda step: step["samples_per_sec"])
        return {
            "fp32 samples/s": plain, "fastest": best["step"], "samples/s": best["samples_per_sec"],
            "x fp32": best["samples_per_sec"] / plain, "MFU": best["mfu"], "data wait": best["data_wait"],
        }  # fmt: skip

    def loaders(self, config: str) -> dict[str, Any]:
        """Samples/s of the fastest loader of each kind."""
        speeds: dict[str, list[float]] = {}
        for row in self._json(f"data_{config}.json")["loaders"]:
            speeds.setdefault(row["loader"].split(",")[0], []).append(row["samples_per_sec"])
        return {kind: max(found) for kind, found in speeds.items()}

    def on_device(self) -> dict[str, Any]:
        """Collectives that were right, milliseconds of attention."""
        found = self._json("on_device.json")
        right = {f"{name} collectives": len(kinds) for name, kinds in found["collectives"].items()}
        return right | {f"{method} ms": figures["ms"] for method, figures in found["attention"].items()}

    def preflight(self) -> dict[str, Any]:
        """How many checks ended how."""
        levels = [result["level"] for result in self._json("preflight.json")["results"]]
        return {level: levels.count(level) for level in ("ok", "warn")}

    def tests(self, log: str) -> dict[str, Any]:
        """How many tests ended how."""
        return {how: int(n) for n, how in re.findall(r"(\d+) (passed|skipped)", (self.work / log).read_text())}


def parts_of(machine: Machine) -> Iterator[Part]:
    """All parts for a machine, as config/gpu_report.yaml has them."""
    lacks = {
        "a GPU": machine.device == "cpu" and "needs a GPU", "two GPUs": machine.count < 2 and "needs two GPUs",
        "a known GPU": not machine.gpu and "config/hardware.yaml has no GPU of this name: choose one with --gpu",
    }  # fmt: skip
    several, values = machine.words(), machine.values()
    for name, part in read_mappings(PARTS, "parts").items():
        nested = [
            several.get(word, [word]) if word[0] == "$" else [word.format(**values)] for word in part["run"].split()
        ]
        words = [word for own in nested for word in own]
        commands = [Command(words, status=75, stop_at=part["stop"])] if "stop" in part else []
        function, *arguments = part.get("figures", "nothing").split()
        figures = partial(getattr(machine, function, dict), *arguments)
        yield Part(
            name, part.get("seconds", 90), [*commands, Command(words)], figures, lacks.get(part.get("needs", "")) or ""
        )
