"""Aliases, element-wise functions and sugar: other names of what has rules."""

import re

import pytest
import torch
from torch.overrides import get_overridable_functions

from distributed.shard.core.tensor import RULES
from tests.support.marks import slow_but
from tests.support.shard_parity import Case, X, check_all

SUGAR = [  # x (3, 7, 4), y (3, 7, 4), z plain (4, 4)
    "torch.hstack((x, y))", "torch.hstack([x[0, :, 0], y[0, :, 0]])", "torch.vstack((x, y))", "torch.dstack((x, y))",
    "torch.vstack((x[0, 0], z[0]))", "torch.dstack((x[0, :, 0], y[0, :, 0]))",
    "torch.row_stack((x[0, :, 0], y[0, :, 1]))",
    "torch.column_stack((x[0, :, 0], y[0]))", "torch.hstack((x.sum(), y.mean()))", "torch.atleast_3d(x[0], y[0, :, 0])",
    "torch.atleast_1d(x.sum())", "torch.atleast_2d(x[0, :, 0])", "x.hsplit([2, 5])", "x.vsplit(3)",
    "torch.dsplit(x, 2)",
    "torch.tensordot(x, z, 1)", "torch.tensordot(x, y, dims=([0, 1], [0, 1]))", "torch.tensordot(x, y, ([1], [1]))",
    "torch.tensordot(x[0], y[0], 0)", "torch.tensordot(x, y, 3)", "torch.inner(x, z)",
    "torch.inner(x[0, :, 0], y[0, :, 0])",
    "torch.inner(x.sum(), y)", "torch.vdot(x[0, 0], y[0, 1])", "torch.vdot(x[0, :, 0] * 1j, y[0, :, 0] + 0j)",
    "torch.addr(z, x[0, 0], y[0, 1], beta=2)", "torch.addbmm(z, x.mT, y, alpha=0.5)",
    "torch.nansum(torch.where(x > 0.5, math.nan, x), 1)", "torch.nansum(x)",
    "torch.nanmean(torch.where(x > 1, math.nan, x))",
    "torch.where(x > 0.5, math.nan, x).nanmean((0, 2), keepdim=True)", "torch.roll(x, 5)", "x.roll(-3)", "x.ravel()",
    "torch.Tensor.__reversed__(x)", "torch.isin((x.detach() * 2).round(), torch.tensor([0.0, 1.0]))",
    "(x * 2).unsafe_chunk(2, 1)", "x.unsafe_split(3, 1)", "F.soft_margin_loss(x, y.detach().sign())",
    "F.poisson_nll_loss(x, y.detach().abs(), full=True, reduction='sum')",
    "F.hinge_embedding_loss(x, y.detach().sign())",
    "torch.arctan2(x, y)", "torch.less(x, y)", "x.greater_equal(z[0])", "torch.special.expit(x)", "(x * 1).fix_()",
    "torch.special.gammaln(x.abs() + 1)", "torch.special.ndtr(x)", "torch.special.psi(x.abs() + 1)", "torch.isreal(x)",
    "torch.special.multigammaln(x.abs() + 3, 2)", "(x * 2).subtract_(y)", "(x * 2).divide_(z[0])",
    "(x * 2).multiply_(3)",
    "x.detach().clone().lt_(y.detach())", "(x * 3).detach().short() * 2.0", "x.cdouble()", "torch.arccosh(x.abs() + 2)",
]  # fmt: skip


@pytest.mark.parametrize("world", slow_but([3], [2, 3], "another number of ranks"))
def test_sugar_gives_what_the_whole_gives(ranks, world):
    cuts = {2: [(1, {0: (5, 2)}), (2, None), (0, {0: (0, 3)})], 3: [(1, {0: (5, 0, 2)})]}[world]
    inputs = [X((3, 7, 4), (dim,), sizes) for dim, sizes in cuts]
    ranks(world, check_all, [Case(code, (x, x), ((4, 4),), (), torch.float64) for x in inputs for code in SUGAR])


OTHER_NAME = re.compile(r"^(?:Alias (?:for|of)|In-place version of) :\w+:`~?([\w.]+)", re.MULTILINE)
HOMES = (torch, torch.Tensor, torch.special, torch.nn.functional, torch.linalg)
# What changes the shape of its argument in place, or makes its argument whole, is refused by its name.
REFUSED = (
    "addbmm_ addmm_ addmv_ addr_ as_strided_ baddbmm_ cumprod_ cumsum_ squeeze_ swapaxes_ swapdims_ t_ transpose_ "
    "tril_ triu_ unsqueeze_"
)


def test_every_other_name_of_a_function_with_a_rule_has_one_or_is_refused():
    missing = set()
    overridable = get_overridable_functions()
    overridable.pop(getattr(torch, "foreach", None), None)  # lists of tensors, from torch 2.15 on
    for function in {f for functions in overridable.values() for f in functions}:
        found = OTHER_NAME.search(function.__doc__ or "")
        names = found[1].split(".")[-1:] if found else []
        if function not in RULES and any(getattr(home, name, None) in RULES for home in HOMES for name in names):
            missing.add(function.__name__)
    assert missing == set(REFUSED.split())


def test_every_special_function_of_each_element_has_a_rule():
    functions = [f for name, f in vars(torch.special).items() if callable(f) and name.islower() and name[0] != "_"]
    assert {f.__name__ for f in functions if f not in RULES} == set()
