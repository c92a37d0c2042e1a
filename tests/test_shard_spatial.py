"""Properties of all operations of images that are split: convolution, pooling, interpolation and padding."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from distributed.shard_tensor import local
from tests.support.shard_parity import Case, X, check_all, domain_mesh, errors, evaluate, split
from tools.instruments.counting import CollectiveCounter

EVERYWHERE = [
    "F.max_pool2d(x, 3, 2, 1)", "F.avg_pool2d(x, 3, 2, 1)", "F.adaptive_avg_pool2d(x, (4, 5))",
    "F.pad(x, (1, 2, 0, 3), mode='circular')", "F.pad(x, (1, 2, 0, 1, 2, 1))",
]  # fmt: skip


def test_samples_or_channels_may_be_split_and_samples_may_be_missing(ranks):
    samples, channels = X((3, 4, 9, 6), (0, 2), {0: (2, 1), 1: (5, 4)}), X((2, 4, 9, 6), (1, 3), {1: (4, 2)})
    unbatched = X((4, 9, 6), (1, 2), {0: (5, 4), 1: (4, 2)})
    cases = [Case(code, (x,), (), (2, 2)) for x in (samples, channels, unbatched) for code in EVERYWHERE]
    cases += [Case("F.interpolate(x, scale_factor=1.5)", (x,), (), (2, 2)) for x in (samples, channels)]
    code, weights = "F.conv2d(x, y, z, stride=2, padding=1)", ((6, 4, 3, 3), (6,))
    cases += [Case(code, (x,), weights, (2, 2)) for x in (samples, unbatched)]
    ranks(4, check_all, cases)


BF16 = {
    "F.conv2d(x, y, z, padding=1)": ((8, 8, 3, 3), (8,)),
    "F.conv2d(x, y, z, stride=3)": ((8, 8, 3, 3), (8,)),
    "F.conv_transpose2d(x, y, z, stride=2, padding=1)": ((8, 8, 4, 4), (8,)),
    "F.avg_pool2d(x, 3, 2, 1)": (),
    "F.adaptive_avg_pool2d(x, (7, 5))": (),
    "F.interpolate(x, scale_factor=1.7, mode='bilinear')": (),
}


@pytest.mark.parametrize("code", BF16)
def test_bf16_is_as_exact_as_of_the_whole(ranks, code):
    case = Case(code, (X((2, 8, 64, 32), (2,), {0: (37, 27)}),), BF16[code], dtype=torch.bfloat16)
    for plain, found in ranks(2, errors, case)[0]:
        assert found <= 1.2 * plain


def bytes_sent(code, sizes, kernel):
    part = split(torch.randn(1, 4, sum(sizes), 16), X((), (2,), {0: sizes}), domain_mesh())
    with CollectiveCounter() as counted:
        evaluate(part, torch.randn(6, 4, kernel, kernel), code=code)
    return dict(counted.calls), counted.bytes["all_to_all"]


def test_only_rows_that_windows_share_are_sent(ranks):
    for code, sizes, kernel in (
        ("F.conv2d(x, y, stride=8)", (24, 16), 8),
        ("F.interpolate(x, scale_factor=2)", (5, 4), 1),
        ("F.max_pool2d(x, 2)", (6, 4), 1),
    ):
        assert ranks(2, bytes_sent, code, sizes, kernel) == [({}, 0)] * 2
    one_row = 4 * 4 * 16  # of 4 channels
    found = ranks(2, bytes_sent, "F.conv2d(x, y, stride=3)", (5, 4), 3)
    assert found == [({"all_to_all": 1}, 0), ({"all_to_all": 1}, one_row)]


UNCHANGED = [
    "F.pad(x, (0, 0, 1, 1))", "F.pad(x, (0, 0, 1, 1), mode='reflect')", "F.pad(x, (0, 0, 1, 1), mode='replicate')",
    "F.interpolate(x, (12, 3))", "F.interpolate(x, (12, 3), mode='bilinear')", "F.adaptive_avg_pool2d(x, (12, 3))",
    "F.avg_pool2d(x, 1)",
]  # fmt: skip


def check_results_are_new():
    """Also where a rank's part of the result is what it had: its input stays when the result changes in place."""
    for code in UNCHANGED:
        x = split(torch.zeros(1, 2, 12, 3), X((), (2,), {0: (4, 4, 4)}), domain_mesh())
        local(evaluate(x, code=code)).add_(1)
        assert not local(x).any(), code


def test_results_share_no_memory_with_the_input(ranks):
    ranks(3, check_results_are_new)


def check_refusals():
    mesh = domain_mesh()
    image = split(torch.randn(2, 4, 8, 6), X((), (2,), {0: (4, 4)}), mesh)
    channels = split(torch.randn(2, 4, 8, 6), X((), (1,)), mesh)
    tokens = split(torch.randn(2, 4, 8, 6), X((), (3,)), mesh).flatten(2)  # each rank has a piece of every row
    weight = torch.randn(4, 4, 3, 3)
    for refused, why in (
        (lambda: F.conv2d(channels, weight), "channels are split"),
        (lambda: F.conv1d(tokens, weight[0]), r"product of axes \[8, 6\]"),
        (lambda: F.pad(tokens, (1, 1)), r"product of axes \[8, 6\]"),
    ):
        with pytest.raises(NotImplementedError, match=why) as error:
            refused()
        assert "no rule for" in str(error.value) and "full_tensor()" in str(error.value)
    for wrong, why in (
        (lambda: F.conv2d(image, torch.randn(4, 4, 9, 9)), "a window of 9 rows on 8"),
        (lambda: F.conv2d(image, weight, stride=2, padding="same"), "padding='same'"),
        (lambda: F.max_pool2d(image, 9), "a window of 9 rows on 8"),
        (lambda: F.max_pool2d(image, 2, padding=2), "padding 2 is more than half"),
        (lambda: F.pad(image, (0, 0, 8, 0), mode="reflect"), "pad: reflect of 8 rows by 8 before"),
    ):
        with pytest.raises(ValueError, match=why):
            wrong()


def test_what_is_not_supported_is_refused(ranks):
    ranks(2, check_refusals)


@st.composite
def drawn_cases(draw_):
    """A case of any operation with any parameters that the plain operation takes."""
    number = lambda low, high: draw_(st.integers(low, high))  # noqa: E731
    count, world = number(1, 2), 3
    sizes = tuple(number(0, 7) for _ in range(world))
    shape = (number(1, 2), 2, sum(sizes), *[number(1, 6)] * (count - 1))
    kinds = "conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_max_pool", "interpolate"
    kind = draw_(st.sampled_from(kinds))
    kernel, weights, name, keywords = number(1, 5), (), f"{kind}{count}d", {}
    if "conv" in kind or kind in ("max_pool", "avg_pool"):
        keywords |= {"stride": number(1, 5), "padding": number(0, kernel // 2 if "pool" in kind else 4)}
    if kind in ("conv", "conv_transpose", "max_pool"):
        keywords["dilation"] = number(1, 3)
    if "conv" in kind:
        weights = ((2, 2, *[kernel] * count), (2,))
    if kind == "conv_transpose":
        keywords["output_padding"] = number(0, max(keywords["stride"], keywords["dilation"]) - 1)
    if kind in ("max_pool", "avg_pool"):
        keywords |= {"kernel_size": kernel, "ceil_mode": draw_(st.booleans())}
    if kind == "avg_pool":
        keywords["count_include_pad"] = draw_(st.booleans())
    if kind == "adaptive_max_pool":
        keywords["output_size"] = number(1, 12)
    if kind == "interpolate":
        mode = draw_(st.sampled_from(["nearest", "nearest-exact", ("linear", "bilinear")[count - 1]]))
        name, keywords = kind, {"mode": mode, "size": [number(1, 20) for _ in range(count)]}
        if "linear" in mode:
            keywords["align_corners"] = draw_(st.booleans())
    given = "".join(f", {option}={value!r}" for option, value in keywords.items())
    return Case(f"F.{name}(x{', y, z' if weights else ''}{given})", (X(shape, (2,), {0: sizes}),), weights)


def allowed(case):
    """Tell whether the plain operation takes the case."""
    try:
        y = evaluate(*(torch.randn(shape) for shape in (case.inputs[0].shape, *case.weights)), code=case.function)
        return y.numel() > 0 and bool(y.isfinite().all())  # a window of dilated max pooling may see nothing
    except (RuntimeError, ValueError):
        return False


def test_any_operation_with_any_parameters_on_any_shards(ranks):
    found = []

    @settings(max_examples=200, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(drawn_cases().filter(allowed))
    def collect(case):
        found.append(case)

    collect()
    ranks(3, check_all, found)
