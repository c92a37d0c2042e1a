"""Check what a course or a long run depends on, before it starts: software, devices, ranks, network, file system.

    python -m tools.preflight                                   this machine; also: make preflight
    torchrun --nproc_per_node 2 -m tools.preflight              and whether two ranks reach one another
    sbatch -N 2 submit_preflight.sh                             the same over nodes (docs/launch.md)

Each line starts with ok, warn or FAIL and says what was checked, what was found, and what to do. Nothing is trained,
and no speed is judged. Every wait has a time limit, and a missing rank is named. Exit status: 0 nothing failed,
1 a check failed, 2 wrong options.
"""

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError as error:
    sys.exit(f"FAIL  torch: {error} - make setup, or take the python of the environment that has it")

from tools.preflight import file_system as files
from tools.preflight import network
from tools.preflight.rendezvous import Absent, CheckResult, Rendezvous, limited, merge
from utils.comm import run_ranks
from utils.device import VISIBLE, built_for, driver, library, promised_gpus, select_device
from utils.errors import FAILED_STATUS, ArgumentParser, UsageError, first_line, real
from utils.launch import interface_addresses, read_launch
from utils.rank_failure import exit_at_once

ROOT = Path(__file__).parents[2]
OTHER_PATHS = ("valid_data", "inf_data", "global_means", "global_stds", "time_means")  # sites/launch.sh gives them
Check = Callable[[argparse.Namespace, Rendezvous], Iterator[CheckResult]]


def packages(*_: Any) -> Iterator[CheckResult]:
    """Check that Python and the packages have the versions that requirements.txt pins."""
    level = "ok" if sys.version_info >= (3, 11) else "FAIL"
    yield CheckResult(level, "python", platform.python_version(), "3.11 or newer is needed")
    agree = 0
    pins = [line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line]
    for name, pin in pins:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            advice = "make setup, or pip install -r requirements.txt"
            yield CheckResult("FAIL", "packages", f"{name} is missing", advice)
            continue
        if installed.split("+")[0] == pin:
            agree += 1
        else:
            advice = "make setup; another version may work, make test tells"
            yield CheckResult("warn", "packages", f"{name} {installed}, requirements.txt says {pin}", advice)
    build = f"torch {torch.__version__}, built for {built_for()}"
    yield CheckResult("ok", "packages", f"{agree} of {len(pins)} as in requirements.txt; {build}")


def devices(options: argparse.Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """The devices that torch.accelerator finds, compared with what the driver and Slurm report."""
    if options.device != "auto":
        select_device(options.device, ranks.launch.local_rank)  # raises UsageError for one that is not there
    wanted = options.device != "cpu" and torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if wanted else None
    level, advice = "ok", ""
    if accelerator is not None:
        kind, count = accelerator.type, torch.accelerator.device_count()
        message = f"{count} x {kind}"
        if gpu := library(accelerator, "mem_get_info"):
            # Other ranks may fill the other devices of the node.
            seen = range(count) if ranks.size == 1 else [ranks.launch.local_rank % count]
            free, total = (min(gib) / 2**30 for gib in zip(*map(gpu.mem_get_info, seen), strict=True))
            message += f" {gpu.get_device_name(0)}, {free:.0f} of {total:.0f} GiB free"
            installed = driver()  # a container may hide it
            message += f", {built_for()}" + (f", driver {installed[1]}" if installed else "")
            if free < 0.9 * total and ranks.size == 1:
                level, advice = "warn", f"another process holds memory: {'amd' if torch.version.hip else 'nvidia'}-smi"
    elif options.device == "cpu":
        message = "--device cpu: training runs on the CPU"
    elif hidden := [name for name in VISIBLE if os.environ.get(name) == ""]:
        message = f"{hidden[0]} is empty: training runs on the CPU"
    elif there := promised_gpus():
        message = f"none, although {there}; torch is built for {built_for()}"
        level, advice = "FAIL", "a torch and modules for these GPUs and their driver, or a newer driver"
    else:
        message = "no GPU: training runs on the CPU"
    yield CheckResult(level, "devices", message, advice)


def environment(_options: argparse.Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """Find variables of the environment that slow a run down or name something that does not exist."""
    launch, env = ranks.launch, os.environ
    message = "one process" if ranks.size == 1 else f"{ranks.size} ranks on {launch.nodes} node(s)"
    yield CheckResult("ok", "launch", message)
    if ranks.size == 1 and int(env.get("SLURM_NTASKS", "1").split("(")[0]) > 1 and "SLURM_STEP_ID" not in env:
        message = f"one process in a job of {env['SLURM_NTASKS']} tasks"
        yield CheckResult("warn", "launch", message, "start it with srun")
    cpus = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus
    threads, there = torch.get_num_threads(), min(launch.ranks_per_node, ranks.size)
    message = f"OMP_NUM_THREADS {env.get('OMP_NUM_THREADS', 'unset')}: {threads} a rank, {mine} CPUs for it, "
    too_many = threads > mine or threads * there > cpus
    advice = f"OMP_NUM_THREADS={max(1, min(mine, cpus // there))}" if threads > 1 else "fewer ranks on a node"
    yield CheckResult("warn" if too_many else "ok", "threads", f"{message}{there} rank(s) on the node", advice)
    for name, value in sorted(env.items()):
        setting = f"{name}={value}"
        if (name, value) in network.SLOW:
            yield CheckResult("warn", "variables", f"{setting}: {network.SLOW[name, value]}", f"unset {name}")
        elif name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            level = "FAIL" if network.unknown_interfaces(value) else "ok"
            yield CheckResult(level, "variables", setting, f"one of {' '.join(interface_addresses())}")
        elif name.startswith(("NCCL_", "TORCH_NCCL_")) or name == "CUDA_VISIBLE_DEVICES":
            yield CheckResult("ok", "variables", setting)


CHECKS: tuple[Check, ...] = (packages, devices, environment, *files.CHECKS, *network.CHECKS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, on every rank; rank 0 prints the results. Returns the exit status."""
    options = parse(argv)
    ranks, results = Rendezvous(read_launch(), options.timeout), []
    for result in run_checks(options, ranks):
        results.append(result)
        if ranks.rank == 0:
            print(result.line(), flush=True)
    count = Counter(result.level for result in results)
    status = FAILED_STATUS if count["FAIL"] else 0
    if ranks.rank == 0:
        print(f"\n{count['ok']} ok, {count['warn']} warn, {count['FAIL']} FAIL")
        if options.json:
            report = {"status": status, "nodes": ranks.nodes, "results": [result._asdict() for result in results]}
            options.json.write_text(json.dumps(report, indent=2) + "\n")
    if ranks.size > 1:
        ranks.leave()
        exit_at_once(status)  # a thread may still wait for a rank that hangs
    return status


def run_checks(options: argparse.Namespace, ranks: Rendezvous) -> Iterator[CheckResult]:
    """Yield the results of all ranks, check by check. A missing rank is the last result: no check can follow."""
    try:
        if ranks.size > 1:
            ranks.connect()
            message = f"{ranks.size} ranks met at {ranks.address}: {ranks.names(range(ranks.size))}"
            yield CheckResult("ok", "rendezvous", message)
        for check in CHECKS:
            end = f"the end of {check.__name__.replace('_', ' ')}"
            yield from merge(ranks.exchange(end, attempt(check, options, ranks), 3 * options.timeout), ranks)
    except Absent as error:
        result = CheckResult("FAIL", "rendezvous" if None in ranks.nodes else "ranks", str(error), error.advice)
        if ranks.rank > 0:
            print(f"rank {ranks.rank}: {result.line()}", flush=True)  # rank 0 may be the missing one
        yield result


def attempt(check: Check, options: argparse.Namespace, ranks: Rendezvous) -> list[CheckResult]:
    """The results of a check on this rank. An exception or a timeout becomes a FAIL."""
    results: list[CheckResult] = []
    try:
        limited(2 * options.timeout, lambda: results.extend(check(options, ranks)))
    except Exception as error:
        kind = "" if isinstance(error, Absent | TimeoutError | UsageError) else f"{type(error).__name__}: "
        name, advice = check.__name__.replace("_", " "), "the output of the ranks may say more"
        results = [*results, CheckResult("FAIL", name, f"{kind}{first_line(error)}", advice)]
    return results


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the options. Raises UsageError for options that cannot be used."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--expdir", default="logs", metavar="FOLDER", help="where runs are written (%(default)s)")
    option("--train_data_path", metavar="FOLDER", help="folder of the data, searched for .h5 files (data)")
    option("--device", default="auto", metavar="NAME", help="as in training: cpu, cuda, ... (%(default)s)")
    option("--timeout", type=real(0.1, 1e6), default=30, metavar="S", help="seconds to wait for ranks (%(default)s)")
    option("--json", type=Path, metavar="FILE", help="also write the results to this file")
    for name in OTHER_PATHS:
        option(f"--{name}_path", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.json and not options.json.absolute().parent.is_dir():
        raise UsageError(f"--json {options.json}: no such folder")
    return options


if __name__ == "__main__":
    run_ranks(main)
