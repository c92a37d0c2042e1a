"""The kernel that torch takes for a model's attention, told in the log of a run: they differ much in speed."""

from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend

from distributed import attention_kernels
from distributed.checks.usage import AttentionCall, Usage
from training.step.step import autocast
from utils import comm
from utils.schema import Config
from utils.torch_private import VERSION

MOST_TOKENS = 1024  # of a probe: torch does not choose by longer lengths
CUDNN_MASK_MENDED = (2, 14)  # before it the backward pass with a mask gives NaN for some lengths: pytorch issue 196678


def attention_notes(config: Config, device: torch.device, usage: Usage) -> Iterator[str]:
    """Lines for the log: a kernel for each form of attention that the model calls."""
    for call in sorted(usage.attention):
        name = kernel_name(config, device, call)
        if name is None:
            continue
        masked = " with a mask" if call.masked else ""
        yield f"Attention of heads of {call.head}{masked}: kernel {name}"
        is_wrong = call.masked and call.keys % 128 == 64 and VERSION < CUDNN_MASK_MENDED
        if name == SDPBackend.CUDNN_ATTENTION.name and is_wrong:
            yield (
                f"Attention with a mask over {call.keys} keys: the gradients of this kernel may be NaN in torch "
                f"{torch.__version__}: call torch.backends.cuda.enable_cudnn_sdp(False) in the model's module"
            )


def kernel_name(config: Config, device: torch.device, call: AttentionCall) -> str | None:
    """The name of the kernel that computes this attention here, as torch.nn.attention.SDPBackend has it.

    Ring attention calls its kernels itself. None where torch does not say.
    """
    enabled = autocast(config, device)
    dtype = enabled.fast_dtype if enabled._enabled else torch.float32
    tokens = min(call.keys, MOST_TOKENS)
    shape = (1, 1, tokens, call.head)
    q, k, v = [torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    mask = None
    if call.masked:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    if _is_ring(config):
        kernel = attention_kernels.kernel(q, mask)
        names = {
            attention_kernels.CudaFlash: "FLASH_ATTENTION",
            attention_kernels.CudaEfficient: "EFFICIENT_ATTENTION",
            attention_kernels.CpuFlash: "FLASH_ATTENTION",
        }
        return f"{names.get(kernel, 'MATH')} (ring attention)"
    try:
        choice = torch._fused_sdp_choice(q, k, v, mask, config.dropout)
    except (RuntimeError, NotImplementedError):  # a device with kernels of its own
        return None
    return SDPBackend(choice).name


def _is_ring(config: Config) -> bool:
    rings_tokens = comm.get_size("cp") > 1 and config.cp_method == "ring"
    rings_domain = comm.get_size("domain") > 1 and config.domain_method == "ring"
    return rings_tokens or rings_domain
