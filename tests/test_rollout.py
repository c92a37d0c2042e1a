"""Training over several steps: the numbers of every layout are those of one device, and those of plain formulas."""

import pytest

from tests.support.layout_parity import check_training
from tests.support.marks import slow_but

STEPS = {
    "global_batch_size": 8, "depth": 2, "num_heads": 4, "optimizer": "AdamW", "num_iters": 50, "rollout_steps": 3,
    "forcings": ["hour", "latitude", "day"], "predict": "change",
}  # fmt: skip
LAYOUTS = {
    "ddp": (2, {}),
    "ddp accumulation": (2, {"gradient_accumulation": 2}),
    "zero1": (2, {"data_parallel": "zero1"}),
    "zero2": (2, {"data_parallel": "zero2"}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "fsdp recomputed steps": (2, {"data_parallel": "fsdp", "activation_checkpointing": "step"}),
    "hsdp": (4, {"data_parallel": "hsdp", "dp_shard": 2}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2 sequence": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "cp3": (3, {"context_parallel": 3}),
    "cp2 ring": (2, {"context_parallel": 2, "cp_method": "ring"}),
    "tp2 x cp2": (4, {"tensor_parallel": 2, "context_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2, "gradient_accumulation": 2}),
    "pp2 gpipe, one micro-batch": (2, {"pipeline_parallel": 2, "pp_schedule": "gpipe"}),
    "pp2 x dp2": (4, {"pipeline_parallel": 2, "gradient_accumulation": 4}),
    "pp2 x fsdp": (4, {"pipeline_parallel": 2, "gradient_accumulation": 2, "data_parallel": "fsdp"}),
    "pp2 x cp2": (4, {"pipeline_parallel": 2, "gradient_accumulation": 2, "context_parallel": 2}),
    "domain3": (3, {"domain_parallel": 3}),
    "domain 2x2": (4, {"domain_parallel": "2x2"}),
    "domain2 x fsdp": (4, {"domain_parallel": 2, "data_parallel": "fsdp"}),
    "domain2 recomputed steps": (2, {"domain_parallel": 2, "activation_checkpointing": "step"}),
}
QUICK = ("ddp", "pp2", "zero2", "fsdp recomputed steps", "tp2 sequence", "cp3", "domain3")


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "other combinations of the same"))
def test_ten_steps_over_three_equal_those_of_one_device(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, LAYOUTS[layout], STEPS)


@pytest.mark.parametrize("layout", slow_but(("cp3",), ("cp3", "domain3", "ddp"), "other kinds of parts"))
def test_weighted_squared_error_equals_that_of_one_device(ranks, tiny_config, layout):
    weighted = {"loss": "squared_error", "pressure_weights": True, "channel_weights": {"u10": 0.1}}
    check_training(ranks, tiny_config, LAYOUTS[layout], STEPS | weighted, steps=4)
