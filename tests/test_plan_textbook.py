"""The textbook formulas of a step, held against the trace of the real code."""

import pytest

from tests.support.marks import slow_rows_but
from tools.planner.textbook import textbook_traces
from tools.planner.trace import trace_step
from tools.planner.validate import build_cases
from utils.config import SCRIPTS, load_config

SMALL = {case.name: (case.config, case.layout) for case in build_cases(times=True)}
QUICK = [name for name in SMALL if name.endswith(("full", "sequence_parallel", "schedule=gpipe"))]
OTHERS = [pytest.mark.slow("every other layout of tools/planner/verify.yaml"), pytest.mark.nightly]
MP, SHARD = "train_mp.py --config=mp", "train_shard.py --config=shard"
LARGE = [  # GPUs, script and options
    (1, "train.py --config=base --amp_mode=fp16 --enable_fused --gradient_accumulation=4"),
    (16, f"{MP} --context_parallel=4 --cp_method=ring --tensor_parallel=2 --data_parallel=fsdp"),
    (16, f"{MP} --pipeline_parallel=4 --gradient_accumulation=4 --data_parallel=ddp"),
    (4, "train.py --config=quick --data_parallel=fsdp --optimizer=Muon"),
    (4, "train.py --config=quick --data_parallel=zero1 --optimizer=Muon --amp_mode=bf16"),
    (4, f"{MP}_quick --tensor_parallel=2 --data_parallel=fsdp --optimizer=Muon"),
    (16, f"{SHARD} --domain_parallel=2x2 --domain_method=gather --data_parallel=ddp --depth=4"),
]
QUICK = [0, 1, 4, 5, 6]  # each kind of split, and each number of GPUs


def assert_near(config, layout):
    """Peak memory, floating-point operations and bytes sent are within 10 % of the trace, on each traced rank."""
    for formula, trace in zip(textbook_traces(config, layout), trace_step(config, layout), strict=True):
        assert formula.memory["peak"] == pytest.approx(trace.memory["peak"], rel=0.1)
        for counted, size in ("operations", "flops"), ("messages", "sent"):
            sums = [
                sum(getattr(what, size) * calls for what, calls in getattr(step, counted).items())
                for step in (formula, trace)
            ]
            assert sums[0] == pytest.approx(sums[1], rel=0.1), size


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=OTHERS) for name in SMALL])
def test_small_layouts_are_within_a_tenth_of_the_trace(name):
    assert_near(*SMALL[name])


@pytest.mark.parametrize(("ranks", "words"), slow_rows_but(QUICK, LARGE, "more layouts as users run them"))
def test_layouts_as_users_run_them_are_within_a_tenth_of_the_trace(ranks, words):
    script, *options = words.split()
    config = load_config(options, None, ranks, SCRIPTS[script].yaml_config, SCRIPTS[script].splits)
    assert_near(config, config.layout(ranks, 4))
