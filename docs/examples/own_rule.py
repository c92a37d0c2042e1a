"""A rule for a torch function that has none, compared with the whole tensors.

torchrun --nproc_per_node 2 -m docs.examples.own_rule
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from distributed.shard_tensor import ShardTensor, local, no_rule, redistribute, rule, scatter_tensor, sum_partial, wrap
from tools.instruments.counting import CollectiveCounter


@rule(torch.fft.ihfft)
def ihfft(
    func: Callable, input: ShardTensor, n: int | None = None, dim: int = -1, norm: str | None = None
) -> ShardTensor:
    """Along a whole dimension each rank transforms its own rows; a split one is gathered first."""
    if n is not None:
        raise no_rule(func, (input,), {}, "n= is not supported")
    x = sum_partial(input)
    dim = dim % len(x.spec.dims)
    if x.spec.is_split(dim):
        placements = [Replicate() if p == Shard(dim) else p for p in x.spec.placements]
        x = redistribute(x, placements)
    part = local(x)
    waves = x.spec.shape[dim] // 2 + 1
    out = part.narrow(dim, 0, waves).to(part.dtype.to_complex())
    if part.numel():  # a rank may have no rows, and not every library takes that
        out = func(part, dim=dim, norm=norm)
    return wrap(out, x.spec.resized({dim: waves}))


def power_spectrum(x: Tensor) -> Tensor:
    """Power of the zonal wave numbers, mean over latitude: (B, C, H, W) -> (B, C, W // 2 + 1)."""
    return torch.fft.ihfft(x, norm="ortho").abs().square().mean(2)


SHAPE = (2, 3, 7, 10)
# How two ranks split an image, and the sizes of their parts; None for equal ones.
CASES: dict[str, tuple[Placement, tuple[int, ...] | None]] = {
    "latitude in rows of 4 and 3": (Shard(2), None),
    "all rows on rank 0": (Shard(2), (7, 0)),
    "longitude split": (Shard(3), None),
    "channels split": (Shard(1), None),
    "a copy on every rank": (Replicate(), None),
}


def check(mesh: DeviceMesh, placement: Placement, sizes: tuple[int, ...] | None) -> dict[str, int]:
    """Compare output and gradient with those of the whole tensor; returns how often a forward pass sends."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(SHAPE, generator=generator, requires_grad=True)
    sizes_of_parts = {0: sizes} if sizes else None
    split = scatter_tensor(whole.detach(), 0, mesh, [placement], sizes_of_parts).requires_grad_()
    expected = power_spectrum(whole)
    found = power_spectrum(split)
    assert isinstance(found, ShardTensor)
    torch.testing.assert_close(found.full_tensor(), expected)

    # A gradient of ones would hide that elements are in another order.
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(expected.shape, generator=generator)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    assert isinstance(split.grad, ShardTensor)
    torch.testing.assert_close(split.grad.full_tensor(), whole.grad)
    with CollectiveCounter() as counted:
        power_spectrum(split).sum().item()
    return dict(counted.calls)


def main() -> None:
    """Check all cases, and print what is sent."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, case in CASES.items():
        sent = check(mesh, *case)
        if dist.get_rank() == 0:
            print(f"{name:28}as of the whole; sends {sent or 'nothing'}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
