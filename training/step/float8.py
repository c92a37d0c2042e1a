"""Linear layers that multiply 8-bit floating-point numbers, by torchao; everything around them runs in bfloat16.

Each product takes two tensors that are scaled to the range of 8 bits by their own largest number, and adds up in more
bits. Forward: e4m3 (3 bits of mantissa); gradients: e5m2 (more range). Weights and optimizer stay in float32.
Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433).
"""

import logging

import torch
from torch import nn

from utils.errors import UsageError

MULTIPLE = 16  # the kernels take rows and columns in such groups


def use_float8(blocks: list[nn.Module], device: torch.device) -> None:
    """Let the linear layers of blocks multiply in 8 bits, in place. Names and weights stay; they may be on meta.

    A layer whose sizes are no multiples of 16 stays as it is. On the CPU the rounding is emulated: right, but slow.
    Raises UsageError where the device or the library is missing, or where no layer fits.
    """
    if device.type != "cpu" and not has_float8(device):
        raise UsageError(
            f"amp_mode fp8: {device} has no 8-bit products (NVIDIA has them from capability 8.9, AMD from MI300): "
            "use --amp_mode bf16"
        )
    logging.disable(logging.WARNING)  # of kernels for inference that do not fit this build of torch
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError(
            f"amp_mode fp8: torchao cannot be imported ({error}): pip install -r requirements/fp8.txt, or use "
            "--amp_mode bf16"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    # In the gradient of a weight the inner dimension is the number of tokens: any, so it is padded.
    config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    fitting = [m for block in blocks for m in block.modules() if _fits(m)]
    if not fitting:
        raise UsageError(f"amp_mode fp8: no linear layer in a block has sizes that are multiples of {MULTIPLE}")
    for block in blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=lambda module, name: _fits(module))


def has_float8(device: torch.device) -> bool:
    """Tell whether a GPU multiplies 8-bit numbers; in torch only its capability shows this."""
    if device.type != "cuda":
        return False
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip:  # gfx942 and gfx950 (MI300, MI350), gfx12; gfx10 and gfx11 are graphics cards without
        return capability in ((9, 4), (9, 5)) or capability >= (12, 0)
    return capability >= (8, 9)


def _fits(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
