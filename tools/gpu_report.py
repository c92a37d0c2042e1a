"""A report of all that needs a GPU: training, forecast, tests, benchmarks, and plans beside what was measured.

    make gpu                                              on this machine's GPUs, in 10 minutes at most
    python -m tools.gpu_report --device cpu --gpu h100    a rehearsal at tiny sizes, without a GPU
    python -m tools.gpu_report --plan h100 a100-80gb      the plans of its training runs alone

The commands run one after another, what matters most first, each within a limit; whatever becomes of one, the others
follow. The report, NAME.json and NAME.md for GPUs of that name, is written anew after each. Exit status: 0 no command
failed (one that lacks something is skipped), 1 some did, 2 wrong options or no GPU.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tools.planner.compare import measured, planned_figures
from tools.planner.hardware import Gpu, load_gpu, read_gpus
from tools.planner.search import Request
from tools.tables import format_rows, machine
from training.flops import is_gpu, training_flops
from utils.config import ROOT, check_config, read_named_config
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

SECONDS, PLAN_SECONDS = 600, 20  # of all commands and plans at most; what the plans are expected to take
# (name, seconds where all is well, command). A training run is named after its folder.
COMMANDS = (
    ("data/era5", 30, "python -m weather.sample_data data/era5 {era5} --train_years=1979-1982 --valid_years=1983 "
     "--test_years=1984 --days=5"),
    ("device", 15, "python -c 'import torch; from tools.benchmarks.ladder import matmul_flops_per_sec as speed; "
     "print(speed(torch.device(\"{device}\"), torch.bfloat16))'"),
    ("short/compiled", 60, "python -m train --config=short --run_num=compiled {train} {fast} --num_iters=60"),
    ("short/embed_1024", 70, "python -m train --config=short --run_num=embed_1024 {train} {fast} {wide} "
     "--num_iters=40"),
    ("data/quick", 5, "python -m weather.sample_data data/quick {quick} --train_years=1979-1980 --days=20"),
    ("quick/graphs", 15, "python -m train --config=quick --run_num=graphs {train} {few} {graphs}"),
    ("quick/stopped", 15, "python -m train --config=quick --run_num=resumed {train} {long} {graphs}"),
    ("quick/resumed", 15, "python -m train --config=quick --run_num=resumed {train} {long} {graphs}"),
    ("forecast", 12, "python -m forecast --run_folder=logs/quick/resumed --starts=2 --lead_hours=24"),
    ("quick/ddp", 20, "{two} -m train --config=quick --run_num=ddp {train} {pair}"),
    ("quick/ddp_graphs", 20, "{two} -m train --config=quick --run_num=ddp_graphs {train} {pair} {graphs}"),
    ("quick/fsdp", 20, "{two} -m train --config=quick --run_num=fsdp {train} {pair} --data_parallel=fsdp"),
    ("mp_quick/tp", 20, "{two} -m train_mp {mp} --run_num=tp {train} {pair} --tensor_parallel=2"),
    ("mp_quick/cp", 20, "{two} -m train_mp {mp} --run_num=cp {train} {pair} --context_parallel=2 --cp_method=ring"),
    ("mp_quick/pp", 20, "{two} -m train_mp {mp} --run_num=pp {train} {pair} --pipeline_parallel=2 "
     "--gradient_accumulation=2"),
    ("shard_quick/domain", 20, "{two} -m train_shard --yaml_config=config/shard.yaml --config=shard_quick "
     "--run_num=domain {train} {pair} --domain_parallel=2"),
    ("tests", 80, "python -m pytest -m gpu -p no:cacheprovider {tests}"),
    ("ladder", 200, "python -m benchmark ladder --json=ladder.json --rounds=1 --config=short {steps} {workers} "
     "{sizes}"),
    ("quick/profiled", 15, "python -m train --config=quick --run_num=profiled {train} {few} --profile=torch"),
    ("preflight", 12, "torchrun --standalone --nproc_per_node={all} -m tools.preflight "
     "--train_data_path=data/quick/train"),
    ("loaders", 30, "python -m benchmark data --json=loaders.json --rounds=1 --config=short --batches=4 {workers} "
     "{sizes}"),
)  # fmt: skip
WORDS = {  # what stands in braces in a command; on a CPU sizes are tiny, and nothing is compiled, which takes minutes
    "cuda": {
        "sizes": "--device=cuda", "era5": "--img_size 360 720", "quick": "--img_size 32 64", "wide": "--embed_dim=1024",
        "fast": "--amp_mode=bf16 --enable_fused --enable_jit --limit_nsamples_val=16 --num_data_workers=8",
        "few": "--num_iters=300", "pair": "--num_iters=300 --local_batch_size=4",
        "graphs": "--amp_mode=fp16 --enable_fused --enable_cuda_graphs",
        "long": "--num_iters=2000 --checkpoint_every=200 --activation_checkpointing=selective",
        "steps": "--steps=4", "workers": "--workers=8",
    },
    "cpu": {
        "sizes": "--device=cpu --img_size 16 32 --patch_size=4 --embed_dim=32 --num_heads=4 --depth=2",
        "era5": "--img_size 16 32", "quick": "--img_size 16 32", "wide": "", "graphs": "",
        "few": "--num_iters=30", "pair": "--num_iters=30 --local_batch_size=4",
        "fast": "--amp_mode=bf16 --enable_fused --limit_nsamples_val=16 --num_data_workers=1",
        "long": "--num_iters=100 --checkpoint_every=20 --activation_checkpointing=selective",
        "steps": "--steps=1", "workers": "--workers=1",
    },
}  # fmt: skip
GPU_ONLY = ("quick/graphs", "quick/ddp_graphs", "tests")
STOPPED, RESUMED = "quick/stopped", "quick/resumed"
SAVED = "Saved checkpoint"  # what a training says when it can be stopped
GOALS = (  # what is wanted at least, of a figure, in the best of some parts
    ("MFU, embed 384, batch 16", 0.35, "MFU", ("short/compiled", "ladder")),
    ("MFU, embed 1024, batch 16", 0.5, "MFU", ("short/embed_1024",)),
    ("fastest step, times fp32", 7, "x fp32", ("ladder",)),
)
MEMORY_ERROR = 0.05  # of a plan: published runs are within 4 % (docs/plan.md)
GIB = 2**30
PLANNED = {"GiB": ("peak_allocated_bytes", GIB), "ms a step": ("step_time_s", 1e-3), "collectives": ("calls", 1)}
MARK = "GPU_REPORT_PART"  # in the environment of every process of a command
KILL_SECONDS = 10  # for killed processes to be gone: one that waits in a driver may never be
POLL_SECONDS = 0.1
TELLING = re.compile(r"(?i)(?<!ChildFailed)Error: |^FAIL ")  # lines that say why; the last word of torchrun does not

Command = tuple[float, str, str]  # seconds that it should take, the command, what this machine lacks for it


def commands(device: str, count: int) -> dict[str, Command]:
    """{name: Command} on so many GPUs, or on the CPU."""
    words = WORDS[device]
    marked = (str(file) for file in (ROOT / "tests").glob("test_*.py") if "mark.gpu" in file.read_text())
    words = words | {
        "device": device, "all": str(count), "two": "torchrun --standalone --nproc_per_node=2",
        "mp": "--yaml_config=config/mp.yaml --config=mp_quick", "tests": " ".join(sorted(marked)),
        "train": f"--warmup=5 --validate_every=1000 {words['sizes']}",
    }  # fmt: skip
    found: dict[str, Command] = {}
    for name, seconds, command in COMMANDS:
        lacks = "needs two GPUs" if count < 2 and "{two}" in command else ""
        if device == "cpu" and name in GPU_ONLY:
            lacks = "needs a GPU"
        found[name] = seconds, command.format(**words), lacks
    return found


def training(command: str) -> tuple[list[str], int] | None:
    """(options, ranks) of a command that trains; None for any other."""
    match = re.search(r"(?:nproc_per_node=(\d+) )?-m train\w* (.*)", command)
    return (match[2].split(), int(match[1] or 1)) if match else None


def run_command(name: str, command: str, work: Path, end: float) -> str:
    """Run a command in a folder until the time `end`, and end whatever it leaves; returns the last line of its output.

    Output goes to NAME.log. Raises RuntimeError where the command fails, TimeoutError at the end.
    """
    log, mark, process = work / f"{name.replace('/', '-')}.log", str(uuid.uuid4()), None
    words, stops = shlex.split(command), name == STOPPED
    start = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    env = os.environ | {MARK: mark, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths)}
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                start + words[1:], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env,
                cwd=ROOT if name == "tests" else work, start_new_session=True,
            )  # fmt: skip
        while process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError
            if stops and SAVED in log.read_text(errors="replace"):
                process.terminate()
                stops = False
            time.sleep(POLL_SECONDS)
    finally:
        end_processes(mark)  # one that a signal met in Popen is not in `process`
        if process:
            process.wait()
    lines, status = log.read_text(errors="replace").strip().splitlines() or ["no output"], process.returncode
    expected = STOPPED_STATUS if name == STOPPED else 0
    if status != expected:
        telling = [line for line in lines if TELLING.search(line)] or lines
        raise RuntimeError(f"exit status {status}, not {expected}: {telling[-1].strip()}")
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


def read_figures(name: str, work: Path, said: str, peak: float | None) -> dict[str, Any]:
    """The figures that a command has left. said: the last line of its output. peak: measured FLOP/s in bfloat16."""
    if name == "device":
        return {"bf16 TFLOP/s": float(said) / 1e12}
    if name == "ladder":
        report = read_json(work / "ladder.json")
        best = max(report["steps"], key=lambda step: step["samples_per_sec"])
        plain = [step["samples_per_sec"] for step in report["steps"] if step["step"].endswith(" workers")]
        gain = best["samples_per_sec"] / max(plain) if plain else None
        figures = {"fastest": best["step"], "samples/s": best["samples_per_sec"], "MFU": best["mfu"], "x fp32": gain}
        return figures | {"data wait": best["data_wait"], "failed": ", ".join(report["failed"]) or None}
    folder, config = work / "logs" / name, name.split("/")[0]
    if not (folder / "config.yaml").exists():  # nothing was trained
        return {}
    summary = read_json(folder / "summary.json")
    settings = check_config(read_named_config(folder / "config.yaml", config), config, str(folder))
    flops = summary["samples_per_sec"] * training_flops(settings) / summary["world_size"]
    figures = {
        "samples/s": summary["samples_per_sec"], "data wait": summary["data_wait_fraction"], "TFLOP/s": flops / 1e12,
        "MFU": flops / peak if peak and settings.amp_mode == "bf16" else None,
        "peak GiB": summary["peak_memory_bytes"] / GIB, "loss": summary["train_loss"],
    }  # fmt: skip
    if name == RESUMED:
        resumed = re.findall(r"Resuming at iteration (\d+)", (folder / "out.log").read_text())
        if not resumed:
            raise RuntimeError("the second start did not resume")
        figures["resumed at"] = int(resumed[-1])
    return figures


def run_all(todo: dict[str, Command], work: Path, end: float) -> Iterator[list[dict[str, Any]]]:
    """Run commands in their order until the time `end`; yields, after each, what became of those so far.

    status: passed, failed, out of time, skipped, or not run, where the time was over. said: the last line of the
    output, or why the command did not pass.
    """
    rows: list[dict[str, Any]] = []
    peak = None
    for name, (seconds, command, lacks) in todo.items():
        began, status, said, figures = time.monotonic(), "passed", "", {}
        if lacks or began > end:
            status, said = ("skipped", lacks) if lacks else ("not run", "the time is over")
        else:
            try:
                said = run_command(name, command, work, min(began + 2 * seconds + 30, end))
            except TimeoutError:
                status, said = "out of time", f"not done after {time.monotonic() - began:.0f} s"
            except Exception as error:  # whatever it is, the others follow
                status, said = "failed", first_line(error)
            try:
                figures = read_figures(name, work, said, peak)
            except Exception as error:  # of a command that did not end well they may be missing
                if status == "passed":
                    status, said = "failed", f"{type(error).__name__}: {first_line(error)}"
        if name == "device" and figures:
            peak = figures["bf16 TFLOP/s"] * 1e12
        took = round(time.monotonic() - began, 1)
        rows.append({
            "command": name, "status": status, "seconds": took, "estimate": seconds, "said": said, "figures": figures,
        })  # fmt: skip
        yield rows


def make_plans(todo: dict[str, Command], gpu: Gpu) -> dict[str, dict[str, Any]]:
    """{name: planned figures} of the commands that train; prints which could not be planned."""
    plans = {}
    for name, (_, command, lacks) in todo.items():
        if (trained := training(command)) and not lacks and name != STOPPED:
            try:
                plans[name] = planned_figures(Request(trained[0], gpu).plan(trained[1]))
            except Exception as error:  # of one run: the others have theirs
                print(f"{name}: not planned: {type(error).__name__}: {first_line(error)}", flush=True)
    return plans


def beside_plan(name: str, plan: dict[str, Any], figures: dict[str, Any]) -> dict[str, str]:
    """A row of planned values with their bands, beside measured ones: hits within the band, and misses.

    With --enable_jit the memory is planned as that of eager mode, an upper bound (docs/plan.md).
    """
    row = {"run": name, "on": f"{plan['layout']['gpus']} x {plan['gpu']}"}
    errors = {"GiB": MEMORY_ERROR, "ms a step": plan["step_time_error"], "collectives": 0}
    for title, (key, unit) in PLANNED.items():
        planned, value = plan[key] / unit, figures.get(key)
        least, most = planned * (1 - errors[title]), planned * (1 + errors[title])
        if title == "GiB" and plan["settings"]["enable_jit"]:
            least = 0.0
        row[f"{title}, planned"] = f"{planned:.4g}" + (f" ({least:.3g} to {most:.3g})" if least < most else "")
        row[f"{title}, measured"] = "-"
        if value is not None:
            verdict = "hit" if least <= value / unit <= most else "MISS"
            row[f"{title}, measured"] = f"{value / unit:.4g} {verdict}"
    return row


def goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals beside what was measured. rows: of run_all."""
    figures, found = {row["command"]: row["figures"] for row in rows}, []
    for goal, wanted, figure, names in GOALS:
        values = [value for name in names if (value := figures.get(name, {}).get(figure)) is not None]
        met = "not measured" if not values else "yes" if max(values) >= wanted else "no"
        found.append({"goal": goal, "wanted": wanted, "measured": max(values, default=None), "met": met})
    return found


def write_report(
    path: Path, about: dict[str, Any], plans: dict[str, Any], rows: Sequence[dict[str, Any]], work: Path
) -> str:
    """Write PATH.json and PATH.md, each whole or not at all; returns the text. rows: of run_all."""
    planned = []
    for name, plan in plans.items():
        figures: dict[str, Any] = {}
        with suppress(UsageError):  # not run yet, or it has no reading
            figures = measured(work / "logs" / name)
        planned.append(beside_plan(name, plan, figures))
    report = {"goals": goals(rows), "plans": planned, "commands": rows}
    write_json(f"{path}.json", {"machine": about} | report)
    made = f"Made by `make gpu`: {', '.join(f'{what} {value}' for what, value in about.items())}."
    text = "\n\n".join([f"# {about['name']}", made, *map(format_rows, report.values())]) + "\n"
    with whole_file(Path(f"{path}.md")) as file:
        file.write_text(text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Make the report that the words of a command line ask for; returns the exit status."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--out", type=Path, default="docs/results", metavar="FOLDER", help="of the report (%(default)s)")
    option("--gpu", metavar="NAME", help="GPU of config/hardware.yaml to plan for (that of the device's name)")
    option("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal (%(default)s)")
    option("--plan", nargs="+", metavar="NAME", help="only print the plans for these GPUs")
    options = parser.parse_args(argv)
    if options.plan:
        todo, rows = commands(options.device, 2), []
        for gpu in map(load_gpu, options.plan):
            rows += [beside_plan(name, plan, {}) for name, plan in make_plans(todo, gpu).items()]
        print(format_rows(rows))
        return 0

    end, device = time.monotonic() + SECONDS, select_device(options.device)
    count = 1 if device.type == "cpu" else torch.accelerator.device_count()
    about = machine(device) | {
        "devices": count, "driver": " ".join(driver() or ["unknown"]), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    work = Path("logs/gpu_report", time.strftime("%Y%m%d-%H%M%S")).absolute()  # for runs and output
    path = options.out / re.sub(r"\W+", "-", f"{about['name']} x{count}".lower())
    name = options.gpu or max((gpu for gpu in read_gpus() if is_gpu(gpu, about["name"])), key=len, default="")
    with reported_as_usage_error(OSError, "--out"):
        options.out.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True)  # a new one: data in it are deleted at the end
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops the report ends its command first
    todo = commands(device.type, count)
    plans = make_plans(todo, load_gpu(name)) if name else {}
    print(write_report(path, about, plans, [], work), flush=True)  # before anything is measured
    try:
        for rows in run_all(todo, work, end):
            text, last = write_report(path, about, plans, rows, work), rows[-1]
            took = f"{last['seconds']:6.1f} s ({last['estimate']:3.0f} estimated)"
            print(f"{last['status']:<12} {took}  {last['command']}  {last['said']}", flush=True)
    finally:
        shutil.rmtree(work / "data", ignore_errors=True)
    print(f"{text}\n{path}.md; output of the commands: {work}")
    return 0 if {row["status"] for row in rows} <= {"passed", "skipped"} else FAILED_STATUS


if __name__ == "__main__":
    run_main(main)
