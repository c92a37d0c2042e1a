"""Context parallelism against the serial model: numbers, counts, compilation, the ring's edge cases, bad input."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from distributed import attention, attention_kernels
from distributed.context_parallel import l2_norms
from distributed.split import own_window
from tests.support import parity
from tests.support.marks import needs_torch
from utils import comm
from utils.layout import Layout

METHODS = ["gather", "ring", "all_to_all"]


@pytest.mark.parametrize(
    ("tp", "cp", "method", "forward", "backward"),
    [
        (1, 4, "gather", {"all_gather": 1}, {"reduce_scatter": 1}),
        (1, 4, "ring", {"all_to_all": 3}, {"all_to_all": 6}),  # backward: blocks, and their gradients
        (1, 4, "all_to_all", {"all_to_all": 2}, {"all_to_all": 2}),
        (2, 2, "gather", {"all_gather": 1, "all_reduce": 2}, {"reduce_scatter": 1, "all_reduce": 2}),
    ],
)
def test_counts_of_a_block(ranks, tp, cp, method, forward, backward):
    counted = ranks(tp * cp, parity.count_block, tp, cp, method)[0]
    assert (counted[0].calls, counted[1].calls) == (forward, backward)


@pytest.mark.slow("what the compiler makes of the collectives of context parallelism")
@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("gather", {"all_gather": 1}, {"reduce_scatter": 1}),
        # The compiler keeps the blocks of the forward pass.
        pytest.param("ring", {"all_to_all": 1}, {"all_to_all": 1}, marks=needs_torch((2, 13), "fetches them again")),
        ("all_to_all", {"all_to_all": 2}, {"all_to_all": 2}),
    ],
)
def test_counts_of_a_compiled_block(ranks, method, forward, backward):
    counted = ranks(2, parity.count_block, 1, 2, method, compiled=True)[0]
    assert (counted[0].calls, counted[1].calls) == (forward, backward)


def test_bytes_of_a_block_are_those_of_the_table(ranks):
    tensor = 2 * 12 * 32 * 4  # (B, n, D) of float32, on each of 4 ranks
    sent = {method: ranks(4, parity.count_block, 1, 4, method)[0] for method in METHODS}
    forward = {method: counted[0].bytes.total() for method, counted in sent.items()}
    backward = {method: counted[1].bytes.total() for method, counted in sent.items()}
    assert forward == {"gather": 6 * tensor, "ring": 6 * tensor, "all_to_all": 3 * tensor}
    assert backward == {"gather": 6 * tensor, "ring": 12 * tensor, "all_to_all": 3 * tensor}


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_stays_half(ranks, method):
    forward, _, *dtypes = ranks(2, parity.count_block, 1, 2, method, dtype=torch.bfloat16)[0]
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    assert forward.bytes.total() == ranks(2, parity.count_block, 1, 2, method)[0][0].bytes.total() / 2


def perfect_prediction():
    target = torch.randn(2, 5)
    prediction = target.clone().requires_grad_()
    difference, size = l2_norms(prediction - target, target, group=dist.group.WORLD)
    loss = (difference / size).mean()
    loss.backward()
    return loss.item(), prediction.grad.abs().max().item()


def test_a_perfect_prediction_has_no_nan(ranks):
    loss, gradient = ranks(2, perfect_prediction)[0]
    assert loss < 1e-15 and gradient == 0


def own_band():
    comm.build_mesh(torch.device("cpu"), Layout(comm.world_size(), cp=comm.world_size()))
    rows, columns = own_window((360, 720), 8)
    assert columns == slice(0, 720)
    return rows


def test_bands_are_whole_rows_of_patches_and_make_up_the_image(ranks):
    bands = ranks(4, own_band)
    assert [(b.stop - b.start) // 8 for b in bands] == [12, 11, 11, 11]
    assert bands[0].start == 0 and bands[-1].stop == 360
    assert all(a.stop == b.start for a, b in pairwise(bands))


def attention_by_blocks(device, dtype):
    """Output and gradients of attention, as the ring makes them of two blocks of keys, and as torch does in float64."""
    q, k, v, grad = torch.randn(4, 2, 3, 70, 16, dtype=dtype, device=device).unbind()
    attend, cut = attention_kernels.kernel(q, None), 37
    blocks = [(k[:, :, part], v[:, :, part]) for part in (slice(cut), slice(cut, None))]
    out, lse = attention._merge(*attend.forward(q, *blocks[0]), *attend.forward(q, *blocks[1]))
    parts = [attend.backward(grad, q, *block, out.to(dtype), lse) for block in blocks]
    ours = [
        out,
        parts[0][0] + parts[1][0],
        *(torch.cat(pair, 2) for pair in zip(parts[0][1:], parts[1][1:], strict=True)),
    ]
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    whole = F.scaled_dot_product_attention(*leaves)
    return ours, [whole, *torch.autograd.grad(whole, leaves, grad.double())]


@pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_a_fused_kernel_gives_the_parts_of_blocks_of_keys(device, dtype):
    torch.manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, serial in zip(*attention_by_blocks(device, dtype), strict=True):
        torch.testing.assert_close(ours.double(), serial, rtol=tolerance, atol=tolerance)


def test_the_memory_efficient_kernel_is_called_as_torch_declares_it():
    q, grad = (torch.empty(2, 3, 70, 16, device="meta") for _ in range(2))
    k, v = (torch.empty(2, 3, 33, 16, device="meta") for _ in range(2))
    assert attention_kernels.kernel(q, None, "cuda") is attention_kernels.CudaEfficient
    out, lse = attention_kernels.CudaEfficient.forward(q, k, v)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    parts = attention_kernels.CudaEfficient.backward(grad, q, k, v, out, lse)
    assert [part.shape for part in parts] == [q.shape, k.shape, v.shape]
