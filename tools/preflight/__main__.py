"""Check what a course or a long run rests on, before it starts: software, devices, ranks, network, file system.

    python -m tools.preflight                                   this machine; also: make preflight
    torchrun --nproc_per_node 2 -m tools.preflight              and whether two ranks reach one another
    sbatch -N 2 submit_preflight.sh                             the same over nodes (docs/launch.md)

Each line is ok, warn or FAIL: what, what was found, what to do. Nothing is trained, no speed is judged. Every wait has
an end, and a rank that does not come is named. Exit status: 0 nothing failed, 1 something did, 2 wrong options.
"""

import argparse
import json
import os
import sys
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
from tools.preflight.check_results import Finding, merge
from tools.preflight.rendezvous import Absent, RollCall, limited
from utils.errors import FAILED_STATUS, ArgumentParser, UsageError, first_line, run_main
from utils.launch import read_launch
from utils.rank_failure import exit_at_once

ROOT = Path(__file__).parents[2]
OTHER_PATHS = ("valid_data", "inf_data", "global_means", "global_stds", "time_means")  # sites/launch.sh gives them
Check = Callable[[argparse.Namespace, RollCall], Iterator[Finding]]


def packages(*_: Any) -> Iterator[Finding]:
    """Python and the packages against the pins of requirements.txt."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok" if sys.version_info >= (3, 11) else "FAIL", "python", version, "3.11 or newer is needed")
    agree = 0
    pins = [line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line]
    for name, pin in pins:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding("FAIL", "packages", f"{name} is missing", "make setup, or pip install -r requirements.txt")
            continue
        if found.split("+")[0] == pin:
            agree += 1
        else:
            advice = "make setup; another version may work, make test tells"
            yield Finding("warn", "packages", f"{name} {found}, requirements.txt says {pin}", advice)
    build = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA")
    yield Finding("ok", "packages", f"{agree} of {len(pins)} as in requirements.txt; {build}")


def devices(_options: argparse.Namespace, ranks: RollCall) -> Iterator[Finding]:
    """What torch.accelerator finds, beside what the driver and Slurm say is there."""
    driver = network.nvidia_driver()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            yield Finding("ok", "devices", "CUDA_VISIBLE_DEVICES is empty: training runs on the CPU")
        elif driver:
            found = f"none, although nvidia-smi shows driver {driver}; torch is built for CUDA {torch.version.cuda}"
            yield Finding("FAIL", "devices", found, "a torch for this driver, or a newer driver")
        elif os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
            yield Finding("warn", "devices", "none, although Slurm gave GPUs", "a torch and modules for these GPUs")
        else:
            yield Finding("ok", "devices", "no GPU: training runs on the CPU")
        return
    kind, count = accelerator.type, torch.accelerator.device_count()
    found = f"{count} x {kind}"
    if kind == "cuda":
        seen = range(count) if ranks.size == 1 else [ranks.launch.local_rank % count]  # others may be taken
        memory = [torch.cuda.mem_get_info(i) for i in seen]
        free, total = min(m[0] for m in memory) / 2**30, min(m[1] for m in memory) / 2**30
        found += f" {torch.cuda.get_device_name(0)}, {free:.0f} of {total:.0f} GiB free"
        found += f", CUDA {torch.version.cuda}, driver {driver}" if driver else f", torch {torch.__version__}"
        if free < 0.9 * total and ranks.size == 1:  # other ranks are on them as well
            yield Finding("warn", "devices", found, "another process holds memory: nvidia-smi shows it")
            return
    yield Finding("ok", "devices", found)


def environment(_options: argparse.Namespace, ranks: RollCall) -> Iterator[Finding]:
    """Variables that slow a run down or send it the wrong way."""
    launch, env = ranks.launch, os.environ
    yield Finding("ok", "launch", "one process" if ranks.size == 1 else f"{ranks.size} ranks on {launch.nodes} node(s)")
    if ranks.size == 1 and int(env.get("SLURM_NTASKS", "1").split("(")[0]) > 1 and "SLURM_STEP_ID" not in env:
        yield Finding("warn", "launch", f"one process in a job of {env['SLURM_NTASKS']} tasks", "start it with srun")
    cpus = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus
    threads, there = torch.get_num_threads(), min(launch.ranks_per_node, ranks.size)
    found = (
        f"OMP_NUM_THREADS {env.get('OMP_NUM_THREADS', 'unset')}: {threads} a rank, {mine} CPUs for it, {there} rank(s)"
    )
    too_many = threads > mine or threads * there > cpus
    advice = f"OMP_NUM_THREADS={max(1, min(mine, cpus // there))}" if threads > 1 else "fewer ranks on a node"
    yield Finding("warn" if too_many else "ok", "threads", f"{found} on the node", advice)
    for name, value in sorted(env.items()):
        if (name, value) in network.SLOW:
            yield Finding("warn", "variables", f"{name}={value}: {network.SLOW[name, value]}", f"unset {name}")
        elif name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            wrong = network.unknown_interfaces(value)
            advice = f"one of {' '.join(network.interfaces())}"
            yield Finding("FAIL" if wrong else "ok", "variables", f"{name}={value}", advice)
        elif name.startswith(("NCCL_", "TORCH_NCCL_")) or name == "CUDA_VISIBLE_DEVICES":
            yield Finding("ok", "variables", f"{name}={value}")


CHECKS: tuple[Check, ...] = (packages, devices, environment, *files.CHECKS, *network.CHECKS)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line, on every rank; returns the exit status."""
    options = parse(argv)
    launch = read_launch()
    ranks, findings = RollCall(launch, options.timeout), []

    def note(answers):
        for finding in merge(answers, ranks):
            findings.append(finding)
            if ranks.rank == 0:
                print(finding.line(), flush=True)

    try:
        if ranks.size > 1:
            ranks.connect()
            address = f"{launch.master_addr}:{launch.master_port}"
            found = f"{ranks.size} ranks met at {address}: {ranks.names(range(ranks.size))}"
            note([[Finding("ok", "rendezvous", found).as_dict()]] * ranks.size)
        for check in CHECKS:
            end = f"the end of {check.__name__.replace('_', ' ')}"
            note(ranks.exchange(end, attempt(check, options, ranks), 3 * options.timeout))
    except Absent as error:
        finding = Finding("FAIL", "rendezvous" if None in ranks.nodes else "ranks", str(error), error.advice)
        findings.append(finding)
        print(finding.line() if ranks.rank == 0 else f"rank {ranks.rank}: {finding.line()}", flush=True)
    status = FAILED_STATUS if any(f.level == "FAIL" for f in findings) else 0
    if ranks.rank == 0:
        count = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "FAIL")}
        print(f"\n{count['ok']} ok, {count['warn']} warn, {count['FAIL']} FAIL")
        if options.json:
            report = {"status": status, "nodes": ranks.nodes, "findings": [f.as_dict() for f in findings]}
            options.json.write_text(json.dumps(report, indent=2) + "\n")
    if ranks.size > 1:
        ranks.leave()
        exit_at_once(status)  # a thread may still wait for a rank that hangs
    return status


def attempt(check: Check, options: argparse.Namespace, ranks: RollCall) -> list[dict[str, Any]]:
    """The findings of a check as dicts, whatever happens in it."""
    name = check.__name__.replace("_", " ")
    findings: list[Finding] = []
    try:
        limited(2 * options.timeout, lambda: findings.extend(check(options, ranks)))
    except Exception as error:
        kind = "" if isinstance(error, Absent | TimeoutError) else f"{type(error).__name__}: "
        found = f"{kind}{first_line(error)}"
        findings = [*findings, Finding("FAIL", name, found, "the output of the ranks may say more")]
    return [finding.as_dict() for finding in findings]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises UsageError for those that cannot be used."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--expdir", default="logs", metavar="FOLDER", help="where runs are written (%(default)s)")
    option("--train_data_path", metavar="FOLDER", help="data that is read; any .h5 below it (data)")
    option("--timeout", type=float, default=30, metavar="S", help="seconds to wait for other ranks (%(default)s)")
    option("--json", type=Path, metavar="FILE", help="also write what was found here")
    for name in OTHER_PATHS:
        option(f"--{name}_path", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.timeout <= 0:
        raise UsageError("--timeout: more than 0 seconds")
    if options.json and not options.json.absolute().parent.is_dir():
        raise UsageError(f"--json {options.json}: no such folder")
    return options


if __name__ == "__main__":
    run_main(main)
