"""What a device and its node can do: from data sheets (config/hardware.yaml), or as `plan.py --calibrate` measured."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from tools.planner.measured import Measured
from utils.config import explain, nearest, read_mappings
from utils.errors import UsageError
from utils.files import read_json
from utils.schema import Text, key

HARDWARE = Path(__file__).parents[2] / "config" / "hardware.yaml"
MEASURED = HARDWARE.with_name("measured")  # folder of the entries that `plan.py --calibrate` writes, NAME.json
DEFAULTS = "defaults"  # keys that the entries of the file share
Share = Annotated[float, Field(gt=0, le=1)]


class Gpu(BaseModel):
    """A GPU in its node. Rates are per second, times in seconds, bandwidths in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

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

    measured: Measured | None = key(
        "the machine as plan.py --calibrate measured it, in place of peaks and shares", None
    )

    @property
    def device(self) -> str:
        """Type of the device, as torch calls it."""
        return self.measured.device if self.measured else "cuda"

    @property
    def synchronous(self) -> bool:
        """Whether the host computes by itself, so that its own work comes on top."""
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
    entry = read_json(path)
    try:
        return gpu_of(name, entry if isinstance(entry, dict) else {})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "measured"
        raise UsageError(f"{path}: {where}: {problem['msg']}; measure again: plan.py --calibrate") from None


def gpu_of(name: str, entry: dict[str, Any]) -> Gpu:
    """The Gpu of a measured entry, {"measured": ..., "memory_gib": ..., ...}. Raises ValidationError."""
    found = Measured.model_validate(entry.get("measured"))
    # What a data sheet says is not asked for where there is a measurement.
    sheet = dict.fromkeys(Gpu.model_fields, 1.0) | {"fp8": None, "gpus_per_node": found.ranks, "name": name}
    return Gpu.model_validate(sheet | {"launch": found.speeds(found.ranks).launch} | entry | {"measured": found})


def read_gpus(path: Path = HARDWARE) -> dict[str, dict[str, Any]]:
    """{name: its entry} of the GPUs in a YAML file, unchecked."""
    return {str(name): gpu for name, gpu in read_mappings(path, "GPUs").items() if name != DEFAULTS}
