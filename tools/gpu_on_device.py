"""Measurements beside a training: every kind of collective, every method of attention, the products that MFU counts.

    torchrun --nproc_per_node 1 -m tools.gpu_on_device --json FILE

Each rank has a GPU. A single rank makes a group as well, of NCCL with gloo beside it. Wrong numbers are an error; the
file has what was measured before.
"""

import os
from argparse import ArgumentParser
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from distributed import attention
from distributed.collectives import as_group
from tools.benchmarks.ladder import matmul_flops_per_sec
from tools.instruments.collective_speed import are_right
from utils.device import select_device
from utils.files import write_json
from utils.layout import shard_sizes

SIZES = {"cuda": (16200, 64, torch.bfloat16), "cpu": (50, 8, torch.float32)}  # tokens, features of a head, dtype
TOLERANCE = 0.02  # of bfloat16


def check_collectives(device: torch.device) -> list[str]:
    """Names of the collectives that were tried on tensors of a device. Raises ValueError for wrong numbers."""
    right = are_right(device, torch.float32)
    if wrong := [kind for kind, well in right.items() if not well]:
        raise ValueError(f"wrong numbers on {device} from {', '.join(wrong)}")
    return list(right)


def attend(method: str, device: torch.device) -> float:
    """Milliseconds of attention, forward and backward. Raises ValueError for a large error."""
    (tokens, features, dtype), group = SIZES[device.type], as_group(dist.group.WORLD)
    sizes = shard_sizes(tokens, group.size)
    own = slice(sum(sizes[: group.rank]), sum(sizes[: group.rank + 1]))
    torch.manual_seed(0)  # the same on all ranks
    *qkv, grad = torch.randn(4, 1, 4 * group.size, tokens, features, device=device).to(dtype).unbind()

    def step() -> list[Tensor]:
        q, k, v = (x[:, :, own].clone().requires_grad_() for x in qkv)
        out = attention.METHODS[method](q, k, v, sizes=sizes, group=group)
        return [out, *torch.autograd.grad(out, (q, k, v), grad[:, :, own])]

    q, k, v = (x.float().clone().requires_grad_() for x in qkv)
    whole = F.scaled_dot_product_attention(q, k, v)
    expected = [x[:, :, own] for x in (whole, *torch.autograd.grad(whole, (q, k, v), grad.float()))]
    error = max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(step(), expected, strict=True))
    if not error < TOLERANCE:
        raise ValueError(f"{method} attention: relative error {error:.3g}")
    return Timer("step()", globals={"step": step}).timeit(5).mean * 1e3


def measure(device: torch.device) -> Iterator[tuple[str, float]]:
    """Speed of matrix products, collectives that are right, milliseconds of attention: (name, figure) of each."""
    yield "bf16 TFLOP/s", matmul_flops_per_sec(device, torch.bfloat16) / 1e12
    backends = {"gloo": torch.device("cpu")} | ({"nccl": device} if device.type == "cuda" else {})
    dist.init_process_group(
        ",".join(f"{device.type}:{name}" for name, device in backends.items()), timeout=timedelta(seconds=60)
    )
    for name, own in backends.items():
        yield f"{name} collectives", len(check_collectives(own))
    for method in attention.METHODS:
        yield f"{method} ms", attend(method, device)


def main() -> None:
    """Check everything on this rank; the first one writes the figures, after each of them."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    device = select_device(options.device, int(os.environ["LOCAL_RANK"]))
    figures: dict[str, float] = {}
    for name, found in measure(device):
        figures[name] = found
        if os.environ["RANK"] == "0":
            write_json(options.json, figures)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
