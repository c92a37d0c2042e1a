"""Every model that ships trains on every rung that it can run on, as it does on one device."""

import itertools
from unittest import mock

import pytest
import torch

import train_mp
from distributed.shard.ops import convolution
from tests.support.compilation import TRACED
from tests.support.layout_parity import check_in_double, check_training, train_in_double
from tests.support.marks import slow_but
from tests.support.refusals import refusal
from tests.test_domain_parallel import SIZES

MODELS = {
    "neighborhood": SIZES | {"model": "neighborhood", "model_args": {"kernel_size": 3}},
    "unet": SIZES | {"model": "unet", "model_args": {"width": 4}, "sync_batchnorm": True},
    "afno": SIZES | {"model": "afno", "model_args": {"num_blocks": 4}},
}
LAYOUTS = [
    "dp2", "dp2,data_parallel=zero1", "dp2,data_parallel=fsdp", "domain3", "domain2x2",
    "domain2xdp2,data_parallel=fsdp",
]  # fmt: skip


# Quick are all layouts of the U-Net, which has the most operations and running statistics.
CASES = list(itertools.product(MODELS, LAYOUTS))
QUICK = [(model, layout) for model, layout in CASES if layout == "domain2x2" or (model, layout) == ("unet", "dp2")]


@pytest.mark.parametrize("case", slow_but(QUICK, CASES, "every model in every layout"), ids="-".join)
def test_ten_steps_equal_those_of_one_device(ranks, tiny_config, case):
    model, layout = case
    check_in_double(ranks, tiny_config, layout, MODELS[model])


def train_overlapped(config):
    """As train_in_double, with exchanges beside the convolutions, as on an accelerator; and how many."""
    with (
        mock.patch.object(convolution, "may_overlap", return_value=True),
        mock.patch.object(convolution, "overlapped", wraps=convolution.overlapped) as overlapped,
    ):
        return *train_in_double(config, 4), overlapped.call_count


def test_ranks_of_unequal_bands_exchange_halos_and_gradients_in_the_same_order(ranks, tiny_config):
    """20 and 16 rows, then 10 and 8: of 10 rows most are inner ones, of 8 they are not."""
    options = MODELS["unet"] | {"img_size": [36, 16], "bucket_cap_mb": 0.001}
    losses, state = train_in_double(tiny_config(**options), 4)
    for found, found_state, overlaps in ranks(2, train_overlapped, tiny_config(**options, domain_parallel=2)):
        assert overlaps > 0
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
        for name, value in state.items():
            torch.testing.assert_close(found_state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow("neighborhood attention in compiled blocks")
@pytest.mark.nightly
def test_neighborhood_blocks_are_recomputed_and_compiled_on_tiles(ranks, tiny_config):
    extra = {"activation_checkpointing": "full", "enable_jit": True}
    options = MODELS["neighborhood"] | {"depth": 1}
    check_training(ranks, tiny_config, "domain2x2", options, 4, TRACED, **extra)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_without_global_attention_is_not_split_by_rung_3(tiny_options, monkeypatch, model):
    monkeypatch.setattr("distributed.model_parallel.comm.get_size", lambda name: 2 if name == "tp" else 1)
    args = "{" + ", ".join(f"{key}: {value}" for key, value in MODELS[model]["model_args"].items()) + "}"
    with refusal("has no .*, which it takes to split it .* train this model with train.py"):
        train_mp.main(["--yaml_config=config/ViT.yaml", *tiny_options(model=model, model_args=args)])


def test_a_model_without_blocks_says_what_it_cannot_do(tiny_config, tiny_options):
    with refusal("activation_checkpointing works block by block, and UNet has no `blocks`"):
        train_mp.main(
            [
                "--yaml_config=config/ViT.yaml",
                *tiny_options(model="unet", model_args="{width: 8}", activation_checkpointing="full"),
            ]
        )
