"""A report of all that needs a GPU: training, forecast, tests, benchmarks, and plans beside what was measured.

    make gpu                                              on this machine's GPUs, in 10 minutes at most
    python -m tools.gpu_report --device cpu --gpu h100    a rehearsal at tiny sizes, without a GPU
    python -m tools.gpu_report --plan h100 a100-80gb      the plans of its training runs alone

Its parts run one after another, what matters most first, each within a limit; whatever becomes of one, the others
follow. The report, NAME.json and NAME.md for GPUs of that name, is written anew after each. Exit status: 0 no part
failed (one that lacks something is skipped), 1 some did, 2 wrong options or no GPU.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools import tables
from tools.planner.compare import measured, planned_figures
from tools.planner.hardware import load_gpu, read_gpus
from tools.planner.search import Request
from training.flops import is_gpu, training_flops
from utils.config import ROOT, SCRIPTS, check_config, read_named_config
from utils.device import driver, select_device
from utils.errors import (
    FAILED_STATUS,
    STOPPED_STATUS,
    ArgumentParser,
    UsageError,
    first_line,
    reported_as_usage_error,
    run_main,
)
from utils.files import read_json, whole_file, write_json

SECONDS = 600  # of all parts
GIB = 2**30
MARK = "GPU_REPORT_PART"  # in the environment of every process of a part
KILL_SECONDS = 10  # for killed processes to be gone: one that waits in a driver may never be
POLL_SECONDS = 0.1
TELLING = re.compile(r"(?i)(?<!ChildFailed)Error: |^FAIL ")  # lines that say why; the last word of torchrun does not
GOALS = (  # what is wanted at least, of a figure, in the best of some parts
    ("MFU, embed 384, batch 16", 0.35, "MFU", ("short/compiled", "ladder")),
    ("MFU, embed 1024, batch 16", 0.5, "MFU", ("short/embed_1024",)),
    ("fastest step, times fp32", 7, "x fp32", ("ladder",)),
)
MEMORY_ERROR = 0.05  # of a plan: published runs are within 4 % (docs/plan.md)
PLANNED = {"GiB": ("peak_allocated_bytes", GIB), "ms a step": ("step_time_s", 1e-3), "collectives": ("calls", 1)}


@dataclass(frozen=True)
class Part:
    """A command of Python: `-m MODULE ...`, or a script of this repository and its options.

    estimate: seconds, where all is well. figures: reads {name: value} from what the command has left in the folder of
    all work. lacks: what this machine does not have, so that the part is skipped. ranks: of torchrun; 0 without
    it. stop_at: what the command says when it is to be stopped; then it is started again.
    """

    name: str
    estimate: float
    command: str
    figures: Callable[[Path], dict[str, Any]] = lambda work: {}
    lacks: str = ""
    ranks: int = 0
    stop_at: str = ""
    folder: str = "."  # of the command, in that of all work

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return 2 * self.estimate + 30

    def words(self) -> list[str]:
        """For Python."""
        words = [str(ROOT / word) if word.endswith(".py") else word for word in self.command.split()]
        start = f"-m torch.distributed.run --standalone --nproc_per_node {self.ranks}".split() if self.ranks else []
        return start + words


def parts(device: str, count: int, gpu: str) -> list[Part]:
    """The parts for so many GPUs; for the CPU sizes are tiny. gpu: the planner's name of the GPU, '' without one."""
    cpu = device == "cpu"
    small = "--img_size 16 32 --patch_size=4 --embed_dim=32 --num_heads=4 --depth=2" if cpu else ""
    workers, few = (1, "--num_iters=30") if cpu else (8, "--num_iters=300")
    no_gpu, one = "needs a GPU" * cpu, "needs two GPUs" * (count < 2)
    graphs = "" if cpu else "--amp_mode=fp16 --enable_fused --enable_cuda_graphs"
    fast = "--amp_mode=bf16 --enable_fused" + " --enable_jit" * (not cpu)  # a CPU compiles for minutes
    short = f"{fast} --limit_nsamples_val=16 --num_data_workers={workers}"

    def run(name: str, estimate: float, options: str, script: str = "train.py", **others: Any) -> Part:
        config, number = name.split("/")
        command = (
            f"{script} --yaml_config={SCRIPTS[script].yaml_config} --config={config} --run_num={number} {small} "
            f"--device={device} --warmup=5 --validate_every=1000 {options}"
        )
        return Part(name, estimate, command, lambda work: trained(work, name), **others)

    def pair(name: str, options: str, script: str = "train.py", lacks: str = "") -> Part:
        return run(name, 20, f"{few} --local_batch_size=4 {options}", script, ranks=2, lacks=lacks or one)

    def sample(name: str, estimate: float, points: str, rest: str) -> Part:
        command = f"-m weather.sample_data data/{name} --img_size {'16 32' if cpu else points} {rest}"
        return Part(f"data/{name}", estimate, command)

    plan = f"-m tools.gpu_report --plan {gpu} --device={device} --gpus={count} --work=."
    years = "--train_years=1979-1982 --valid_years=1983 --test_years=1984 --days=5"
    bench = f"--rounds=1 --config=short --device={device} {small}"
    checked = sorted(str(f) for f in (ROOT / "tests").glob("test_*.py") if "mark.gpu" in f.read_text())
    return [
        Part("plans", 20, plan, lacks="" if gpu else "config/hardware.yaml has no such GPU: choose one with --gpu"),
        sample("era5", 30, "360 720", years),
        Part("device", 20, f"-m tools.gpu_on_device --device={device} --json=device.json",
             lambda work: read_json(work / "device.json"), ranks=count),
        run("short/compiled", 60, f"--num_iters=60 {short}"),
        run("short/embed_1024", 70, f"--num_iters=40 {short}" + " --embed_dim=1024" * (not cpu)),
        sample("quick", 5, "32 64", "--train_years=1979-1980 --days=20"),
        run("quick/graphs", 15, f"{few} {graphs}", lacks=no_gpu),
        run(
            "quick/resumed", 30, f"--num_iters={100 if cpu else 2000} --checkpoint_every={20 if cpu else 200} {graphs} "
            "--activation_checkpointing=selective", stop_at="Saved checkpoint",
        ),
        Part("forecast", 12, "forecast.py --run_folder=logs/quick/resumed --starts=2 --lead_hours=24"),
        pair("quick/ddp", ""),
        pair("quick/ddp_graphs", graphs, lacks=no_gpu),
        pair("quick/fsdp", "--data_parallel=fsdp"),
        pair("mp_quick/tp", "--tensor_parallel=2", "train_mp.py"),
        pair("mp_quick/cp", "--context_parallel=2 --cp_method=ring", "train_mp.py"),
        pair("mp_quick/pp", "--pipeline_parallel=2 --gradient_accumulation=2", "train_mp.py"),
        pair("shard_quick/domain", "--domain_parallel=2", "train_shard.py"),
        Part(
            "tests", 80, f"-m pytest -m gpu -p no:cacheprovider {' '.join(checked)}", lacks=no_gpu, folder=str(ROOT)
        ),
        Part(
            "ladder", 200, f"benchmark.py ladder --json=ladder.json --steps={1 if cpu else 4} --workers={workers} "
            f"{bench}", ladder,
        ),
        run("quick/profiled", 15, f"{few} --profile=torch"),
        Part("preflight", 12, "-m tools.preflight --train_data_path=data/quick/train", ranks=count),
        Part("loaders", 30, f"benchmark.py data --json=loaders.json --workers {workers} --batches=4 {bench}"),
    ]  # fmt: skip


def trained(work: Path, name: str) -> dict[str, Any]:
    """Speed, memory and loss of a training run; MFU of the products in bfloat16 that were measured before."""
    folder = work / "logs" / name
    config, summary = name.split("/")[0], read_json(folder / "summary.json")
    settings = check_config(read_named_config(folder / "config.yaml", config), config, str(folder))
    resumed = re.findall(r"Resuming at iteration (\d+)", (folder / "out.log").read_text())
    if "resumed" in name and not resumed:
        raise RuntimeError("the second start did not resume")
    flops = summary["samples_per_sec"] * training_flops(settings) / summary["world_size"]
    device = work / "device.json"
    peak = read_json(device)["bf16 TFLOP/s"] * 1e12 if settings.amp_mode == "bf16" and device.exists() else None
    return ({"resumed at": int(resumed[-1])} if resumed else {}) | {
        "samples/s": summary["samples_per_sec"], "data wait": summary["data_wait_fraction"], "TFLOP/s": flops / 1e12,
        "MFU": peak and flops / peak, "peak GiB": summary["peak_memory_bytes"] / GIB, "loss": summary["train_loss"],
    }  # fmt: skip


def ladder(work: Path) -> dict[str, Any]:
    """The fastest step beside float32, with or without reading ahead, and the steps that failed."""
    report = read_json(work / "ladder.json")
    best = max(report["steps"], key=lambda step: step["samples_per_sec"])
    plain = [step["samples_per_sec"] for step in report["steps"] if step["step"].endswith(" workers")]
    return {
        "fastest": best["step"], "samples/s": best["samples_per_sec"], "MFU": best["mfu"],
        "data wait": best["data_wait"], "x fp32": best["samples_per_sec"] / max(plain) if plain else None,
    } | ({"failed": ", ".join(report["failed"])} if report["failed"] else {})  # fmt: skip


def run_parts(parts: Sequence[Part], work: Path, seconds: float) -> Iterator[dict[str, Any]]:
    """Run parts in their order, and yield what became of each, as JSON has it. Output goes to NAME.log.

    status: passed, failed, out of time, skipped, or not run, where all seconds were over. said: the last line of the
    output, or why it did not pass.
    """
    end = time.monotonic() + seconds
    for part in parts:
        began, status, why, figures = time.monotonic(), "passed", "", {}
        log = work / f"{part.name.replace('/', '-')}.log"
        limit = min(began + part.limit, end)
        if part.lacks or began > end:
            status, why = ("skipped", part.lacks) if part.lacks else ("not run", f"the {seconds:g} s are over")
        else:
            try:
                if part.stop_at:
                    run(part, work, log, limit, STOPPED_STATUS, part.stop_at)
                why = run(part, work, log, limit)
            except TimeoutError:
                status, why = "out of time", f"not done after {time.monotonic() - began:.0f} s"
            except Exception as error:  # whatever it is, the other parts follow
                status, why = "failed", first_line(error)
            try:
                figures = part.figures(work)
            except Exception as error:  # of a part that did not end well they may be missing
                if status == "passed":
                    status, why = "failed", f"{type(error).__name__}: {first_line(error)}"
        took = round(time.monotonic() - began, 1)
        yield {
            "part": part.name, "status": status, "seconds": took, "estimate": part.estimate, "said": why,
            "figures": figures,
        }  # fmt: skip


def run(part: Part, work: Path, log: Path, end: float, status: int = 0, stop_at: str = "") -> str:
    """Run the command of a part, and end whatever it leaves; returns the last line of its output.

    status: its exit status if all is well. stop_at: what it says when it is to be stopped. Raises RuntimeError where it
    fails, TimeoutError at the time `end`.
    """
    mark, start, process = str(uuid.uuid4()), log.stat().st_size if log.exists() else 0, None
    env = os.environ | {MARK: mark, "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def said() -> str:
        return log.read_bytes()[start:].decode(errors="replace").strip()

    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *part.words()], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=env, cwd=work / part.folder, start_new_session=True,
            )  # fmt: skip
        while process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError
            if stop_at and stop_at in said():
                process.terminate()
                stop_at = ""
            time.sleep(POLL_SECONDS)
    finally:
        end_processes(mark)  # one that a signal met in Popen is not in `process`
        if process:
            process.wait()
    lines = said().splitlines() or ["no output"]
    if process.returncode != status:
        telling = [line for line in lines if TELLING.search(line)] or lines
        raise RuntimeError(f"exit status {process.returncode}, not {status}: {telling[-1].strip()}")
    return lines[-1].strip()


def end_processes(mark: str) -> None:
    """Kill all processes with this mark in their environment, whoever is their parent by now (on Linux)."""
    given_up, running = time.monotonic() + KILL_SECONDS, True
    while running and time.monotonic() < given_up:
        running = False
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended meanwhile, or is another user's
                if f"{MARK}={mark}".encode() in file.read_bytes().split(b"\0"):
                    os.kill(int(file.parent.name), signal.SIGKILL)
                    running = True
        time.sleep(POLL_SECONDS * running)


def make_plans(names: Sequence[str], device: str, count: int, work: Path | None) -> int:
    """Print what is planned of the training runs on so many of these GPUs; kept in a folder of work."""
    rows, status = [], 0
    for gpu in map(load_gpu, names):
        for part in parts(device, count, gpu.name):
            script, *words = part.command.split()
            if script not in SCRIPTS or part.lacks:
                continue
            try:
                request = Request(words, gpu)
                plan = planned_figures(request.plan(part.ranks or 1))
                if work:
                    write_json(work / f"plans/{part.name}.json", plan)
                rows.append(beside_plan(part.name, plan, {}))
            except Exception as error:  # of one run: the others have theirs
                print(f"{part.name}: not planned: {type(error).__name__}: {first_line(error)}")
                status = FAILED_STATUS
    print(f"{plan_table(rows)}\n\n{len(rows)} plans")
    return status


def beside_plan(name: str, plan: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """A planned range, the measured value, and `hit`: whether the value lies within the range.

    With --enable_jit the memory is planned as that of eager mode, an upper bound (docs/plan.md).
    """
    errors = {"GiB": MEMORY_ERROR, "ms a step": plan["step_time_error"], "collectives": 0}
    row: dict[str, Any] = {"run": name, "on": f"{plan['layout']['gpus']} x {plan['gpu']}"}
    for title, (key, unit) in PLANNED.items():
        planned, value = plan[key] / unit, figures.get(key)
        least, most = planned * (1 - errors[title]), planned * (1 + errors[title])
        if title == "GiB" and plan["settings"]["enable_jit"]:
            least = 0.0
        comparison = {"planned": planned, "least": least, "most": most, "measured": None, "hit": None}
        if value is not None:
            comparison |= {"measured": value / unit, "hit": least <= value / unit <= most}
        row[title] = comparison
    return row


def plan_table(rows: Sequence[dict[str, Any]]) -> str:
    """Lines of a table of beside_plan."""
    lines = []
    for row in rows:
        line = [row["run"], row["on"]]
        for title in PLANNED:
            cell = row[title]
            band = f" ({cell['least']:.3g} to {cell['most']:.3g})" if cell["least"] < cell["most"] else ""
            verdict = {True: " hit", False: " MISS", None: ""}[cell["hit"]]
            line += [f"{cell['planned']:.4g}{band}", shown(cell["measured"]) + verdict]
        lines.append(line)
    titles = [title for name in PLANNED for title in (f"{name}, planned", f"{name}, measured")]
    return tables.format_table(dict.fromkeys(["run", "on", *titles], ""), lines)


def write_report(path: Path, machine: dict[str, Any], results: Sequence[dict[str, Any]], work: Path) -> str:
    """Write PATH.json and PATH.md, each whole or not at all; returns the text. results: of run_parts."""
    figures_of_part, goals, plans = {result["part"]: result["figures"] for result in results}, [], []
    for goal, wanted, figure, names in GOALS:
        values = [value for name in names if (value := figures_of_part.get(name, {}).get(figure)) is not None]
        met = "not measured" if not values else "yes" if max(values) >= wanted else "no"
        goals.append({"goal": goal, "wanted": wanted, "measured": max(values, default=None), "met": met})
    for part in parts("cuda", 2, ""):
        if (file := work / f"plans/{part.name}.json").exists():
            taken: dict[str, Any] = {}
            with suppress(UsageError):  # not run yet, or it has no reading
                taken = measured(work / "logs" / part.name)
            plans.append(beside_plan(part.name, read_json(file), taken))
    write_json(f"{path}.json", {"machine": machine, "goals": goals, "plans": plans, "parts": results})

    rows = []
    for result in results:
        figures = ", ".join(f"{name} {shown(value)}" for name, value in result["figures"].items())
        passed = figures and result["status"] == "passed"
        what = "; ".join(filter(None, ["" if passed else result["said"].replace("|", "/"), figures]))
        rows.append((result["part"], result["status"], result["seconds"], result["estimate"], what))
    sections = [
        f"# {machine['name']}",
        f"Made by `make gpu`: {', '.join(f'{what} {value}' for what, value in machine.items())}.",
        tables.format_table(dict.fromkeys(goals[0], ""), [[*map(shown, goal.values())] for goal in goals]),
        plan_table(plans),
        tables.format_table({"part": "", "status": "", "seconds": ".1f", "estimate": ".0f", "found": ""}, rows),
    ]
    text = "\n\n".join(sections) + "\n"
    with whole_file(Path(f"{path}.md")) as file:
        file.write_text(text)
    return text


def shown(value: Any) -> str:
    """A figure with four digits; anything else as it is."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the report that the words of a command line ask for; returns the exit status."""
    options = parse(argv)
    if options.plan:
        return make_plans(options.plan, options.device, options.gpus, options.work)
    device = select_device(options.device)
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    about = tables.machine(device) | {
        "devices": count, "driver": " ".join(driver() or ["unknown"]), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    work = (options.work or Path("logs/gpu_report", time.strftime("%Y%m%d-%H%M%S"))).absolute()
    path = options.out / re.sub(r"\W+", "-", f"{about['name']} x{count}".lower())
    gpu = options.gpu or max((name for name in read_gpus() if is_gpu(name, about["name"])), key=len, default="")
    results: list[dict[str, Any]] = []
    with reported_as_usage_error(OSError, "--out, --work"):
        options.out.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True)  # a new one: data in it are deleted at the end
        write_report(path, about, results, work)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops the report ends its part first
    try:
        for result in run_parts(parts(device.type, count, gpu), work, SECONDS):
            results.append(result)
            text = write_report(path, about, results, work)
            took = f"{result['seconds']:6.1f} s ({result['estimate']:3.0f} estimated)"
            print(
                f"{result['status']:<12} {took}  {result['part']}  {result['said'] * (not result['figures'])}",
                flush=True,
            )
            if result["part"] == "plans":  # before anything is measured
                print(text.split("\n\n")[3], flush=True)
    finally:
        shutil.rmtree(work / "data", ignore_errors=True)
    print(f"{text}\n{path}.md; output of the parts: {work}")
    return 0 if {result["status"] for result in results} <= {"passed", "skipped"} else FAILED_STATUS


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options. Raises UsageError for options that cannot be used."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--out", type=Path, default="docs/results", metavar="FOLDER", help="of the report (%(default)s)")
    option("--work", type=Path, metavar="FOLDER", help="a new one, for runs and output (logs/gpu_report/TIME)")
    option("--gpu", metavar="NAME", help="GPU of config/hardware.yaml to plan for (that of the device's name)")
    option("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal (%(default)s)")
    option("--plan", nargs="+", metavar="NAME", help="only print the plans for these GPUs; with --work also keep them")
    option("--gpus", type=int, default=2, help="with --plan: 1 leaves out the runs on two (%(default)s)")
    options = parser.parse_args(argv)
    for name in [options.gpu] * bool(options.gpu) + (options.plan or []):
        load_gpu(name)
    return options


if __name__ == "__main__":
    run_main(main)
