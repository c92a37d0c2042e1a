"""Every model that ships trains on every rung that it can run on, as it does on one device."""

import pytest

import train_mp
from tests.support.compilation import TRACED
from tests.support.layout_parity import check_training
from tests.test_domain_parallel import SIZES
from utils.errors import UsageError

MODELS = {
    "convnet": SIZES | {"model": "convnet", "model_args": {"width": 8}},
    "neighborhood": SIZES | {"model": "neighborhood", "model_args": {"kernel_size": 3}},
}
LAYOUTS = {
    "ddp": (2, {}),
    "zero1": (2, {"data_parallel": "zero1"}),
    "fsdp": (2, {"data_parallel": "fsdp"}),
    "domain3": (3, {"domain_parallel": 3}),
    "domain2x2": (4, {"domain_parallel": "2x2"}),
    "domain2 x fsdp": (4, {"domain_parallel": 2, "data_parallel": "fsdp"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_equal_those_of_one_device(ranks, tiny_config, model, layout):
    check_training(ranks, tiny_config, LAYOUTS[layout], MODELS[model])


def test_neighborhood_blocks_are_recomputed_and_compiled_on_tiles(ranks, tiny_config):
    extra = {"activation_checkpointing": "full", "enable_jit": True}
    options = MODELS["neighborhood"] | {"depth": 1}
    check_training(ranks, tiny_config, LAYOUTS["domain2x2"], options, 4, TRACED, **extra)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_without_global_attention_is_not_split_by_rung_3(tiny_options, monkeypatch, model):
    monkeypatch.setattr("distributed.model_parallel.comm.get_size", lambda name: 2 if name == "tp" else 1)
    args = "{width: 8}" if model == "convnet" else "{kernel_size: 3}"
    with pytest.raises(UsageError, match="split the blocks of a vision transformer .* train this model with train.py"):
        train_mp.main(["--yaml_config=config/ViT.yaml", *tiny_options(model=model, model_args=args)])


def test_a_model_without_blocks_says_what_it_cannot_do(tiny_config, tiny_options):
    with pytest.raises(UsageError, match="activation_checkpointing works block by block, and ConvNet has no `blocks`"):
        train_mp.main(
            [
                "--yaml_config=config/ViT.yaml",
                *tiny_options(model="convnet", model_args="{width: 8}", activation_checkpointing="full"),
            ]
        )
