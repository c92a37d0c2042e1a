"""The checks of preflight. Each yields its results; one that raises an error, or takes too long, has failed."""

import datetime
import os
import platform
import shutil
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from tools.instruments import collective_speed
from tools.preflight.rendezvous import CheckResult, Rendezvous
from utils.device import backend_for, built_for, device_module, driver, physical_name, select_device
from utils.errors import first_line
from utils.files import whole_file
from utils.launch import interface_addresses, name_gloo_interface
from utils.rank_failure import wait_until
from utils.yaml_files import ROOT, read_mappings
from weather.sources.remote_store import is_address

CLOCKS_APART = 2.0  # seconds
SIZES = {"cpu": (2**12, 2**20, 2**23), "cuda": (2**12, 2**22, 2**26)}  # bytes of the messages that are timed
LEAST_FREE_GB = 10  # sample data and the checkpoints of two runs
DATA_FILES = "*.h5", "*.nc", "*.zarr/fields/**/[0-9]*"  # years, and the chunks of years
Results = Iterator[CheckResult]
SLOW = "tools/preflight/slow_variables.yaml"


def packages(_options: Namespace, _ranks: Rendezvous) -> Results:
    """Check that Python and the packages have the versions that requirements.txt pins."""
    level = "ok" if sys.version_info >= (3, 11) else "FAIL"
    yield CheckResult(level, "python", platform.python_version(), "3.11 or newer is needed")
    requirements = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [line.split("==") for line in requirements if "==" in line]  # [name, version]
    for name, pin in pins:
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield CheckResult(
                "FAIL", "packages", f"{name} is missing", "make setup, or pip install -r requirements.txt"
            )
            continue
        version = installed.split("+")[0]  # without the build, as +cu128
        if version != pin:
            advice = "make setup; another version may work, make test tells"
            yield CheckResult("warn", "packages", f"{name} {installed}, requirements.txt says {pin}", advice)
    yield CheckResult("ok", "packages", f"{len(pins)} compared; torch {torch.__version__}, built for {built_for()}")


def devices(options: Namespace, ranks: Rendezvous) -> Results:
    """The device of this rank, and its free memory; select_device refuses one that torch does not see."""
    device = select_device(options.device, ranks.launch.local_rank)
    if device.type == "cpu":
        yield CheckResult("ok", "devices", "training runs on the CPU")
        return
    level = "ok"
    message = f"{torch.accelerator.device_count()} x {device.type}"
    gpu = device_module(device, "mem_get_info")
    if gpu:
        free, total = (size / 2**30 for size in gpu.mem_get_info(device))
        # The context of this process takes a few percent itself.
        level = "ok" if free > 0.9 * total else "warn"
        message += f" {gpu.get_device_name(device)}, {free:.0f} of {total:.0f} GiB free, {built_for()}, "
        message += f"driver {' '.join(driver() or ['unknown'])}"  # a container may hide it
    yield CheckResult(level, "devices", message, "another process holds memory")


def environment(_options: Namespace, ranks: Rendezvous) -> Results:
    """Find variables of the environment that slow a run down or name something that does not exist."""
    yield CheckResult("ok", "launch", f"{ranks.size} rank(s) on {ranks.launch.nodes} node(s)")
    yield _threads(ranks)
    slow = read_mappings(SLOW, "variables")
    for name, value in sorted(os.environ.items()):
        setting = f"{name}={value}"
        reason = slow.get(name, {}).get(value)
        if reason:
            yield CheckResult("warn", "variables", f"{setting}: {reason}", f"unset {name}")
        elif name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            # Each rank asks for the interfaces of its own node, since nodes may differ.
            level = "FAIL" if unknown_interfaces(value) else "ok"
            yield CheckResult(level, "variables", setting, f"one of {' '.join(interface_addresses())}")
        elif name.startswith(("NCCL_", "TORCH_NCCL_")) or name == "CUDA_VISIBLE_DEVICES":
            # Other settings of the network are shown, so that a report has them.
            yield CheckResult("ok", "variables", setting)


def _threads(ranks: Rendezvous) -> CheckResult:
    """Compare the threads of the ranks on this node with its CPUs."""
    cpus = os.cpu_count() or 1
    # Slurm may bind a rank to fewer CPUs than the node has.
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus
    threads = torch.get_num_threads()
    there = min(ranks.launch.ranks_per_node, ranks.size)
    # Threads that share a CPU wait for one another at the end of every parallel loop.
    is_crowded = threads > mine or threads * there > cpus
    advice = "fewer ranks on a node"
    if threads > 1:
        fitting = max(1, min(mine, cpus // there))
        advice = f"OMP_NUM_THREADS={fitting}"
    setting = os.environ.get("OMP_NUM_THREADS", "unset")
    message = f"OMP_NUM_THREADS {setting}: {threads} a rank, {mine} CPUs for it, {there} rank(s) on the node"
    return CheckResult("warn" if is_crowded else "ok", "threads", message, advice)


def unknown_interfaces(value: str) -> bool:
    """Tell whether no interface of this node matches 'ib', '=eth0' or 'eth,ib' (prefixes, as NCCL reads them)."""
    # An exclusion allows whatever else the node has.
    if value.startswith("^"):
        return False
    names = tuple(value.lstrip("=").split(","))
    if value.startswith("="):
        known = [there for there in interface_addresses() if there in names]
    else:
        known = [there for there in interface_addresses() if there.startswith(names)]
    return not known


def log_folder(options: Namespace, _ranks: Rendezvous) -> Results:
    """Check that this rank can write, sync and rename files in the log folder."""
    folder = Path(options.expdir)
    advice = "another folder: --expdir, or LOG_DIR for sites/launch.sh"
    # Ranks write at the same time, so each has a name of its own.
    mark = folder / f".preflight-{uuid.uuid4().hex}"
    try:
        with whole_file(mark) as part:
            part.touch()
        mark.unlink()
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        yield CheckResult("FAIL", "log folder", f"{folder}: {error.strerror or error}", advice)
        return
    message = f"{folder}: written, synced, renamed; {free:.0f} GB free"
    status = "ok" if free > LEAST_FREE_GB else "warn"
    yield CheckResult(status, "log folder", message, f"make room, or {advice}")


def data_folder(options: Namespace, ranks: Rendezvous) -> Results:
    """Check that there is a file to train with, and how fast all ranks together read it."""
    if is_address(options.train_data_path or ""):
        message = f"{options.train_data_path}: is elsewhere, and was not asked"
        yield CheckResult("warn", "data folder", message, "one step of training shows whether it answers")
        return
    folder = Path(options.train_data_path or "data")
    file = _first_file(folder)
    # Ranks without a file take part as well, or the others would wait for them.
    speeds = ranks.exchange("data folder: read", read_speed(file) if file else None)
    if file:
        read = [speed for speed in speeds if speed is not None]
        yield CheckResult("ok", "data folder", f"{file}: {sum(read) / 1e9:.2f} GB/s of {len(read)} rank(s) together")
    else:
        message = f"{folder}: no data files there"
        advice = "docs/data.md says how to fill it, make demo makes sample data; --train_data_path names another"
        # An empty folder is a failure only where somebody named it.
        yield CheckResult("FAIL" if options.train_data_path else "warn", "data folder", message, advice)


def _first_file(folder: Path) -> Path | None:
    for pattern in DATA_FILES:
        for path in folder.rglob(pattern):
            if path.is_file():
                return path
    return None


def read_speed(file: Path) -> float:
    """Bytes/s of the beginning of a file."""
    began = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        count = len(opened.read(2**26))  # 64 MiB at most
    return count / (time.perf_counter() - began)


def clocks(_options: Namespace, ranks: Rendezvous) -> Results:
    """Compare the clocks of the ranks, on which dates of files and log lines depend."""
    if ranks.size == 1:
        return
    # All ranks meet first, so that the times are of the same moment.
    ranks.exchange("clocks: ready", True)
    times = ranks.exchange("clocks", time.time())
    apart = max(times) - min(times)
    level = "ok" if apart < CLOCKS_APART else "warn"
    yield CheckResult(level, "clocks", f"at most {apart:.1f} s apart", "time synchronisation (NTP) of the nodes")


def shared_folder(options: Namespace, ranks: Rendezvous) -> Results:
    """Check that the other ranks soon see a file of rank 0: all of them write a checkpoint into one folder."""
    if ranks.size == 1:
        return
    folder = Path(options.expdir)
    mark = folder / f".preflight-{uuid.uuid4().hex}"
    if ranks.rank == 0:
        mark.touch()
    # Rank 0 writes before it sends the name, so the file exists when others look for it.
    name, *_ = ranks.exchange("shared folder: written", mark.name)
    began = time.monotonic()

    def seen() -> bool:
        with suppress(OSError):
            return folder / name in folder.iterdir()  # listing the folder asks the server
        return False

    # Ranks give up looking before the exchange below would call them missing.
    found = wait_until(seen, min(10, ranks.patience / 2))
    answers = ranks.exchange("shared folder: seen", time.monotonic() - began if found else None)
    mark.unlink(missing_ok=True)  # only rank 0 has written its own
    blind = [rank for rank, answer in enumerate(answers) if answer is None]
    message = f"not seen by {ranks.names(blind)}" if blind else f"seen after {max(answers):.1f} s"
    advice = "a folder that all nodes share: --expdir, or LOG_DIR"
    yield CheckResult("FAIL" if blind else "ok", "shared folder", f"{folder}: a file of rank 0 is {message}", advice)


def network(options: Namespace, ranks: Rendezvous) -> Results:
    """Check that all ranks can join one group, NCCL if each has a GPU of its own, otherwise gloo, and how it works."""
    if ranks.size == 1:
        return
    launch = ranks.launch
    device = select_device(options.device, launch.local_rank)
    gpu = None
    if device.type != "cpu":
        gpu = physical_name(device) or f"{ranks.node} {device}"
    gpus = ranks.exchange("network: devices", gpu)

    # NCCL takes one GPU for each rank. Otherwise the rest is checked by gloo, on CPUs.
    without = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    count = len(set(gpus) - {None})
    here = 0 if device.type == "cpu" else torch.accelerator.device_count()
    if count and (without or count < ranks.size):
        shared = f"{ranks.size} ranks share {count} GPUs, which NCCL refuses"
        message = f"{ranks.names(without)} has no GPU, others have" if without else shared
        advice = "equal nodes, and one rank per GPU: --nproc_per_node, --ntasks-per-node, --gpus-per-task"
        yield CheckResult("FAIL", "devices", message, advice)
        device = torch.device("cpu")
    elif count and launch.ranks_per_node < here:
        message = f"{launch.ranks_per_node} ranks on a node, {here} GPUs"
        yield CheckResult("warn", "devices", message, "as many ranks as GPUs, or some are idle")

    name_gloo_interface(launch)
    backend = backend_for(device)
    # NCCL ends the process at its timeout, before the rendezvous can say which rank is missing.
    patience = datetime.timedelta(seconds=ranks.patience * (1 if backend == "gloo" else 100))
    bound_device = None if backend == "gloo" else device
    # The group may use a clone at the same time as the rendezvous uses the store.
    store = ranks.store.clone()  # type: ignore[union-attr]  # not in torch's stubs
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=patience,
        device_id=bound_device,
    )
    # Only a collective shows that data pass.
    dist.all_reduce(torch.ones(1, device=device))
    yield CheckResult("ok", "process group", f"{backend}, {ranks.size} ranks")
    yield from collectives(device)
    yield from bandwidth(device, ranks)
    yield from checkpoint_group(ranks.patience)  # the last: ranks that fail in it disagree on groups


def collectives(device: torch.device) -> Results:
    """Check that collectives of every kind give the right numbers."""
    for dtype in (torch.float32, torch.bfloat16):
        right = collective_speed.are_right(device, dtype)
        name = str(dtype).removeprefix("torch.")
        wrong = [kind for kind, is_right in right.items() if not is_right]
        if wrong:
            advice = "NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1 to find the link; tell the site"
            yield CheckResult("FAIL", "collectives", f"{name}: wrong numbers from {', '.join(wrong)}", advice)
        else:
            yield CheckResult("ok", "collectives", f"{name}: {', '.join(right)} give the right numbers")


def bandwidth(device: torch.device, ranks: Rendezvous) -> Results:
    """Measure what a rank sends in a second, and latency: among all ranks, inside each node, and across nodes."""
    parts = {"all": [list(range(ranks.size))]}
    nodes = list(ranks.by_node(range(ranks.size)).values())
    if len(nodes) > 1:
        parts |= collective_speed.places(nodes)
    sizes = SIZES.get(device.type, SIZES["cuda"])
    for place, groups in parts.items():
        shown = []
        points_of = collective_speed.all_points(groups, device, sizes, ("all_reduce", "all_gather"))
        for kind, points in points_of.items():
            latency, speed = collective_speed.fit(points)  # seconds, bytes/s
            shown.append(f"{kind} {speed / 1e9:.2f} GB/s, {latency * 1e6:.0f} us")
        names = {"all": "all ranks", "inside": "inside a node", "across": "across nodes"}
        where = names[place]
        yield CheckResult("ok", "bandwidth", f"{where}, sent by a rank: {'; '.join(shown)}")


def checkpoint_group(seconds: float) -> Results:
    """Check that all ranks can join a gloo group beside their own: a checkpoint's, whatever the devices are."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "what the host name resolves to")
    patience = datetime.timedelta(seconds=seconds)
    try:
        group = dist.new_group(backend="gloo", timeout=patience)
        # This barrier names every rank that is missing.
        dist.monitored_barrier(group, patience, wait_all_ranks=True)
    except RuntimeError as error:
        advice = "GLOO_SOCKET_IFNAME: the interface by which the other nodes reach this one"
        yield CheckResult("FAIL", "checkpoint group", f"gloo through {interface}: {first_line(error)}", advice)
        return
    yield CheckResult("ok", "checkpoint group", f"gloo through {interface}: all ranks have met")


# All ranks take the checks in this order, which matters to those that exchange values. The network comes last: after a
# failure in it, ranks may disagree on their groups.
CHECKS = (packages, devices, environment, log_folder, data_folder, shared_folder, clocks, network)
