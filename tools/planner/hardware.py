"""What a GPU and its node can do, from config/hardware.yaml: data sheets, and which share of each peak is reached."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from utils.config import explain, nearest, read_mappings
from utils.errors import UsageError
from utils.schema import Text, key

HARDWARE = Path(__file__).parents[2] / "config" / "hardware.yaml"
DEFAULTS = "defaults"  # keys that the entries of the file share
Share = Annotated[float, Field(gt=0, le=1)]


class Gpu(BaseModel):
    """A GPU in its node. Rates are per second, times in seconds, bandwidths in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: Text = key("name of the entry in the YAML file")
    memory_gib: PositiveFloat = key("GiB of memory that the device reports")
    overhead_gib: PositiveFloat = key("GiB outside of PyTorch's allocator: context and NCCL")
    workspace_mib: PositiveFloat = key("MiB that cuBLAS takes from the allocator")

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


def load_gpu(name: str, path: Path = HARDWARE) -> Gpu:
    """The Gpu of this name in a YAML file.

    Raises UsageError for an unknown name or key, with the nearest known one, and for values that do not fit.
    """
    gpus = read_gpus(path)
    if name not in gpus:
        near = next((gpu for gpu in gpus if gpu.startswith(name.lower())), name.lower())
        raise UsageError(f"{path}: no GPU '{name}'{nearest(near, gpus)}; it has {', '.join(gpus)}")
    try:
        return Gpu.model_validate({**gpus[name], "name": name})
    except ValidationError as error:
        raise UsageError(explain(error, Gpu, f"{path}: {name}")) from None


def read_gpus(path: Path = HARDWARE) -> dict[str, dict[str, Any]]:
    """{name: its entry} of the GPUs in a YAML file, unchecked."""
    return {str(name): gpu for name, gpu in read_mappings(path, "GPUs").items() if name != DEFAULTS}
