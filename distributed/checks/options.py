"""The settings of data parallelism, and the models that do not go with them: each is refused in one line."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from distributed.checks.usage import Usage
from utils import comm
from utils.config import SHARDED
from utils.errors import LayoutError, UsageError, first_line

OF_DTYPES = re.compile(r"\btypes?\b|dtype|BFloat16|Half")  # in messages of torch


@dataclass(frozen=True)
class DataParallelOptions:
    """Settings of data parallelism: what ranks share, and how. Its fields are named in the config (utils/schema.py)."""

    data_parallel: str = "ddp"
    noddp: bool = False
    bucket_cap_mb: float = 25
    gradient_compression: str = "none"
    wrap_policy: str = "block"
    wrap_min_params: int = 1_000_000
    prefetch: int = 0
    gather_dtype: str = "none"
    cpu_offload: bool = False
    sync_batchnorm: bool = False
    gradient_accumulation: int = 1
    enable_cuda_graphs: bool = False
    amp_mode: str = "none"
    longest_rollout: int = 1
    ensemble_size: int = 1


def is_sharded(options: DataParallelOptions) -> bool:
    """Tell whether fully_shard cuts the parameters."""
    return options.data_parallel in SHARDED and comm.get_size("grad_reduce") > 1


def check_recomputation(
    model: nn.Module,
    modules: Iterable[nn.Module],
    usage: Usage,
    options: DataParallelOptions,
) -> None:
    """Raise LayoutError for modules that a reentrant checkpoint runs several times before gradients are reduced.

    fully_shard reduces a unit's gradient for one of these calls and loses that of the others, unless the first call, of
    which the gradient comes last, was a plain one. DistributedDataParallel takes a second gradient for an error.
    """
    names = {module: name for name, module in model.named_modules()}
    sharded = is_sharded(options)
    for module in modules:
        name = names[module]
        concerns = usage.recomputed.get(name, False) if sharded else name in usage.recomputed
        is_repeated = usage.calls.get(name, 0) > 1 or options.longest_rollout > 1
        if concerns and is_repeated:
            steps = options.longest_rollout
            how = f"in {steps} steps of a forecast" if steps > 1 else "several times"
            instead = "--wrap_policy none" if sharded else "--gradient_accumulation 1"
            raise LayoutError(
                f"{options.data_parallel}: '{name}' runs in a reentrant checkpoint {how}, whose gradients cannot be "
                "reduced: call torch.utils.checkpoint.checkpoint with use_reentrant=False, or give " + instead
            )


def check_types(model: nn.Module, options: DataParallelOptions) -> None:
    """Raise LayoutError, naming a weight, where a strategy cannot share out weights of its type, or empty ones."""
    if options.data_parallel == "ddp" or comm.get_size("grad_reduce") == 1:
        return
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, parameter in trained:
        if parameter.is_complex():
            raise LayoutError(f"{options.data_parallel} cannot share out the complex weight '{name}': use ddp")
        if options.data_parallel != "zero1" and not parameter.numel():
            raise LayoutError(f"{options.data_parallel} cannot share out '{name}', which has no elements: use ddp")
        first, other = trained[0]
        if options.data_parallel == "zero1" and parameter.dtype != other.dtype:
            first_type = str(other.dtype).removeprefix("torch.")
            other_type = str(parameter.dtype).removeprefix("torch.")
            raise LayoutError(
                f"zero1 shares out weights of one type: '{first}' is in {first_type}, '{name}' in {other_type}: "
                "use ddp or fsdp"
            )


def naming_gather_dtype(forward: Callable[..., Any], options: DataParallelOptions) -> Callable[..., Any]:
    """A forward function that raises UsageError, naming the option, where dtypes of tensors do not go together."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if not OF_DTYPES.search(str(error)):
                raise
            raise UsageError(
                f"gather_dtype {options.gather_dtype}: {first_line(error)}: weights and inputs of modules are in "
                f"{options.gather_dtype}, and the model mixes them with others: give --amp_mode "
                f"{options.gather_dtype}, which chooses the type of each operation, or --gather_dtype none"
            ) from error

    return call


def why_unused(trained: Collection[str], usage: Usage, options: DataParallelOptions, has_stages: bool) -> str:
    """Why DistributedDataParallel must look for weights without a gradient, in words; "" where it need not.

    trained: names of weights. In a reentrant checkpoint it cannot find them, nor in a captured graph or a pipeline's.
    """
    if has_stages or usage.recomputed or options.enable_cuda_graphs:
        return ""
    if usage.varies:
        return f"another pass may skip some: {usage.varies}"
    unused = [name for name in trained if name not in usage.reached]
    if unused and options.gradient_accumulation > 1:  # otherwise the first step tells
        return f"'{unused[0]}' gets no gradient"
    return ""
