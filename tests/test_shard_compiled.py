"""ShardTensors under torch.compile: rules give the same, and what asks for no rule is refused by name and line."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.variables import torch_function
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode

from distributed.shard.core import compiled
from distributed.shard.core.spec import spec_of
from distributed.shard_tensor import part_of, wrap
from tests.support.compiled_parity import check_compiled
from tests.support.marks import needs_torch
from tests.support.shard_parity import Case, X, domain_mesh, draw
from tests.test_shard_names import SUGAR
from tests.test_shard_norms import NORMS
from tests.test_shard_rules import COMPOSED, STRIDED, table_of
from tests.test_shard_weights import IMAGE, weights_of
from tests.test_shard_windows import token_cases

pytestmark = needs_torch((2, 13), "cannot trace the rules of ShardTensor")
ROWS = X((3, 7, 4), (1,), {0: (5, 2)})
KINDS = [  # of x and y (3, 7, 4), z plain (4, 5)
    "torch.cat((x, y), 1)", "1 - x + abs(y) ** 2 + (x * 1).index_fill_(2, torch.tensor([1]), 0).real",
]  # fmt: skip
MORE_KINDS = [
    "torch.stack((x, y, x), -1) + torch.einsum('bnd,bmd->bnm', (x, y)).sum()", "sum(x) * 2",
    "2 ** y + 1 / (x.square() + 1) + 7 // (x.detach() + 9) + 9 % (x.detach() + 20) + x % 2",
    "F.cosine_similarity(x, y)",
    "torch.cat(tensors=(x, z.mT[:3, None]), dim=1)", "torch.concat((x, y), 2)",
    "torch.meshgrid((x[0, :, 0], y[0, 0]), indexing='xy')[1]", "torch.broadcast_tensors(*(x[:, :, :1], y))[0]",
    "(x * 1j).imag", "(x * 1).mul_(2)", "x @ z", "x[:, 1:5].softmax(1)", "x.flatten(1)", "F.layer_norm(x, (4,))",
    "torch.rot90(x, 1, (1, 2))", "torch.fft.fft(x, dim=1).real", "x.scatter(2, torch.zeros(3, 7, 1).long(), 3.0)",
    "F.pad(x, (1, 2))", "x.var(1)", "x.chunk(2, -1)", "x + z[:, 0]",
]  # fmt: skip
# What no graph can hold. A size depends on values, the ranks would be asked, or torch does not trace it.
REFUSED = {
    *STRIDED, "x[torch.tensor(1), 2:]", "torch.unique((x.detach() * 2).round())",
    "x[:, torch.arange(7) % 2 == 0]", "x[0][x[0] > 0]", "x[:1][y[:1] > 0]", "x[0].masked_select(x[0] > 9)",
    "x[0][y[0, :, 0] > 0]", "x[y > 0]", "x[x[..., 0] > 0]", "x.transpose(1, 2)[y.transpose(1, 2) > 0]",
    "x.flatten(1)[y.flatten(1) > 0] * 2", "x.flatten()[y.flatten() > 0]", "x[(z[0] > 9) & (y > 0)]",
    "x.masked_select(torch.arange(84).view(3, 7, 4) % 3 == 1)", "F.one_hot((y * 2).long() % 4)",
    "F.gaussian_nll_loss(x, y, x.square())", "x * x.new_ones(3, 1, 1) + x.new_tensor([1.0, 2, 3, 4])",
    "layer(transformer(), x.transpose(0, 1), mask=causal(7))",
    "layer(mha(), x, x, x, key_padding_mask=torch.arange(21).view(3, 7) % 7 > 4, need_weights=False)[0]",
    *(code for code in COMPOSED if "recurrent(" in code),
    *(case.function for case in weights_of(IMAGE, ["a sum over the ranks"]) if "gaussian" in case.function),
}  # fmt: skip


def in_a_mode(codes, backend):
    """Where torch has a mode, whose rules of attributes the tracer would ask for without end."""
    with torch.device("cpu"):
        return check_compiled([Case(code, (ROWS, ROWS), ((4, 5),), (), torch.float64) for code in codes], backend)


MORE = pytest.param(KINDS + MORE_KINDS, "aot_eager", marks=pytest.mark.slow("other kinds, and the backward graph"))


@pytest.mark.parametrize(("codes", "backend"), [(KINDS, "eager"), MORE], ids=["few", "many"])
def test_a_rule_of_each_kind_compiles(ranks, codes, backend):
    assert ranks(2, in_a_mode, codes, backend) == [{}, {}]


UNLIKE = [  # graphs that differ between ranks: one sends equal zeros for two rows, or has no part of a vector
    "torch.stack((x[:, 0].exp(), x[:, 1].exp()))", "torch.cat((x[0, :, 0], y[0, :, 0]))",
]  # fmt: skip


def test_ranks_whose_graphs_differ_send_the_same(ranks):
    assert ranks(2, in_a_mode, UNLIKE, "aot_eager", timeout=120) == [{}, {}]


@torch._dynamo.allow_in_graph
def of_a_library(x, others=()):
    return x * 1


UNASKED = {  # {the name in the message: what asks for no rule, or has none}
    "of_a_library": lambda x: of_a_library(x) + 1,
    "of_a_library in": lambda x: of_a_library(1, others=[{"a": (x,)}]) + 1,
    "_foreach_add": lambda x: torch._foreach_add((x, x), 1)[0],
    "as_strided": lambda x: torch.as_strided(x, (2,), (1,)),
    "asarray": lambda x: torch.from_numpy(np.asarray(x)),
    "multi_dot": lambda x: torch.linalg.multi_dot((x[0], x[0].mT)),
    "sin": lambda x: torch.ops.aten.sin(x),
    "depends on values": lambda x: x[x > 0],
    "depends on": lambda x: x if x.sum() > 0 else -x,
    "histc": lambda x: torch.histc(x[0] * 2),
}


def region_of(function):
    spec = spec_of(domain_mesh(), ROWS.shape, [Shard(1)], ROWS.sizes)
    part = part_of(draw(ROWS.shape, torch.float32, 0), spec).detach()
    torch._dynamo.reset()
    return torch.compile(lambda part: function(wrap(part, spec)), backend="eager", fullgraph=True), part


class Passing(TorchFunctionMode):
    """A mode that stands between a model and torch, as that of plan.py check."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def refusals():
    found = {}
    for name, function in UNASKED.items():
        call, part = region_of(function)
        with Passing(), pytest.raises(TorchDynamoException) as error:
            call(part)
        found[name] = compiled.refusal_of(error.value), function.__code__.co_firstlineno
    return found


def test_what_asks_for_no_rule_is_refused_by_its_name_and_the_line_of_the_model(ranks):
    for name, (message, line) in ranks(2, refusals)[0].items():
        assert name in message and f'test_shard_compiled.py", line {line}, in <lambda>' in message, message
        assert message.count("\n") == 0


def overlooked():
    """Where a release of torch finds no ShardTensor in a sequence, or has other names."""
    call, part = region_of(lambda x: torch.cat((x, x), 2) * x.mean())
    with (
        mock.patch.object(torch_function, "_flatten_vts", list),
        pytest.raises(TorchDynamoException, match="no rule for cat in compiled code"),
    ):
        call(part)
    call, part = region_of(lambda x: x * 2)
    with (
        mock.patch.object(compiled, "is_guarded", False),
        pytest.raises(TorchDynamoException, match="cannot compile ShardTensors"),
    ):
        call(part)


def test_without_the_mends_a_tuple_is_refused_and_nothing_is_silent(ranks):
    ranks(2, overlooked)


def tables(backend, first, count):
    """A share of all expressions, by one layout."""
    cases = table_of(2, [(ROWS, ROWS)])
    cases += [Case(code, (X((2, 6, 5, 4), (2,)),), weights) for code, weights in NORMS.items()]
    cases += [Case(code, (ROWS, ROWS), ((4, 4),), (), torch.float64) for code in SUGAR]
    cases += [*weights_of(IMAGE, ["a sum over the ranks"]), *token_cases(2)]
    known = [case for case in cases if case.function in REFUSED]
    others = [case for case in cases if case.function not in REFUSED]
    alone = [refused for case in known[first::count] for refused in check_compiled([case], backend)]
    return set(alone), check_compiled(others[first::count], backend)


COUNT = 6
SHARES = [*(("eager", first) for first in range(COUNT)), ("aot_eager", 0)]


@pytest.mark.slow("every expression of the table of rules in a graph")
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "first"), SHARES)
def test_all_rules_compile_or_are_refused(ranks, backend, first):
    for refused, others in ranks(2, tables, backend, first, COUNT, timeout=900):
        assert refused <= REFUSED and others == {}
