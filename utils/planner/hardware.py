"""What a GPU and its node can do, from config/hardware.yaml: data sheets, and the shares of them that are reached."""

import difflib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from ruamel.yaml.error import MarkedYAMLError

from utils.config import yaml
from utils.errors import UsageError
from utils.schema import Text, key

HARDWARE = Path(__file__).parents[2] / "config" / "hardware.yaml"
DEFAULTS = "defaults"  # what the entries of the file share
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

    Raises UsageError, naming the nearest one, for a name or a key that is not known, and for values that do not fit.
    """
    gpus = _read(path)
    if name not in gpus:
        raise UsageError(f"{path}: no GPU '{name}'{_nearest(name, gpus)}; it has {', '.join(gpus)}")
    try:
        return Gpu.model_validate({**gpus[name], "name": name})
    except ValidationError as error:
        problems = sorted(error.errors(), key=lambda problem: problem["type"] == "missing")  # a misspelt key first
        raise UsageError(_explain(problems[0], f"{path}: {name}")) from None


def gpu_names(path: Path = HARDWARE) -> list[str]:
    """Names of the GPUs in a YAML file."""
    return list(_read(path))


def _read(path):
    try:
        gpus = yaml().load(Path(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UsageError(f"{path}: line {mark.line + 1 if mark else '?'}: {error.problem}") from None
    if not isinstance(gpus, dict) or not all(isinstance(gpu, dict) for gpu in gpus.values()):
        raise UsageError(f"{path}: expected named GPUs, each a mapping of keys to values")
    return {str(name): gpu for name, gpu in gpus.items() if name != DEFAULTS}


def _explain(problem, where):
    """One line from one pydantic error."""
    name = str(problem["loc"][0])
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key '{name}'{_nearest(name, Gpu.model_fields)}"
    if problem["type"] == "missing":
        return f"{where}: key '{name}' is missing ({Gpu.model_fields[name].description})"
    message = problem["msg"].removeprefix("Input ")
    return f"{where}: {name}: {problem['input']!r} {message}"


def _nearest(word, words):
    word = str(word).lower()
    near = [w for w in words if w.startswith(word)] or difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""
