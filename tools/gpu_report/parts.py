"""The parts of the report, most valuable first, and the figures that they have left."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu_report.running import Failure, Part
from training.flops import training_flops
from utils.config import check_config, read_mappings, read_named_config
from utils.schema import Config

GIB = 2**30
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

    def parts(self) -> Iterator[Part]:
        """The parts as config/gpu_report.yaml has them."""
        said, rehearsal = read_mappings(PARTS, "parts"), self.device == "cpu"
        several = said["words"] | (said["rehearsal"] if rehearsal else {})
        # split: ranks that divide 4 heads and 4 blocks
        values = vars(self) | {"split": math.gcd(self.count, 4), "workers": 1 if rehearsal else 8}
        lacks = {
            "a GPU": rehearsal and "needs a GPU", "two GPUs": self.count < 2 and "needs two GPUs",
            "a known GPU": not self.gpu and "config/hardware.yaml has no GPU of this name: choose one with --gpu",
        }  # fmt: skip

        def words(text: str) -> Iterator[str]:
            for word in text.split():
                if word in several:
                    yield from words(several[word])
                else:
                    yield word.format(**values)

        for name, part in said["parts"].items():
            function, *arguments = part.get("figures", "none").split()
            yield Part(
                name, part.get("seconds", 90), list(words(part["run"])), part.get("stop", ""),
                partial(getattr(self, function, dict), *arguments), lacks.get(part.get("needs")) or "",
            )  # fmt: skip

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
        rows = sorted(self._json(f"data_{config}.json")["loaders"], key=lambda row: row["samples_per_sec"])
        return {row["loader"].split(",")[0]: row["samples_per_sec"] for row in rows}

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
