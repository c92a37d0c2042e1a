"""Plans count what ranks hold, send and compute, of options and models whose plans were once off."""

import pytest

from tests.support.compositions import composition_of, planted_trial
from tests.support.marks import slow_but
from tools.compositions.composition import Base
from tools.compositions.judge import planned_counts, unplanned
from tools.compositions.trial import Trial

WINDOWS = 'model=neighborhood model_args={"kernel_size":3}'
UNUSED = "model=tests.support.own_models:Unused"
GRAPH = "model=tests.support.own_models:Graph"
COUNTED = [
    WINDOWS,
    f"domain_parallel=2 {WINDOWS}",
    "dp=2 freeze=blocks.0.*",
    "dp=2 data_parallel=zero1 freeze=blocks.0.*",
    "tensor_parallel=2 tp_backend=dtensor",
    "dp=2 data_parallel=zero1 weight_decay=0.5",
    "dp=2 data_parallel=fsdp weight_decay=0.5",
    "optimizer=Muon",
    "dp=2 data_parallel=zero1 optimizer=Muon",
    "dp=2 data_parallel=fsdp optimizer=Muon amp_mode=bf16",
    "dp=2 tensor_parallel=2 data_parallel=fsdp optimizer=Muon",
    f"dp=2 {UNUSED}",
    f"dp=2 {UNUSED} bucket_cap_mb=0.001",
    f"dp=2 {UNUSED} gradient_accumulation=2 bucket_cap_mb=0.001",
    "domain_parallel=1x2 data_parallel=zero2",
    "dp=4 data_parallel=hsdp dropout=0.5",
    "dp=2 data_parallel=fsdp dropout=0.5 activation_checkpointing=full",
    "amp_mode=bf16 model=classifier task=classify num_classes=5",
    "amp_mode=bf16 model=unet",
    f"domain_parallel=2 {GRAPH}",
    f"domain_parallel=2x2 data_parallel=fsdp {GRAPH}",
]


QUICK = [COUNTED[1], *COUNTED[3:5], COUNTED[6], COUNTED[-3]]  # of weights, moments, ranks and recomputation


@pytest.mark.parametrize("words", slow_but(QUICK, COUNTED, "other plans that were once off"))
def test_a_plan_counts_what_ranks_hold_send_and_compute(ranks, words):
    case = Base([]).case(composition_of(words).choices)
    outcomes = ranks(case.ranks, planted_trial, Trial(case, counts=True), "none")
    (planned,) = planned_counts(None, case, True)
    assert not outcomes[0].refused and planned["parameters"] > 0
    assert unplanned(outcomes[0].counted, planned) == []
