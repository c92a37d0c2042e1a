"""Views, parts, joins, products and losses of ShardTensors against those of the whole tensors."""

import importlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check, domain_mesh, draw, split


def evaluate(*tensors, code):
    """A Python expression of x, y, z: the tensors, plain weights last."""
    return eval(code, {"torch": torch, "F": F, **dict(zip("xyz", tensors, strict=False))})


ANY_PART = [  # of x (3, 7, 4)
    "x[:, 1:]", "x[:, :-1]", "x[:, 2:6]", "x[:, 1::2]", "x[:, ::3]", "x[:, 6:]", "x[:, 5:2]", "x[..., 1:3, :]",
    "x[:, 3]", "x[:, -1]", "x[1]", "x[0, 2, 3]", "x[:, 3:4, None]", "x[None, ..., 0]", "x[...]", "x[:, :, [0, 2, 2]]",
    "x[[2, 0]]", "x[:, 1:5, torch.tensor([[0, 1], [3, 3]])]", "x[torch.tensor([0, 2]), :, torch.tensor([1, 3])]",
    "x[1, :, torch.tensor([1, 3])]", "x[:, None, :, torch.tensor([1, 3])]", "x[torch.tensor(1), 2:]",
    "x[[0, 1], 2:4, None, [1, 3]]", "x.select(1, -2)", "x.narrow(1, 2, 4)", "torch.narrow(x, -1, 1, 2)",
    "x.index_select(2, torch.tensor([3, 1]))", "x.split(3, 1)", "torch.split(x, [2, 0, 5], dim=1)",
    "x.split([1, 3], -1)",
    "x.chunk(3, 1)", "x.chunk(2, dim=2)", "torch.tensor_split(x, 3, dim=1)", "x.tensor_split([2, 5], 1)",
    "x.unbind(1)", "torch.unbind(x)", "x[:, 1:] - x[:, :1]", "(x > 0)[:, 2]", "x.sum(0)[3]",
    "x[:, 2].square() + x[:, 3]",
    "x.flip(1)", "x.flip(0, 1)", "torch.flip(x, dims=(2,))", "x.roll(2, 1)", "x.roll(-1, 1)", "x.roll((1, 9), (0, 1))",
    "torch.roll(x, 1)", "x.repeat(1, 2, 1)", "x.repeat(2, 1, 1, 3)", "x.tile(2, 1)", "torch.tile(x, (2,))",
    "x.repeat_interleave(2, 1)", "torch.repeat_interleave(x, 3, dim=2)", "x.tril()", "x.triu(-1)", "x.mT.tril(2)",
    "torch.triu(x, 1)", "x.gather(2, torch.tensor([[[3], [0]]]).expand(3, -1, 1).repeat(1, 4, 1)[:, :7].long())",
    "torch.take_along_dim(x, x.detach().argmax(2, keepdim=True), 2)", "x.gather(2, x.detach().argmax(2, keepdim=True))",
]  # fmt: skip
VIEWS = [
    "x.view(3, 7, 2, 2)", "x.reshape(21, 4)", "x.reshape(shape=(3, 28))", "x.flatten()", "x.ravel()", "x.flatten(1)",
    "x.view_as(x)", "x.reshape_as(torch.empty(21, 4))", "x.unflatten(-1, (2, -1))", "x.flatten(1).unflatten(1, (7, 4))",
    "x.flatten(0, 1).unflatten(0, (3, 7))[:, 2:5]", "x.permute(2, 0, 1)", "torch.permute(x, dims=(1, 0, 2))",
    "x.transpose(0, -1)", "torch.swapaxes(x, 0, 1)", "x.mT", "x.adjoint()", "x[0].T", "x[0].t()", "x[:, :, 0].H",
    "x.movedim(0, -1)", "torch.movedim(x, (0, 1), (1, 0))", "x.unsqueeze(-1).expand(-1, -1, -1, 3)",
    "x.expand(2, 3, 7, 4)",
    "x[:1].expand_as(x)", "torch.broadcast_to(x, (2, 3, 7, 4))", "torch.broadcast_tensors(x[:1], x)",
    "x[:, :, :1].squeeze(2)",
    "x[:1].squeeze()", "x.unsqueeze(0).squeeze((0,))", "x.movedim(1, 0).reshape(7, 12)",
    "x.repeat(1, 2, 1).flatten(1) * 2",
    "F.pixel_shuffle(x.permute(2, 0, 1), 2)", "x.repeat_interleave(2, 0)[:, :, :2].unflatten(0, (1, 6))",
]  # fmt: skip
JOINS = [  # x, y (3, 7, 4), z plain (3, 1, 4)
    "torch.cat([x, y], 0)", "torch.cat([x, y], dim=1)", "torch.cat((x, y, x), -1)", "torch.cat([z, x], 1)",
    "torch.cat([x, z], 1)", "torch.cat([z, x, y], dim=1)", "torch.cat([x[:, -2:], x, x[:, :1]], 1)",
    "torch.cat([x, x.square()[:, :0]], 1)",
    "torch.cat([x[..., :1], z.expand(3, 7, 4)], -1)", "torch.stack([x, y])", "torch.stack((x, y, x), -1)",
    "torch.stack([x, z.expand(3, 7, 4)], 1)",
    "torch.stack([x.sum(1), y.sum(1)])", "torch.stack([x.sum(1), y.mean(1)]).square()",
    "torch.cat([x.sum(1), y.sum(1)])",
    "torch.cat([x.sum(1, keepdim=True), z], 1)", "torch.concat([x.sum(1), x[:, 0]], 1)",
    "torch.cat([z.mean(1), x.sum(1)])",
    "torch.cat([x, y.flip(1)], 0)", "torch.cat([x[:, 1:], x[:, :1]], 1) * y",
]  # fmt: skip
PRODUCTS = [  # x (3, 7, 4), y (3, 7, 4), z plain (4, 5)
    "x @ z", "torch.matmul(x, z)", "x @ y.mT", "x.mT @ y", "torch.bmm(x.mT, y)", "x[0].mm(z)", "x[0].mT @ x[0]",
    "x @ z[:, 0]",
    "x[0].mv(z[:, 0])", "x[0, 0] @ z", "z.mT @ x.mT", "x.mT[:, :, None] @ y[:, :, None, :].transpose(1, 2)[:, :1]",
    "x @ y[0].mT",
    "torch.einsum('bnd,de->bne', x, z)", "torch.einsum('bnd,bmd->bnm', x, y)", "torch.einsum('bnd,bnd->', x, y)",
    "torch.einsum('...nd,de', x, z)", "torch.einsum('bnd,bnd,de->be', x, y, z)", "torch.einsum('bnd->dbn', x)",
    "torch.einsum('bnd,bne->bde', x, y)", "torch.einsum('n d, n d -> d', x[0], y[0])", "torch.einsum('bnd->d', x)",
    "torch.addmm(y[0, :, 0][:, None], x[0], z, beta=2, alpha=0.5)", "torch.baddbmm(y.mT @ y, x.mT, y)",
    "torch.outer(x[0, :, 0], y[0, 0])", "torch.outer(z[:, 0], x[0, :, 0])", "torch.dot(x[0, :, 0], y[0, :, 1])",
    "F.linear(x, z.mT)", "F.linear(x.mT, y[0].mT)", "F.linear(x, z.mT, z[0])", "F.linear(x.sum(1), z.mT, z[0])",
    "F.linear(x.mT, torch.ones(2, 7), z[0, :2])", "F.linear(x.mT, torch.ones(2, 7)).tanh() @ z[:2]", "x.mean(1) @ z",
    "(x @ z).softmax(1)",
    "F.linear(x.flatten(1), torch.ones(2, 28) + 0 * z[0, 0], z[0, :2])",
]  # fmt: skip
REDUCTIONS = ("mean", "sum", "none")
LOSSES = [  # x, y (3, 7, 4), z plain (7, 4)
    *(f"F.{name}, reduction='{reduction}')" for reduction in REDUCTIONS for name in (
        "mse_loss(x, y", "l1_loss(x, y", "smooth_l1_loss(x, y", "huber_loss(x, y", "kl_div(x, y.softmax(1)",
        "binary_cross_entropy_with_logits(x, y.sigmoid()")),
    "F.mse_loss(x, z.expand(3, 7, 4))", "F.mse_loss(x, y, weight=z.detach().abs().expand(3, 7, 4))",
    "F.huber_loss(x, y, delta=0.3, weight=z.detach().abs().expand(3, 7, 4))", "F.smooth_l1_loss(x, y, beta=0.2)",
    "F.kl_div(x.log_softmax(1), y.log_softmax(1), reduction='batchmean', log_target=True)",
    "F.binary_cross_entropy_with_logits(x, (y > 0).float(), z.detach().abs(), pos_weight=torch.arange(4.))",
    "F.binary_cross_entropy(x.sigmoid(), y.sigmoid())", "torch.nn.MSELoss()(x, y)",
    "torch.nn.L1Loss(reduction='sum')(x, y)",
]  # fmt: skip
CLASS_LOSSES = [  # x (3, 4, 7): 4 classes; y (3, 7)
    *(f"F.cross_entropy(x, {rest}, reduction='{reduction}')" for reduction in REDUCTIONS for rest in (
        "(y * 2).long() % 4", "(y * 2).long() % 4, weight=torch.arange(4.)", "(y * 2).long() % 4, ignore_index=1",
        "(y * 2).long() % 4, label_smoothing=0.1", "(2 * x.detach()).softmax(1), label_smoothing=0.1",
        "(y * 2).long() % 4, weight=torch.arange(4.), label_smoothing=0.2, ignore_index=2",
        "(torch.arange(21) % 4).view(3, 7)[:len(x)], ignore_index=3")),
    *(f"F.nll_loss(x.log_softmax(1), (y * 2).long() % 4, torch.arange(4.), reduction='{r}')" for r in REDUCTIONS),
    "F.cross_entropy(x[0].mT, torch.arange(7) % 4)", "F.cross_entropy(x[0].mT, (y * 2).long()[0] % 4)",
    "F.one_hot((y * 2).long() % 4)", "F.one_hot((y * 2).long() % 4, num_classes=6)",
]  # fmt: skip
TABLES = [
    "F.embedding((x * 2).long() % 5, y)",
    "F.embedding((x * 2).long() % 5, y, padding_idx=1)",
    "y[(x * 2).long() % 5]",
]


def write(x, y, index, value):
    out = x * 1
    out[index] = y[index] if value is None else value
    return out * 2


INDICES = [
    (slice(None), slice(1, 5)),
    (..., slice(0, 2)),
    (0,),
    (slice(None), slice(None, None, 2), 1),
    (slice(0, 2), None),
]


def layouts(ranks):
    """x (3, 7, 4) split evenly, unevenly, with empty parts; rows, samples, columns, and not at all."""
    yield X((3, 7, 4), (1,), {0: (*[0] * (ranks - 2), 2, 5)})
    yield X((3, 7, 4), (2,), {0: (3, *[0] * (ranks - 2), 1)})
    if ranks == 2:
        yield X((3, 7, 4), (1,))
        yield X((3, 7, 4), (1,), {0: (7, 0)})
        yield X((3, 7, 4), (0,), {0: (1, 2)})
        yield X((3, 7, 4))


def pairs(ranks):
    """x and y split alike, differently, and one of them not."""
    yield from ((how, how) for how in layouts(ranks))
    yield X((3, 7, 4), (1,)), X((3, 7, 4), (2,))
    if ranks == 2:
        yield X((3, 7, 4), (1,)), X((3, 7, 4))
        yield X((3, 7, 4)), X((3, 7, 4), (1,), {0: (0, 7)})
        yield X((3, 7, 4), (1,)), X((3, 7, 4), (1,), {0: (2, 5)})
        yield X((3, 7, 4), (2,)), X((3, 7, 4), (0,))


def plane_pairs():
    yield X((3, 7, 4), (1, 2)), X((3, 7, 4), (1, 2))
    yield X((3, 7, 4), (1, None), {0: (7, 0)}), X((3, 7, 4), (None, 1))
    yield X((3, 7, 4), (0, 1), {0: (1, 2), 1: (2, 5)}), X((3, 7, 4), (1, 2))


def classes(ranks):
    yield X((3, 4, 7), (2,)), X((3, 7), (1,))
    yield X((3, 4, 7), (2,), {0: (*[0] * (ranks - 2), 2, 5)}), X((3, 7))
    yield X((3, 4, 7), (0,), {0: (1, 2, *[0] * (ranks - 2))}), X((3, 7), (0,))
    yield X((3, 4, 7)), X((3, 7), (1,))
    yield X((1, 4, 7), (0,)), X((1, 7), (1,))


def table_of(ranks, pairs, mesh=()):
    """All cases of one world size."""
    found, pairs = [], list(pairs)
    settings = {"mesh": mesh}
    for x in {str(x): x for x, _ in pairs}.values():
        found += [Case(evaluate, (x,), keywords={"code": code}, **settings) for code in ANY_PART + VIEWS]
        found += [Case(evaluate, (x,), ((5, 3),), keywords={"code": code}, **settings) for code in TABLES]
    for x, y in pairs:
        for codes, weights in [(JOINS, ((3, 1, 4),)), (PRODUCTS, ((4, 5),)), (LOSSES, ((7, 4),))]:
            found += [Case(evaluate, (x, y), weights, keywords={"code": code}, **settings) for code in codes]
        for index in INDICES:
            found += [Case(write, (x, y), keywords={"index": index, "value": v}, **settings) for v in (None, 3.0)]
    if not mesh:
        found += [Case(evaluate, how, keywords={"code": code}) for how in classes(ranks) for code in CLASS_LOSSES]
    return found


def refusals(cases):
    """Check the cases; returns which of them no rule computes."""
    found = set()
    for case in cases:
        try:
            check(case)
        except NotImplementedError as refused:
            assert "no rule for" in str(refused)
            found.add(case.keywords.get("code", "x[...] = y"))
    return found


# Indices that are tensors, or single rows that are written, want a whole dimension.
MAY_BE_REFUSED = {
    *(code for code in ANY_PART if any(part in code for part in ("tensor", "[[", ", [", "gather", "take"))),
    "torch.roll(x, 1)", "x.view(3, 7, 2, 2)", "x.unflatten(-1, (2, -1))", "F.pixel_shuffle(x.permute(2, 0, 1), 2)",
    "x[:1].expand_as(x)", "torch.broadcast_tensors(x[:1], x)", "x[...] = y",
}  # fmt: skip


@pytest.mark.parametrize("size", slow_but([3], [2, 3, 4], "rules on other numbers of ranks"))
def test_rules_give_what_the_whole_tensors_give(ranks, size):
    refused = ranks(size, refusals, table_of(size, pairs(size)))
    assert all(found == refused[0] for found in refused)
    assert refused[0] <= MAY_BE_REFUSED


@pytest.mark.slow("four ranks")
def test_rules_on_a_plane_of_ranks_give_what_the_whole_tensors_give(ranks):
    refused = ranks(4, refusals, table_of(4, plane_pairs(), (2, 2)))
    assert refused[0] <= MAY_BE_REFUSED


def test_of_rows_that_are_split_hardly_anything_is_refused(ranks):
    rows = X((3, 7, 4), (1,))
    assert ranks(2, refusals, table_of(2, [(rows, rows)]))[0] == {"torch.roll(x, 1)"}


def without_a_rule():
    x = split(draw((4, 6), torch.float32, 0), X((4, 6), (1,)), domain_mesh())
    messages = []
    for operation in (
        torch.linalg.svd,
        lambda x: x[0, x.argmax(1)],
        lambda x: F.cross_entropy(x, x.argmax(1)),
    ):
        with pytest.raises(NotImplementedError) as error:
            operation(x)
        messages.append(str(error.value))
    return messages


def test_what_has_no_rule_is_refused_with_two_ways_out(ranks):
    for messages in ranks(2, without_a_rule):
        assert "no rule for linalg_svd of Spec((4, 6), S(1))" in messages[0]
        assert all("redistribute" in message and "full_tensor" in message and "@" in message for message in messages)
        assert "indices that are a ShardTensor" in messages[1] and "classes are split" in messages[2]


@st.composite
def chains(draw_):
    """An expression of up to four operations, one after the other, of a tensor with any split."""

    def number(low, high):
        return draw_(st.integers(low, high))

    cuts = [tuple(number(0, 4) for _ in range(2)) for _ in range(2)]
    dims = draw_(st.permutations([0, 1, 2]))[:2]
    shape = [number(1, 4) for _ in range(3)]
    for dim, sizes in zip(dims, cuts, strict=True):
        shape[dim] = sum(sizes)
    code, y = "x", torch.zeros(shape)
    for _ in range(number(1, 4)):
        if not y.dim():
            break
        d, n = number(-y.dim(), y.dim() - 1), number(-3, 3)
        before, keep = ":, " * (d % y.dim()), bool(number(0, 1))
        step = draw_(st.sampled_from([
            f".sum({d}, {keep})", f".mean({d}, keepdim={keep})", f".amax({d}, {keep})", f".var({d}, correction=0)",
            f"[{before}{n}:]", f"[{before}:{n}]", f"[{before}::2]", f"[{before}{n}]", f".softmax({d})", f".flip({d})",
            f".transpose({d}, 0)", ".flatten()", ".flatten(-2)", f".unsqueeze({d})",
            ".squeeze()", f".unflatten({d}, (-1, 2))",
            f".roll({n}, {d})", f".cumsum({d})", f".logsumexp({d})", f".repeat_interleave(2, {d})", " * 2 - 1",
            ".sin()",
            ".square().mean()", f".max({d}).values", f".chunk(2, {d})[-1]", f".std({d}, correction=0, keepdim={keep})",
        ]))  # fmt: skip
        try:
            y = evaluate(y, code="x" + step)
        except (RuntimeError, IndexError):
            continue
        code = f"({code}){step}"
    return Case(evaluate, (X(tuple(shape), tuple(dims), dict(enumerate(cuts))),), (), (2, 2), keywords={"code": code})


def test_any_chain_of_operations_is_exact_or_refused(ranks):
    found = []

    @settings(max_examples=300, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(chains())
    def collect(case):
        x = torch.randn(case.inputs[0].shape, requires_grad=True)
        y = evaluate(x, **case.keywords)
        if x.numel() and y.isfinite().all():
            y.sum().backward()
            if x.grad.isfinite().all() and x.grad.abs().max() > 1e-3:  # not a gradient of rounding errors alone
                found.append(case)

    collect()
    refused = ranks(4, refusals, found)[0]
    assert len(refused) < len(found) / 4


WITHOUT = [  # module, the collective that is taken out of it, an expression, what is wrong then
    ("rules.normalization", "reduce_from_region", "F.layer_norm(x, (7, 4))", "gradient of input 0"),
    ("rules.reductions", "gather_from_region", "x.var(1)", "output 0"),
    ("operands", "copy_to_region", "x.softmax(1)", "gradient of input 0"),
    ("operands", "copy_to_region", "x @ x.mT", "gradient of input 0"),
    (
        "rules.attention",
        "copy_to_region",
        "F.scaled_dot_product_attention(x, x[:, 2:5], x[:, 2:5])",
        "gradient of input 0",
    ),
    ("operands", "copy_to_region", "F.grid_sample(x[:, None], x[..., None, :2].tanh())", "gradient of input 0"),
]


def missed(module, name, code):
    """What the comparison says of a rule that does not communicate."""
    module = importlib.import_module(f"distributed.shard.{module}")
    communicate = getattr(module, name)
    setattr(module, name, lambda x, *args: x)
    try:
        check(Case(evaluate, (X((3, 7, 4), (1,), {0: (3, 4)}),), keywords={"code": code}))
    except AssertionError as error:
        return str(error)
    finally:
        setattr(module, name, communicate)


@pytest.mark.parametrize(("module", "name", "code", "wrong"), WITHOUT)
def test_a_missing_collective_is_noticed(ranks, module, name, code, wrong):
    assert any(found and wrong in found for found in ranks(2, missed, module, name, code))
