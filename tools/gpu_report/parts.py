"""The parts of the report, most valuable first."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.gpu_report.figures import Figures
from tools.gpu_report.running import Command, Part

SMALL = ["--img_size", "16", "32", "--patch_size=4", "--embed_dim=32", "--num_heads=4", "--depth=2"]
PATHS = {"train_data": "train", "valid_data": "valid", "inf_data": "test"} | {
    name: f"stats/{name}.npy" for name in ("global_means", "global_stds", "time_means")
}
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
FAST, GRAPHS = ["--amp_mode=bf16", "--enable_fused"], ["--amp_mode=fp16", "--enable_fused", "--enable_cuda_graphs"]
LADDER, PLANNED, WIDE = "ladder of short", "short, fused: planned", "short, embed_1024"


@dataclass(frozen=True)
class Machine:
    """What the parts depend on.

    device: cuda; or cpu, where sizes are tiny and what needs a GPU is left out. count: GPUs. gpu: the entry of
    config/hardware.yaml, '' without one. work: folder of all that is written.
    """

    device: str
    count: int
    gpu: str
    work: Path

    def data(self, name: str, height: int, width: int, *words: str) -> Command:
        """Make sample data of this image size."""
        size = SMALL[:3] if self.device == "cpu" else ["--img_size", f"{height}", f"{width}"]
        return Command(["-m", "weather.sample_data", f"{self.work}/data/{name}", *size, *words])

    def settings(self, config: str) -> list[str]:
        """Options of a config: on the data `short` the config of this name, all others on `quick`."""
        data, small = "short" if config == "short" else "quick", SMALL if self.device == "cpu" else []
        paths = [f"--{key}_path={self.work}/data/{data}/{path}" for key, path in PATHS.items()]
        return [f"--config={config}", f"--device={self.device}", *paths, *small]

    def training(self, config: str, name: str, *words: str, script: str = "train.py", ranks: int = 1) -> list[str]:
        """Train a config into the run folder of this name, without validation on the way."""
        launch = [*RANKS, f"{ranks}"] if ranks > 1 else []
        folder = f"--expdir={self.work}/runs", f"--run_num={name}"
        return [*launch, script, *self.settings(config), *folder, "--warmup=5", "--validate_every=1000", *words]

    def benchmark(self, kind: str, config: str, *words: str) -> list[Command]:
        """One round of a benchmark."""
        file = f"--json={self.work}/{kind}_{config}.json"
        return [Command(["benchmark.py", kind, "--rounds=1", file, *words, *self.settings(config)])]


def parts_of(machine: Machine) -> Iterator[Part]:
    """All parts for a machine."""
    read, work = Figures(machine.work), machine.work
    lacks_gpu = "needs a GPU" if machine.device == "cpu" else ""
    steps, workers = ("--steps=1", "1") if lacks_gpu else ("--steps=4", "8")
    graphs, compiled = ([], []) if lacks_gpu else (GRAPHS, ["--enable_jit"])  # a CPU compiles for minutes
    ranks = [*RANKS, f"{machine.count}"]

    def run(config: str, name: str, *words: str, lacks: str = "", script: str = "train.py", ranks: int = 1) -> Part:
        few = f"--num_iters={30 if lacks_gpu else 60 if config == 'short' else 300}"
        command = Command(machine.training(config, name, few, *words, script=script, ranks=ranks))
        return Part(f"{config}, {name}", 90, [command], lambda: read.run(config, name), lacks)

    def short(name: str, *words: str) -> Part:
        return run("short", name, *FAST, "--limit_nsamples_val=16", f"--num_data_workers={workers}", *words)

    def shared(script: str, config: str, name: str, *words: str) -> Part:
        lacks = "" if machine.count > 1 else "needs two GPUs"
        return run(config, name, "--local_batch_size=4", *words, lacks=lacks, script=script, ranks=machine.count)

    def planned(name: str) -> Part:
        config = [f"--yaml_config={work}/runs/short/{name}/config.yaml", "--config=short", f"--gpu={machine.gpu}"]
        lacks = "" if machine.gpu else "config/hardware.yaml has no GPU of this name: choose one with --gpu"
        command = Command(["plan.py", *config, f"--json={work}/plan_{name}.json"])
        return Part(f"short, {name}: planned", 60, [command], lambda: read.planned("short", name), lacks)

    yield Part("data of quick", 60, [machine.data("quick", 32, 64, "--train_years=1979-1980", "--days=20")])
    pytest = Command(["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"])
    yield Part("tests", 180, [pytest], lambda: read.tests("tests.log"), lacks_gpu)
    yield run("quick", "plain")
    yield run("quick", "compiled", *FAST, *compiled)
    yield run("quick", "graphs", *graphs, lacks=lacks_gpu)
    iterations, every = (400, 40) if lacks_gpu else (2000, 200)
    length = f"--num_iters={iterations}", f"--checkpoint_every={every}"
    twice = machine.training("quick", "resumed", *graphs, *length)
    stop_and_resume = [Command(twice, status=75, stop_at="Saved checkpoint"), Command(twice)]
    yield Part("quick, stopped and resumed", 90, stop_and_resume, lambda: read.resumed("quick", "resumed"))
    forecast = ["forecast.py", f"--run_folder={work}/runs/quick/plain", "--starts=2", "--lead_hours=24"]
    yield Part("forecast", 60, [Command(forecast)])
    on_device = [*ranks, "-m", "tools.gpu_report.on_device", f"--device={machine.device}"]
    yield Part("collectives, attention", 60, [Command([*on_device, f"--json={work}/on_device.json"])], read.on_device)

    common = math.gcd(machine.count, 4)  # of 4 heads, 4 blocks
    yield shared("train.py", "quick", "ddp")
    yield shared("train.py", "quick", "fsdp", "--data_parallel=fsdp")
    yield shared("train_mp.py", "mp_quick", "tp", f"--tensor_parallel={common}")
    yield shared("train_mp.py", "mp_quick", "cp", f"--context_parallel={common}", "--cp_method=ring")
    yield shared("train_mp.py", "mp_quick", "pp", f"--pipeline_parallel={common}", f"--gradient_accumulation={common}")
    yield shared("train_shard.py", "shard_quick", "domain", f"--domain_parallel={common}")

    years = "--train_years=1979", "--valid_years=1980", "--test_years=1981", "--days=5"
    yield Part("data of short", 120, [machine.data("short", 360, 720, *years)])
    climb = machine.benchmark("ladder", "short", steps, f"--workers={workers}")
    yield Part(LADDER, 270, climb, lambda: read.ladder("short"))
    yield short("fused")
    yield short("embed_1024", *compiled, *([] if lacks_gpu else ["--embed_dim=1024"]))
    yield planned("fused")
    yield planned("embed_1024")

    yield run("quick", "graphs_and_checkpointing", *graphs, "--activation_checkpointing=selective")
    yield run("quick", "profiled", "--profile=torch")
    preflight = [*ranks, "-m", "tools.preflight", f"--expdir={work}/runs", f"--train_data_path={work}/data/quick/train"]
    yield Part("preflight", 60, [Command([*preflight, f"--json={work}/preflight.json"])], read.preflight)
    loaders = machine.benchmark("data", "short", "--workers", workers, "--batches=4")
    yield Part("loaders", 120, loaders, lambda: read.loaders("short"))
    climb = machine.benchmark("ladder", "quick", steps)
    yield Part("ladder of quick", 150, climb, lambda: read.ladder("quick"), lacks_gpu)
