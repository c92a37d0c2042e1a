"""A rule for a torch function that has none, compared with the whole tensors.

torchrun --nproc_per_node 2 -m docs.examples.own_rule
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from distributed.shard_tensor import ShardTensor, local, no_rule, redistributed, reduced, rule, wrap
from tests.support.shard_parity import Case, X, check, domain_mesh, draw, split
from tools.instruments.counting import CollectiveCounter


@rule(torch.fft.rfft)
def rfft(
    func: Callable, input: ShardTensor, n: int | None = None, dim: int = -1, norm: str | None = None
) -> ShardTensor:
    """Along a whole dimension each rank transforms its own rows; a split one is gathered first."""
    if n is not None:
        raise no_rule(func, (input,), {}, "n= is not supported")
    x, dim = reduced(input), dim % len(input.spec.dims)
    if x.spec.is_split(dim):
        x = redistributed(x, [Replicate() if p == Shard(dim) else p for p in x.spec.placements])
    part, waves = local(x), x.spec.shape[dim] // 2 + 1
    out = part.narrow(dim, 0, waves).to(part.dtype.to_complex())
    if part.numel():  # a rank may have no rows, and not every library takes that
        out = func(part, dim=dim, norm=norm)
    return wrap(out, x.spec.resized({dim: waves}))


def power_spectrum(x: Tensor) -> Tensor:
    """Power of the zonal wave numbers, mean over latitude: (B, C, H, W) -> (B, C, W // 2 + 1)."""
    return torch.fft.rfft(x, norm="ortho").abs().square().mean(2)


SHAPE = (2, 3, 7, 10)
CASES = {
    "latitude in rows of 4 and 3": Case(power_spectrum, (X(SHAPE, (2,)),)),
    "all rows on rank 0": Case(power_spectrum, (X(SHAPE, (2,), {0: (7, 0)}),)),
    "longitude split": Case(power_spectrum, (X(SHAPE, (3,)),)),
    "channels split": Case(power_spectrum, (X(SHAPE, (1,)),)),
    "a copy on every rank": Case(power_spectrum, (X(SHAPE),)),
}


def main() -> None:
    """Compare output and gradients with those of the whole tensor, and print what is sent."""
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        check(case)  # output and gradients
        x = split(draw(SHAPE, torch.float32, 0), case.inputs[0], domain_mesh())
        with CollectiveCounter() as counted:
            power_spectrum(x).sum().item()
        if dist.get_rank() == 0:
            print(f"{name:28}as of the whole; sends {dict(counted.calls) or 'nothing'}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
