"""Speeds of a device and its node: from data sheets (config/hardware.yaml), or as `plan.py --calibrate` measured."""

import math
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SkipValidation,
    ValidationError,
)

from tools.instruments.operation_speed import OF_HEADS
from tools.instruments.tracker import ATTENTION, Operation
from utils.config import explain, nearest, read_mappings
from utils.device import library
from utils.errors import UsageError, first_line
from utils.files import read_json
from utils.schema import Text, key

HARDWARE = Path(__file__).parents[2] / "config" / "hardware.yaml"
MEASURED = HARDWARE.with_name("measured")  # folder of the entries that `plan.py --calibrate` writes, NAME.json
DEFAULTS = "defaults"  # keys that the entries of the file share
Share = Annotated[float, Field(gt=0, le=1)]
LIKE = {"matmul": "mm", "pointwise": "add", "copy": "clone"}  # the operator that stands for others of a kind


@dataclass(frozen=True)
class Collective:
    """Latency and bandwidth of a kind of collective: seconds = latency + bytes sent / bandwidth.

    ranks: of the group in which it was measured.
    """

    latency: float
    bandwidth: float
    ranks: int


@dataclass(frozen=True)
class Speeds:
    """Times while so many ranks of a node computed at once.

    operations: {operator: {type: [FLOP, bytes moved, seconds]}}. host: {phase: seconds of an operation beside its own
    time}.
    """

    operations: dict[str, dict[str, list[list[float]]]]
    host: dict[str, float]
    _known: dict[tuple[str, str, float, float, int], float] = field(default_factory=dict, compare=False)
    _tables: dict[tuple[str, str], Any] = field(default_factory=dict, compare=False)

    @property
    def launch(self) -> float:
        """Host time of an operation, in the mean of the phases."""
        return max(1e-9, sum(self.host.values()) / max(1, len(self.host)))

    def seconds(self, operation: Operation, dtype: str, head: int = 0) -> float:
        """Seconds of an operation. dtype: in which it computes, as the tables call it. head: its size, of attention."""
        name, flops, moved = operation.name, operation.flops, operation.moved
        if name not in self.operations:
            backward = "backward" in name or (not name and operation.phase == "backward")
            alike = [n for n in self.operations if ATTENTION in n and backward == n.endswith("backward")]
            name = alike[0] if operation.kind == ATTENTION and alike else LIKE.get(operation.kind, "mm")
        asked = name, dtype, flops, moved, head
        if asked not in self._known:
            table = self._table(name, self._type(name, dtype, head))
            work, place = _place(name, flops, moved)
            self._known[asked] = work / math.exp(float(table(np.array([place]))[0]))
        return self._known[asked]

    def _type(self, name, dtype, head):
        """The measured type that is nearest."""
        types = self.operations[name]
        if ATTENTION in name:
            sizes = [int(known.split()[-1]) for known in types if known.startswith(dtype)] or [head]
            dtype = OF_HEADS.format(dtype, min(sizes, key=lambda size: abs(math.log(size / max(1, head)))))
        return dtype if dtype in types else next(iter(types))

    def _table(self, name, dtype):
        """The logarithm of work per second, linear between the measured sizes."""
        if (name, dtype) not in self._tables:
            found = {_place(name, *size): seconds for *size, seconds in self.operations[name][dtype]}
            works, places = zip(*found, strict=True)
            values = np.log(np.array(works) / np.array(list(found.values())))
            from scipy.interpolate import RBFInterpolator  # slow to import

            self._tables[name, dtype] = RBFInterpolator(np.array(places), values, kernel="linear", degree=0)
        return self._tables[name, dtype]


def _place(name: str, flops: float, moved: float) -> tuple[float, tuple[float, float]]:
    """(work, its place in a table): logarithms of work and of FLOP per byte, where there are FLOP.

    Of attention FLOP per byte alone, which tell the number of tokens: heads are computed one after another.
    """
    if not flops:
        return moved, (math.log(moved), 0.0)
    return flops, (0.0 if ATTENTION in name else math.log(flops), math.log(flops / moved))


@dataclass(frozen=True)
class Measured:
    """A machine as it was measured.

    device, processor, cores, torch_version: type of the device, as torch calls it, its name, cores of the node, and the
    torch with which it was measured. threads: of a rank on the CPU. ranks: of a node, at work at once. compute: Speeds
    by the number of ranks of a node at work. collectives: by place (inside a node, across nodes) and kind. overlap:
    share of a collective that computation can hide. slowest: time of computing of the slowest rank, in that of the mean
    one. around: {what is around a model: {phase: seconds of the host for each of its collectives or blocks}}.
    """

    device: str
    processor: str
    cores: int
    torch_version: str
    threads: int
    ranks: int
    compute: dict[int, Speeds]
    collectives: dict[str, dict[str, Collective]]
    overlap: float
    around: dict[str, dict[str, float]]
    slowest: float = 1.0

    def speeds(self, ranks: int) -> Speeds:
        """Times while so many ranks of a node compute, or the nearest number that was measured."""
        return self.compute[min(self.compute, key=lambda n: (abs(n - ranks), n))]

    def collective(self, kind: str, nodes: int, name: str) -> Collective:
        """The Collective of a kind, inside a node or over several. Raises UsageError where it was not measured."""
        place = "inside" if nodes == 1 else "across"
        if kind not in (found := self.collectives.get(place, {})):
            how = "torchrun --nproc_per_node N" if nodes == 1 or self.ranks == 1 else "srun, on two nodes or more"
            raise UsageError(
                f"{name}: {kind} {place} {'a node' if nodes == 1 else 'nodes'} was not measured, as it was calibrated "
                f"with {self.ranks} rank{'s' * (self.ranks > 1)}: start plan.py --calibrate by {how}"
            )
        return found[kind]

    def elsewhere(self) -> str:
        """How this machine differs from the measured one, in words; '' where it does not."""
        here = self.device == "cpu" or getattr(torch, self.device, torch.cpu).is_available()
        own = machine_of(torch.device(self.device if here else "cpu"))
        known = {name: getattr(self, name) for name in own}
        return ", ".join(f"{name} {own[name]} here, {known[name]} there" for name in own if own[name] != known[name])


def machine_of(device: torch.device) -> dict[str, Any]:
    """Identity of a kind of machine: type and name of its device, cores."""
    gpu, cpus = library(device, "get_device_name"), Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpus.read_text(), re.M) if cpus.exists() else None
    name = gpu.get_device_name(device) if gpu else model[1] if model else platform.machine()
    return {"device": device.type, "processor": name, "cores": os.cpu_count() or 1}


class Gpu(BaseModel):
    """A GPU in its node. Rates are per second, times in seconds, bandwidths in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    name: Text = key("name of the entry in the YAML file")
    memory_gib: PositiveFloat = key("GiB of memory that the device reports")
    overhead_gib: PositiveFloat = key("GiB outside of PyTorch's allocator: context and NCCL")
    workspace_mib: NonNegativeFloat = key("MiB that cuBLAS takes from the allocator")

    fp32: PositiveFloat = key("peak FLOP/s in float32")
    tf32: PositiveFloat = key("peak FLOP/s in TF32; without tensor cores for it, that of float32")
    bf16: PositiveFloat = key("peak FLOP/s in bfloat16")
    fp16: PositiveFloat = key("peak FLOP/s in float16")
    fp8: PositiveFloat | None = key("peak FLOP/s in 8-bit floating point; null where the GPU has none", None)
    bandwidth: PositiveFloat = key("bytes/s of its memory")
    launch: PositiveFloat = key("host time of one operation in eager mode")

    gpus_per_node: PositiveInt = key("GPUs of a node")
    link: PositiveFloat = key("bytes/s from a GPU to the others of its node")
    nic: PositiveFloat = key("bytes/s from a GPU to other nodes")
    hop_inside: PositiveFloat = key("latency from a rank of a collective to the next, in a node")
    hop_across: PositiveFloat = key("latency from a rank of a collective to the next, between nodes")

    matmul_efficiency: Share = key("share of the peak that matrix products reach")
    attention_efficiency: Share = key("share of the peak that fused attention reaches")
    memory_efficiency: Share = key("share of the bandwidth that other kernels reach")
    network_efficiency: Share = key("share of the bandwidth of links and NICs that collectives reach")

    measured: Annotated[Measured | None, SkipValidation] = key(
        "the machine as plan.py --calibrate measured it, in place of peaks and shares", None
    )

    @property
    def device(self) -> str:
        """Type of the device, as torch calls it."""
        return self.measured.device if self.measured else "cuda"

    @property
    def synchronous(self) -> bool:
        """Tell whether the host computes by itself, so that its own work is added."""
        return self.device == "cpu"

    @property
    def memory(self) -> int:
        """Bytes that the device reports."""
        return int(self.memory_gib * 2**30)

    @property
    def overhead(self) -> int:
        """Bytes outside of PyTorch's allocator."""
        return int(self.overhead_gib * 2**30)

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS takes from the allocator."""
        return int(self.workspace_mib * 2**20)


def load_gpu(name: str, path: Path = HARDWARE, measured: Path | None = None) -> Gpu:
    """The Gpu of this name: measured here (a file of the folder `measured`), or in a YAML file.

    Raises UsageError for an unknown name or key, with the nearest known one, and for values that do not fit.
    """
    own = {file.stem: file for file in sorted((measured or MEASURED).glob("*.json"))}
    if name in own:
        return of_measured(name, own[name])
    gpus = read_gpus(path)
    if name not in gpus:
        known = [*gpus, *own]
        near = next((gpu for gpu in known if gpu.startswith(name.lower())), name.lower())
        raise UsageError(f"{path}: no GPU '{name}'{nearest(near, known)}; it has {', '.join(known)}")
    try:
        return Gpu.model_validate({**gpus[name], "name": name})
    except ValidationError as error:
        raise UsageError(explain(error, Gpu, f"{path}: {name}")) from None


def of_measured(name: str, path: Path) -> Gpu:
    """The Gpu in a file of plan.py --calibrate. Raises UsageError, naming the file, where it is damaged."""
    entry: Any = read_json(path)
    try:
        return gpu_of(name, entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{path}: is not what plan.py --calibrate writes ({problem}): measure again") from None


def gpu_of(name: str, entry: dict[str, Any]) -> Gpu:
    """The Gpu of a measured entry, {"measured": ..., "memory_gib": ..., ...}, as tools.planner.calibrate makes it."""
    machine = entry["measured"]
    compute = {int(ranks): Speeds(**speeds) for ranks, speeds in machine["compute"].items()}
    collectives = {}
    for place, kinds in machine["collectives"].items():
        collectives[place] = {kind: Collective(**speed) for kind, speed in kinds.items()}
    found = Measured(**machine | {"compute": compute, "collectives": collectives})
    # What a data sheet says is not asked for where there is a measurement.
    sheet = dict.fromkeys(Gpu.model_fields, 1.0) | {"fp8": None, "gpus_per_node": found.ranks, "name": name}
    return Gpu(**sheet | {"launch": found.speeds(found.ranks).launch} | entry | {"measured": found})


def read_gpus(path: Path = HARDWARE) -> dict[str, dict[str, Any]]:
    """{name: its entry} of the GPUs in a YAML file, unchecked."""
    return {str(name): gpu for name, gpu in read_mappings(path, "GPUs").items() if name != DEFAULTS}
