"""Speeds of a device and its node: from data sheets (config/hardware.yaml), or as `plan.py --calibrate` measured."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from tools.instruments.operation_speed import OF_HEADS
from tools.instruments.tracker import ATTENTION, Operation
from training.models.info import is_gpu
from utils.config import explain
from utils.errors import UsageError, nearest
from utils.files import read_json
from utils.schema import Text, key
from utils.yaml_files import read_mappings

HARDWARE = Path(__file__).parents[2] / "config" / "hardware.yaml"
MEASURED = HARDWARE.with_name("measured")  # folder of the entries that `plan.py --calibrate` writes, NAME.json
DEFAULTS = "defaults"  # keys that the entries of the file share
AttentionKernel = Literal["cudnn", "flash", "efficient"]
Share = Annotated[float, Field(gt=0, le=1)]
Shares = Annotated[dict[PositiveInt, Share], Field(min_length=1)]  # by the largest size of a head
LIKE = {"matmul": "mm", "pointwise": "add", "copy": "clone"}  # the operator that stands for others of a kind


@dataclass(frozen=True)
class Collective:
    """Latency and bandwidth of a kind of collective: seconds = latency + bytes sent / bandwidth.

    ranks: of the group in which it was measured.
    """

    latency: float
    bandwidth: float
    ranks: int


@dataclass(eq=False)
class Speeds:
    """Times while so many ranks of a node computed at once.

    operations: {operator: {type: [(FLOP, bytes moved, seconds)]}}. host: {phase: seconds of an operation beside its own
    time}.
    """

    operations: dict[str, dict[str, list[tuple[float, float, float]]]]
    host: dict[str, float]

    @cache  # noqa: B019  there are few Speeds in a process
    def seconds(self, operation: Operation, dtype: str, head: int = 0) -> float:
        """Seconds of an operation. dtype: in which it computes, as the tables call it. head: its size, of attention."""
        # The table of the operator, or of one like it, in the nearest type that was measured.
        name = self._measured_name(operation, dtype)

        def distance(known):
            """(whether a measured type has another dtype, how far its size of heads is off); the first counts most."""
            called, _, size = known.partition(OF_HEADS)
            is_other = called != dtype
            if not size:
                return is_other, 0.0
            # The ratio of two sizes says how far apart they are.
            return is_other, abs(math.log(int(size) / max(1, head)))

        nearest_type = min(self.operations[name], key=distance)
        table = self._table(name, nearest_type)

        # The rate, between those of the measured sizes, gives the time.
        work, place = _place(name, operation.flops, operation.moved)
        (log_of_rate,) = table(np.array([place]))
        return work / math.exp(float(log_of_rate))

    def _measured_name(self, operation, dtype):
        """Name of the operator whose measurements count for an operation: its own, or one of its kind."""
        name = operation.name
        if name in self.operations:
            return name
        # An operator that was not measured counts as one like it. A formula gives no name, so there the phase tells.
        is_backward = "backward" in name or (not name and operation.phase == "backward")
        alike = []
        for known in self.operations:
            if ATTENTION in known and is_backward == known.endswith("backward"):
                alike.append(known)
        if operation.kind == ATTENTION and alike:
            # A GPU has a kernel of its own for each type.
            of_this_type = [known for known in alike if self._has_type(known, dtype)]
            return (of_this_type or alike)[0]
        return LIKE.get(operation.kind, "mm")

    def _has_type(self, name, dtype):
        types = {known.partition(OF_HEADS)[0] for known in self.operations[name]}
        return dtype in types

    @cache  # noqa: B019
    def _table(self, name, dtype):
        """The logarithm of work per second, linear between the measured sizes."""
        from scipy.interpolate import RBFInterpolator  # slow to import

        found = {}
        for flops, moved, seconds in self.operations[name][dtype]:
            # Two values at one place would make the interpolation singular, so the last one counts.
            found[_place(name, flops, moved)] = seconds
        works, places = zip(*found, strict=True)
        rates = np.array(works) / np.array(list(found.values()))
        # Rates differ by powers of ten, so their logarithms are interpolated.
        values = np.log(rates)
        return RBFInterpolator(np.array(places), values, kernel="linear", degree=0)


def _place(
    name: str,
    flops: float,
    moved: float,
) -> tuple[float, tuple[float, float]]:
    """(work, its place in a table): logarithms of work and of FLOP per byte, where there are FLOP.

    Of attention FLOP per byte alone, which tell the number of tokens: heads are computed one after another.
    """
    if not flops:
        return moved, (math.log(moved), 0.0)  # bytes are the work where nothing is computed
    size = 0.0 if ATTENTION in name else math.log(flops)
    intensity = math.log(flops / moved)  # FLOP per byte
    return flops, (size, intensity)


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
        nearest_number = min(self.compute, key=lambda number: (abs(number - ranks), number))
        return self.compute[nearest_number]

    def collective(self, kind: str, nodes: int, name: str) -> Collective:
        """The Collective of a kind, inside a node or over several. Raises UsageError where it was not measured."""
        place = "inside" if nodes == 1 else "across"
        found = self.collectives.get(place, {})
        if kind not in found:
            raise UsageError(
                f"{name}: {kind} {place} nodes was not measured, only {self.ranks} rank(s) of a node: start plan.py "
                "--calibrate by torchrun --nproc_per_node N, or by srun on two nodes or more"
            )
        return found[kind]


class Gpu(BaseModel):
    """A GPU in its node. Rates are per second, times in seconds, bandwidths in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    # The device and its memory.
    name: Text = key("name of the entry in the YAML file")
    memory_gib: PositiveFloat = key("GiB of memory that the device reports")
    overhead_gib: PositiveFloat = key("GiB outside of PyTorch's allocator: context and NCCL")
    workspace_mib: NonNegativeFloat = key("MiB that cuBLAS takes from the allocator")

    # Peaks and shortest times of the device.
    fp32: PositiveFloat = key("peak FLOP/s in float32")
    tf32: PositiveFloat = key("peak FLOP/s in TF32; without tensor cores for it, that of float32")
    bf16: PositiveFloat = key("peak FLOP/s in bfloat16")
    fp16: PositiveFloat = key("peak FLOP/s in float16")
    fp8: PositiveFloat | None = key("peak FLOP/s in 8-bit floating point; null where the GPU has none", None)
    bandwidth: PositiveFloat = key("bytes/s of its memory")
    launch: PositiveFloat = key("host time of one operation in eager mode")
    kernel: PositiveFloat = key("seconds of the shortest kernel")

    # Its node, and the links to other nodes.
    gpus_per_node: PositiveInt = key("GPUs of a node")
    link: PositiveFloat = key("bytes/s from a GPU to the others of its node")
    nic: PositiveFloat = key("bytes/s from a GPU to other nodes")
    hop_inside: PositiveFloat = key("latency from a rank of a collective to the next, in a node")
    hop_across: PositiveFloat = key("latency from a rank of a collective to the next, between nodes")

    # Shares of the peaks that programs reach.
    matmul_efficiency: Share = key("share of the peak that matrix products reach")
    attention: dict[AttentionKernel, Shares] = key(
        "share of the peak that fused attention reaches, by kernel and largest head; the first that can is taken",
        min_length=1,
    )
    memory_efficiency: Share = key("share of the bandwidth that other kernels reach")
    network_efficiency: Share = key("share of the bandwidth of links and NICs that collectives reach")

    # What slows a run down on many nodes.
    jitter: NonNegativeFloat = key("relative standard deviation of a rank's step time", 0.02)
    node_read: PositiveFloat = key("bytes/s of files that a node reads", 10e9)
    total_read: PositiveFloat = key("bytes/s of files that all nodes read", 1e12)

    measured: Measured | None = key(
        "the machine as plan.py --calibrate measured it, in place of peaks and shares", None
    )

    def attention_share(self, kernel: AttentionKernel, head: int) -> float:
        """Share of the peak that attention reaches with a kernel, or with another where this GPU has no such kernel."""
        first = next(iter(self.attention.values()))
        shares = self.attention.get(kernel) or self.attention.get("flash") or first
        # The shares of the smallest heads that are as large, else of the largest ones.
        as_large = [size for size in sorted(shares) if size >= head]
        size = as_large[0] if as_large else max(shares)
        return shares[size]

    @property
    def device(self) -> str:
        """Type of the device, as torch calls it."""
        return self.measured.device if self.measured else "cuda"

    @property
    def memory(self) -> int:
        """Bytes that the device reports."""
        return int(self.memory_gib * 2**30)


def load_gpu(name: str, path: Path = HARDWARE) -> Gpu:
    """The Gpu of this name: measured here (a file of the folder `measured`), or in a YAML file.

    Raises UsageError for an unknown name or key, with the nearest known one, and for values that do not fit.
    """
    measured = {file.stem: file for file in sorted(MEASURED.glob("*.json"))}
    if name in measured:
        return gpu_of(name, read_json(measured[name]))
    gpus = read_gpus(path)
    if name not in gpus:
        known = [*gpus, *measured]
        # "a100" is nearer to "a100-40gb" than to another short name.
        wanted = name.lower()
        near = next((gpu for gpu in known if gpu.startswith(wanted)), wanted)
        raise UsageError(f"{path}: no GPU '{name}'{nearest(near, known)}; it has {', '.join(known)}")
    try:
        return Gpu.model_validate(gpus[name] | {"name": name})
    except ValidationError as error:
        raise UsageError(explain(error, Gpu, f"{path}: {name}")) from None


def gpu_of(name: str, entry: dict[str, Any]) -> Gpu:
    """The Gpu of a measured entry, {"measured": ..., "memory_gib": ..., ...}, as tools.planner.calibrate makes it.

    What a data sheet says is not asked for where there is a measurement.
    """
    required = [key for key, field in Gpu.model_fields.items() if field.is_required()]
    # A Gpu requires the values of a data sheet, but a measured machine goes without them.
    sheet: dict[str, Any] = dict.fromkeys(required, 1.0)
    sheet["attention"] = {"flash": {256: 1.0}}
    own = {"name": name, "gpus_per_node": entry["measured"]["ranks"]}
    # JSON has text for numbers as keys, and lists for tuples, which strict validation refuses.
    return Gpu.model_validate(sheet | entry | own, strict=False)


def read_gpus(path: Path = HARDWARE) -> dict[str, dict[str, Any]]:
    """{name: its entry} of the GPUs in a YAML file, unchecked."""
    entries = read_mappings(path, "GPUs")
    return {str(name): gpu for name, gpu in entries.items() if name != DEFAULTS}


def gpu_called(device: str) -> str | None:
    """Name of the GPU that a device which reports this name is, as load_gpu takes it; None: it is not known."""
    return next((gpu for gpu in read_gpus() if is_gpu(gpu, device)), None)
