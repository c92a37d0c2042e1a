"""Operations on whole tensors, and what may never see a rank's part alone: hooks, functions, transforms, scripts."""

import pytest
import torch

from distributed.shard.missing_rules import fallback
from distributed.shard_tensor import ShardTensor, set_fallback
from tests.support.shard_parity import Case, X, check_all, domain_mesh, draw, evaluate, split, without
from tools.instruments.counting import CollectiveCounter

ROWS = X((4, 6, 5), (1,))
SPLITS = {
    2: [ROWS, X((4, 6, 5), (1,), {0: (6, 0)}), X((4, 6, 5), (0,), {0: (1, 3)}), X((4, 6, 5))],
    3: [X((4, 6, 5), (1,), {0: (3, 2, 1)}), X((4, 6, 5), (2,))],
    4: [X((4, 6, 5), (1, 2)), X((4, 6, 5), (2, None)), X((4, 6, 5), (1, 0), {0: (5, 1), 1: (1, 3)})],
}
# No rule computes these, for one of the splits at least. x: the split tensor, y: a weight (5, 6).
WHOLE = [
    "x.renorm(2, 1, 0.5)",
    "torch.sort(x, 1)[0]", "list(torch.topk(x, 2, 1))[:1]", "x.reshape(5, 8, 3) * 2", "x.cumprod(1)", "x.median(1)[0]",
    "torch.linalg.svdvals(x)", "torch.linalg.inv(x[:, :5] + 9 * torch.eye(5).to(x.dtype))",
    "x.scatter(1, torch.zeros(4, 1, 5, dtype=torch.long), 2.0)", "x.flatten(1).unfold(1, 7, 3)",
    "x.flatten().reshape(10, 12).cumprod(1)", "torch.cdist(x, y.mT.expand(4, -1, -1))", "y.mT[:1].expand_as(x) * x",
    "x.index_add(1, torch.tensor([0, 0, 3]), y.mT[:3].expand(4, -1, -1))", "torch.gradient(x, dim=1)[0]",
    "x.masked_select(x > 0).cumprod(0)", "x.sum(1).sort(1)[0]",
    "torch.kron(x[0], y)", "torch.sparse.mm((y.detach() * (y > 0)).to_sparse(), x[0])",
]  # fmt: skip
IN_PLACE = ["z.index_fill_(1, torch.tensor([0, 4]), 3.0)", "z.cumprod_(1)", "z.__setitem__(z > 0, 2.0)",
            "z[:, 1:].copy_(z.flip(1)[:, 1:].sort(1)[0])",
            "with torch.no_grad(): torch.cumprod(z, 1, out=z)"]  # fmt: skip


def in_place(x, code):
    z = x * 1
    exec(code, {"torch": torch, "z": z})
    return z * 2


def gathering(function, *args):
    set_fallback("gather")
    try:
        return function(*args)
    finally:
        set_fallback("error")


def cases(size):
    mesh = (2, 2) if size == 4 else ()
    for x in SPLITS[size]:
        yield from (Case(code, (x,), ((5, 6),), mesh, torch.float64) for code in WHOLE)
        yield from (Case(in_place, (x,), (), mesh, torch.float64, {"code": code}) for code in IN_PLACE)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_has_no_rule_is_exact_on_whole_tensors(ranks, size):
    ranks(size, gathering, check_all, list(cases(size)))


def renormed_and_counted(x):
    part = split(draw(x.shape, torch.float32, 0), x, domain_mesh())
    with CollectiveCounter() as counter:
        y = part.renorm(2, 1, 0.5)
        (y * y).sum().backward()
    assert isinstance(y, ShardTensor) and y.spec.dims == part.spec.dims
    return dict(counter.calls), dict(counter.bytes), fallback.fallback_lines()


def test_a_fallback_gathers_once_forward_and_once_backward_and_says_so(ranks):
    x = X((40, 60, 50), (1,))
    calls, sent, said = ranks(2, gathering, renormed_and_counted, x)[0]
    assert calls == {"all_gather": 2} and sent == {"all_gather": 2 * 40 * 30 * 50 * 4}
    assert len(said) == 1 and said[0].endswith(
        "whole tensors (--domain_fallback gather): renorm: 1 calls, 0.5 MB gathered"
    )


def summed_over_split_rows(x):
    part = split(draw(x.shape, torch.float32, 0), x, domain_mesh())
    torch.einsum("bhw,hk->bk", part, torch.ones(6, 99_999)).relu().sum()  # larger than a part, and summed once
    (part.mean() + part.sum(1)).sum()  # smaller
    torch.bilinear(part.mT, part.mT, torch.ones(99, 6, 6))  # composed, of einsum among others
    return fallback.fallback_lines()


def test_a_large_result_that_a_rule_makes_whole_is_reported(ranks):
    said = ["Results that every rank has whole: einsum: 1.6 MB"]
    assert ranks(2, gathering, summed_over_split_rows, ROWS) == [said, said]


def of_a_library(x):
    kernels = torch.library.Library("kernels", "DEF")
    kernels.define("contraction(Tensor x) -> Tensor")
    kernels.impl("contraction", torch.neg, "CompositeExplicitAutograd")
    part = split(draw(x.shape, torch.float32, 0), x, domain_mesh())
    with pytest.raises(NotImplementedError, match=r"no rule for contraction of Spec\(\(4, 6, 5\), S\(1\)\)"):
        torch.ops.kernels.contraction(part)
    found = gathering(torch.ops.kernels.contraction, part)
    torch.testing.assert_close(found.full_tensor(), -part.full_tensor())


def test_an_operator_that_a_library_has_compiled_is_named_or_computed_on_whole_tensors(ranks):
    ranks(2, of_a_library, ROWS)


def own_part_alone(x, group, dim, sizes):
    return torch.cat([x] * len(sizes), dim)


def test_a_missing_gather_is_noticed(ranks):
    case = Case("x.renorm(2, 1, 0.5)", (ROWS,))
    assert all(ranks(2, gathering, without, "distributed.collectives._all_gather", own_part_alone, case))


def drawn_on_whole():
    torch.manual_seed(3)
    return split(torch.ones(6, 40), X((6, 40), (1,)), domain_mesh()).multinomial(5).full_tensor().tolist()


def test_random_operations_on_whole_tensors_are_alike_on_all_ranks(ranks):
    first, *others = ranks(3, gathering, drawn_on_whole)
    assert all(found == first for found in others)


def refused_in_place():
    x = split(draw((4, 6), torch.float32, 0), X((4, 6), (1,)), domain_mesh())
    y = x.detach()
    for code in ("x.reshape(3, 8).add_(1)", "x.data.mul_(2)", "x.sum(1).cumprod_(0)", "x.clone().resize_(2)"):
        with pytest.raises(NotImplementedError, match="ShardTensor: no rule"):
            evaluate(y, code=code)
    with pytest.raises(NotImplementedError, match=r"no rule for torch.vmap"):
        torch.vmap(lambda a: a / a.norm())(x)


def refused_with_the_fallback_on():
    x = split(draw((4, 6), torch.float32, 0), X((4, 6), (1,)), domain_mesh()).requires_grad_()
    weight = torch.ones(4, 6, requires_grad=True) * 1
    for why, operation in {
        "it is about memory": lambda: x.detach().untyped_storage(),
        "a sparse tensor that needs a gradient": lambda: torch.sparse.mm(weight[:, :4].to_sparse(), x),
        "a sparse result has no parts": lambda: x.detach().to_sparse(),
        "it gives its argument another shape": lambda: x.detach().clone().resize_(2),
        "a part of the sum": lambda: x.detach().sum(1).cumprod_(0),
    }.items():
        with pytest.raises(NotImplementedError, match=f"ShardTensor: no rule for .*{why}") as error:
            operation()
        # What was given already is no advice.
        assert "domain_fallback" not in str(error.value)


def test_with_the_fallback_on_a_refusal_says_why_it_does_not_help(ranks):
    ranks(2, gathering, refused_with_the_fallback_on)


def test_no_copy_stands_for_memory_that_others_share(ranks):
    ranks(2, gathering, refused_in_place)


# What user code sees of gradients.


class Normalized(torch.autograd.Function):
    """The identity, with a weight; the gradient of x is divided by its norm."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, x.sum(1)

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return (g * w + h.unsqueeze(1)) / g.norm(), (g * x).sum((0, 1)) / g.norm()


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g - g.mean()


def custom(x, w):
    y, z = Normalized.apply(x, w)
    return y.sin(), z.exp()


def unused_output(x, w):
    return Normalized.apply(x * 2, w)[0]


def identity(x):
    return Same.apply(x * 2).sin()


def hooked(x):
    y = x * 2
    y.register_hook(lambda g: g / g.norm())
    y.register_hook(lambda g: None)
    return y.sin()


def partial_hooked(x):
    y = x.sum(1)
    y.register_hook(lambda g: g.cumsum(0))
    return y.exp()


def module_hooks(x, w):
    layer = torch.nn.Linear(5, 5, bias=False).to(w.dtype)
    layer.register_full_backward_pre_hook(lambda module, out: (out[0] / out[0].norm(),))
    layer.register_full_backward_hook(lambda module, into, out: (into[0] - into[0].mean() + out[0].sum(),))
    return torch.func.functional_call(layer, {"weight": w}, (x * 2,)).sin()


FUNCTIONS = [(custom, (5,)), (unused_output, (5,)), (identity,), (hooked,), (partial_hooked,), (module_hooks, (5, 5))]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_hooks_and_functions_see_gradients_of_the_whole(ranks, size):
    mesh, splits = (2, 2) if size == 4 else (), SPLITS[size]
    cases = [Case(function, (x,), weights, mesh, torch.float64) for x in splits for function, *weights in FUNCTIONS]
    ranks(size, check_all, cases)


class PlainGradient(Same):
    @staticmethod
    def backward(ctx, g):
        return g.to_local()


def sees_no_part():
    """Nothing of torch computes with a part alone."""
    x = split(draw((4, 6), torch.float32, 0), X((4, 6), (1,)), domain_mesh())
    with pytest.raises(TypeError, match="must be a ShardTensor too"):
        PlainGradient.apply(x * 1).sum().backward()

    def unit(a):
        return a / a.norm()

    y, messages = x.detach(), []
    for operation in (
        lambda: torch.vmap(unit)(y), lambda: torch.func.grad(lambda a: a.norm())(y),
        lambda: torch.func.vjp(unit, y), lambda: torch.func.jacrev(unit)(y),
        lambda: torch.func.functionalize(unit)(y), lambda: torch.func.jvp(unit, (y,), (y,)),
        lambda: torch.jit.script(unit)(y), lambda: torch.jit.trace(unit, y),
        lambda: torch.jit.trace(unit, torch.ones(4, 6))(y), lambda: torch.tensor(y), lambda: torch.tensor([y.sum()]),
        lambda: torch.zeros(2).new_tensor(y),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError) as error:
            operation()
        messages.append(str(error.value).split(" of ")[0])
        assert "--domain_fallback gather" in str(error.value)
    with pytest.raises(Exception, match="cannot be the input of a compiled function"):
        torch.compile(unit, backend="eager")(y)
    return messages


def test_what_would_see_a_part_alone_is_refused_by_its_name(ranks):
    messages = ranks(2, sees_no_part)[0]
    for message, name in zip(
        messages,
        ["torch.vmap", *["transform"] * 3, "functionalize", "_make_dual", "scripted", "trace", "scripted",
         "tensor", "tensor", "new_tensor"],
        strict=True,
    ):  # fmt: skip
        assert message.startswith("ShardTensor: no rule for") and name in message, (message, name)


def still_plain():
    """Anything but a ShardTensor passes as before, in compiled and scripted code too."""
    assert torch.tensor([1, 2]).tolist() == [1, 2] and torch.zeros(1).new_tensor([3.0]).item() == 3
    assert torch.equal(torch.vmap(torch.sin)(torch.ones(3, 2)), torch.ones(3, 2).sin())
    assert torch.func.grad(torch.sum)(torch.ones(2)).tolist() == [1, 1]
    scripted = torch.jit.script(with_a_constant)
    assert scripted(torch.ones(2)).tolist() == [2, 3]
    compiled = torch.compile(with_a_constant, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 3]
    x = torch.ones(2, requires_grad=True)
    Same.apply(x)[0].backward()
    assert x.grad.tolist() == [0.5, -0.5]


def with_a_constant(x):
    return x + torch.tensor([1.0, 2.0])


def test_plain_tensors_are_as_they_were(ranks):
    ranks(2, still_plain)
