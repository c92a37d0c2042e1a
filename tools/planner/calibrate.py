"""Measure the machine that this runs on: `plan.py --calibrate`, alone or as every rank of torchrun or srun."""

import math
import os
import re
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tools.instruments import collective_speed, operation_speed
from tools.instruments.clock import timed
from tools.instruments.rank_case import RankCase, build_case, take_case
from tools.instruments.ranks import Process
from tools.planner.hardware import HARDWARE, MEASURED, Collective, Speeds, gpu_of, read_gpus
from tools.planner.step_time import StepTime, calls_around_model, step_time
from tools.planner.trace import Trace, observe_step
from tools.tables import machine
from training.run.telemetry import PHASES as STEP_PHASES
from training.run.telemetry import PhaseTimes
from training.step.spans import listening
from utils import comm, connection
from utils.device import device_module, peak_memory_bytes
from utils.errors import ArgumentParser, UsageError
from utils.files import write_json
from utils.launch import read_launch
from utils.yaml_files import read_mappings

DTYPES = torch.float32, torch.bfloat16, torch.float16
MESSAGES = tuple(2**power for power in (6, 12, 16, 18, 20, 22, 24))  # bytes of a tensor
STEPS = 12
ROUNDS, MOST_SECONDS = 3, 45  # of measurements; no round begins later
PRODUCTS = 0.03  # seconds of matrix products between two messages
# Of a tiny model, whose steps show what is around their operations.
TINY = ["--embed_dim=16", "--num_heads=2", "--img_size", "8", "16", "--patch_size=4", "--depth=4", "--no-enable_fused"]
STEPS_OF_HOST = "tools/planner/calibrate.yaml"
Figures = dict[str, Any]  # nested dicts with seconds at their ends


def usual(rounds: Sequence[Figures]) -> Figures:
    """Element-wise median of repeated measurements, in seconds."""
    found = {}
    for name, value in rounds[0].items():
        values = [one[name] for one in rounds]
        if isinstance(value, dict):
            found[name] = usual(values)
        else:
            found[name] = np.median(values, axis=0).tolist()
    return found


def measure_machine(
    rank: Process,
    nodes: Sequence[Sequence[int]],
) -> tuple[Figures, dict[str, Any]]:
    """On every rank: (seconds of operations, collectives and tiny steps; {name of a tiny step: its Case and Trace}).

    nodes: the ranks of each. On a CPU operations are measured by one rank of each node alone, then by all at once.
    """
    device = rank.device
    size = len(nodes[0])
    ranks = comm.world_size()
    figures: Figures = {
        "operations": {},
        "phases": {},
        "points": {},
        "steps": {},
    }
    tiny = _tiny_steps(rank, ranks)

    # Operations: ranks of a CPU share its memory, so fewer of them are faster.
    numbers_at_work = sorted({1, size}) if device.type == "cpu" else [size]
    for busy in numbers_at_work:
        if ranks > 1:
            # A rank that began early would measure a machine that is still idle.
            dist.barrier()
        # The first ranks of each node work, and the others wait at the next barrier.
        if comm.rank() % size < busy:
            figures["operations"][busy] = operation_speed.measure_operations(device, DTYPES)
            figures["phases"][busy] = _seconds_of_phases(tiny["alone"])

    # Collectives.
    if ranks > 1:
        for where, groups in collective_speed.places(nodes).items():
            points = collective_speed.all_points(groups, device, MESSAGES)
            largest = max(map(len, groups))
            figures["points"][where, largest] = points
        figures["overlap"] = _side_by_side(device)

    # Steps whose time is what the host does around operations.
    traces = {}
    for name, case in tiny.items():
        figures["steps"][name] = _seconds_of_phases(case)
        trace = observe_step(case.step, case.x, case.y)
        traces[name] = case.case, trace
    return figures, traces


def _tiny_steps(rank: Process, ranks: int) -> dict[str, RankCase]:
    """{name: its RankCase} of calibrate.yaml beside this file: steps of a tiny model, each with another wrapper."""
    tiny = {}
    for name, own in read_mappings(STEPS_OF_HOST, "steps").items():
        options = own["options"]
        splits_ranks = "--noddp" not in options
        # A wrapper has work only on several ranks, and some wrappers split the ranks in two.
        if splits_ranks and ranks % 2:
            continue
        words = [
            *options.split(),
            *TINY,
            f"--device={rank.device.type}",
            f"--global_batch_size={4 * ranks}",
        ]
        case = build_case(name, own["script"], words, ranks)
        tiny[name] = take_case(rank, case)
    return tiny


def _seconds_of_phases(tiny: RankCase) -> Figures:
    """{phase: seconds} of a step on the host, the median of some. What is in no phase counts as backward."""
    found = []
    # The time of the host is wanted, whatever the device is.
    times = PhaseTimes(torch.device("cpu"))
    tiny.take_turn()
    for _ in range(STEPS):
        with listening(times):
            whole, _ = timed(tiny.device, tiny.train, 1)
        seconds = np.nan_to_num(times.read(1)).tolist()
        own = dict(zip(STEP_PHASES, seconds, strict=True))
        forward, update = own["forward"], own["optimizer"]
        phases = {
            "forward": forward,
            "backward": whole - forward - update,
            "update": update,
        }
        found.append(phases)
    return usual(found)


def _side_by_side(device):
    """Measure how ranks slow one another down: {what: seconds} of an all-reduce, of products, and of both at once.

    slowest: how many times as long as the mean rank the slowest one takes for the products.
    """
    x = torch.zeros(2**20, device=device)  # 4 MiB of float32
    a = torch.rand(512, 512, device=device)

    def work(reduces, products):
        works = [dist.all_reduce(x, async_op=True) for _ in range(reduces)]
        for _ in range(products):
            torch.mm(a, a)
        for work in works:
            work.wait()

    def seconds(reduces, products):
        dist.barrier()
        return timed(device, work, reduces, products)[0]

    seconds(1, 1)  # warms up
    of_a_product = comm.gather(seconds(0, 8) / 8)
    # Every rank makes the same number of products, so that the slowest one shows.
    products = math.ceil(PRODUCTS / max(*of_a_product, 1e-6))
    found = []
    for _ in range(STEPS):
        one = {
            "reduce": seconds(1, 0),
            "compute": seconds(0, products),
            "both": seconds(1, products),
        }
        times = comm.gather(one["compute"])
        found.append(one | {"slowest": max(times) / fmean(times)})
    return usual(found)


def entry(
    figures: Figures,
    traces: dict[str, Any],
    device: torch.device,
    ranks: int,
) -> dict[str, Any]:
    """The entry that is written: the machine as tools.planner.hardware.Measured has it. ranks: of a node."""
    about = machine(device)
    compute = {}
    for busy in figures["operations"]:
        compute[busy] = _speeds(figures, busy, traces["alone"][1], device)

    collectives: dict[str, dict[str, Any]] = {}
    for (where, size), kinds in figures["points"].items():
        collectives[where] = {}
        for kind, points in kinds.items():
            latency, bandwidth = collective_speed.fit(points)
            collectives[where][kind] = vars(Collective(latency, bandwidth, size))

    # One rank alone has nothing to overlap with.
    alone = {"reduce": 1, "compute": 0, "both": 0, "slowest": 1}
    seconds = figures.get("overlap", alone)
    # Whatever both take longer than computing alone is the part of the all-reduce that was not hidden.
    overlap = 1 - (seconds["both"] - seconds["compute"]) / seconds["reduce"]
    found: dict[str, Any] = {
        "device": device.type,
        "processor": about["name"],
        "cores": os.cpu_count(),
        "torch_version": about["torch"],
        "threads": about["threads"],
        "ranks": ranks,
        "compute": compute,
        "collectives": collectives,
        "overlap": min(1.0, max(0.0, overlap)),
        "around": {},
        "slowest": max(1.0, seconds["slowest"]),
    }
    # Around a model: what a step takes beyond its plan, which knows what was found around the steps before.
    for name, phases in figures["steps"].items():
        case, trace = traces[name]
        gpu = gpu_of("here", {"measured": found})
        planned = step_time([trace], case.config, case.layout, gpu)
        calls = calls_around_model(trace, planned.collectives, case.config)[name]
        if calls:
            found["around"][name] = _seconds_around(phases, planned, calls)
    return {"measured": found}


def _speeds(
    figures: Figures,
    busy: int,
    trace: Trace,
    device: torch.device,
) -> dict[str, Any]:
    """The Speeds of so many ranks at work, as a dict. trace: of the step whose phases were measured."""
    speeds = Speeds(figures["operations"][busy], {})
    for phase, whole in figures["phases"][busy].items():
        own = {}
        for operation, calls in trace.operations.items():
            if operation.phase == phase:
                own[operation] = calls
        inside = 0.0
        # A device computes meanwhile, and waits for the host: the model is tiny.
        if device.type == "cpu":
            # Heads of the tiny model have 16 / 2 = 8 features.
            inside = sum(calls * speeds.seconds(operation, "float32", 8) for operation, calls in own.items())
        of_host = max(0.0, whole - inside)
        speeds.host[phase] = of_host / max(1, sum(own.values()))
    return vars(speeds)


def _seconds_around(phases: Figures, planned: StepTime, calls: int) -> dict[str, float]:
    """{phase: seconds of the host for each call} by which a step takes longer than planned.

    Phases that are faster than planned make up for others: together they have what the whole step takes longer.
    """
    late = {}
    for phase, seconds in phases.items():
        late[phase] = max(0.0, seconds - planned.phases[phase])
    # The whole step is late by less than its late phases, if others are early.
    whole = max(0.0, sum(phases.values()) - planned.seconds)
    share = whole / max(1e-9, sum(late.values()))  # 0 to 1
    return {phase: seconds * share / calls for phase, seconds in late.items()}


def memory_sizes(device: torch.device, ranks: int) -> dict[str, float]:
    """{key of a Gpu: its value} of the memory of a rank, at the start of a process. ranks: of a node."""
    gpu = device_module(device, "mem_get_info", "memory_reserved")
    if gpu:
        free, total = gpu.mem_get_info()
        # Memory that is neither free nor the allocator's is that of the context.
        used = total - free - gpu.memory_reserved()
    else:
        of_the_node = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        # Ranks on CPUs share the memory of their node.
        total = of_the_node / ranks
        used = peak_memory_bytes(device)
    return {
        "memory_gib": total / 2**30,
        "overhead_gib": used / 2**30,
        "workspace_mib": workspace_mib(device),
    }


def workspace_mib(device: torch.device) -> float:
    """MiB that cuBLAS takes: torch's CUBLAS_WORKSPACE_CONFIG is :4096:8 from Hopper on, else :4096:2:16:8."""
    if device.type != "cuda":
        return 0.0
    is_new = torch.version.hip or torch.cuda.get_device_capability(device) >= (9, 0)
    return 32.0 if is_new else 8.125


def main(words: Sequence[str]) -> int:
    """Measure this machine and write its entry; returns the exit status. words: options of the command."""
    parser = ArgumentParser(prog="plan.py --calibrate", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (%(default)s)")
    parser.add_argument("--name", metavar="NAME", help="of the entry (device and ranks of a node: cuda-4)")
    options = parser.parse_args(words)
    if options.name:
        is_taken = options.name in read_gpus()
        is_a_file_name = re.fullmatch(r"\w[\w.-]{0,60}", options.name)
        if is_taken or not is_a_file_name:
            raise UsageError(f"--name {options.name}: letters, digits, - _ and . , and no name of {HARDWARE.name}")

    launch = read_launch()
    began = time.monotonic()
    device = connection.connect(options.device)
    world = launch.world_size
    ranks = min(launch.ranks_per_node, world)  # of a node
    name = options.name or f"{device.type}-{ranks}"
    memory = memory_sizes(device, ranks)  # before anything else takes some
    rank = Process(device=device)
    nodes = []
    for first in range(0, world, ranks):
        nodes.append(range(first, min(first + ranks, world)))

    figures: list[Figures] = []
    for _ in range(ROUNDS):
        # All ranks must agree on another round, so the longest time decides.
        if figures:
            elapsed = comm.gather(time.monotonic() - began)
            if max(elapsed) > MOST_SECONDS:
                break
        own, traces = measure_machine(rank, nodes)
        figures.append(own)
    if comm.is_main():
        path = MEASURED / f"{name}.json"
        write_json(path, entry(usual(figures), traces, device, ranks) | memory)
        print(f"{path}, measured in {time.monotonic() - began:.0f} s: plan.py ... --gpu {name}")
    return 0
