"""A model's draws from `random` and numpy: seeded, alike on ranks that share an image, and nobody else's."""

import random

import numpy as np
import pytest
import torch

from distributed.checks.watches import LayerWatch
from tests.support.layout_parity import build, train_serially, train_steps
from training.models.build import initial_weights
from utils import comm
from utils.host_random import HostRandom, drawn_again, host_generators, host_states


def own(name):
    return f"tests.support.stateful_models:{name}"


def draw():
    return [random.random(), random.gauss(0, 1), *np.random.randn(3), *np.random.rand(2)]


def test_draws_of_a_model_are_its_own():
    streams, same = HostRandom(5), HostRandom(5)
    outside = host_generators()
    with streams:
        first = draw()
    assert host_generators() == outside  # everybody else goes on as if nothing had been drawn
    draw()
    with streams:
        second = draw()
    with same:
        assert draw() == first and first != second
    draw()
    with same:
        assert draw() == second
    with HostRandom(6) as other:
        assert draw() != first and other is not None


def test_streams_continue_from_their_tensors():
    streams, restored = HostRandom(5), HostRandom(0)
    with streams:
        draw()
    restored.restore({name: tensor.clone() for name, tensor in streams.tensors().items()})
    with streams:
        expected = draw()
    with restored:
        assert draw() == expected


def test_what_is_drawn_again_leaves_no_trace():
    random.gauss(0, 1)
    np.random.randn()  # both keep the second of two numbers
    states = host_states()
    expected = draw()
    after = host_generators()
    with drawn_again(states):
        assert draw() == expected
    assert host_generators() == after


def test_weights_that_a_model_draws_by_numpy_depend_on_the_seed_alone(tiny_config):
    drawn = [dict(initial_weights(tiny_config(model=own("Drawn"), seed=seed)))["0.weight"] for seed in (3, 3, 4)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def draws_of_a_rank(config):
    with build(config).streams.host:
        return random.random(), np.random.rand()


@pytest.mark.parametrize(
    ("options", "alike"),
    [
        ({"domain_parallel": 2}, True), ({"tensor_parallel": 2}, True), ({"context_parallel": 2}, True),
        ({"pipeline_parallel": 2, "gradient_accumulation": 2}, True), ({}, False),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_that_share_an_image_draw_alike_and_others_do_not(ranks, tiny_config, options, alike):
    (python, numpy), (other_python, other_numpy) = ranks(2, draws_of_a_rank, tiny_config(**options))
    assert (python == other_python) == (numpy == other_numpy) == alike
    assert (python, numpy) == draws_of_a_rank(tiny_config())  # the first one as one device


DROPS = {"model": own("LayerDrop"), "img_size": [11, 14], "patch_size": 1}


def train_with_draws(config, by_rank):
    """Losses of four steps; the draws of a rank differ from those of the others, or not."""
    step = build(config)
    if not by_rank:
        step.streams.host = HostRandom(config.seed)
        torch.manual_seed(config.seed)
    return train_steps(step, config, 0, 4)


@pytest.mark.parametrize("by", ["random", "numpy", "torch"])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_ranks_that_draw_different_layers_are_refused_where_they_gather_them(ranks, tiny_config, strategy, by):
    config = tiny_config(**DROPS, model_args={"by": by}, data_parallel=strategy)
    with pytest.raises(AssertionError, match=f"UsageError: data_parallel {strategy}: ranks compute different layers: "):
        ranks(2, train_with_draws, config, by_rank=True)


def test_ranks_that_draw_the_same_layers_train_as_one_device(ranks, tiny_config):
    expected, _ = train_serially(tiny_config, DROPS, 4)
    for losses in ranks(2, train_with_draws, tiny_config(**DROPS, data_parallel="fsdp"), by_rank=False):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def comparisons(config, steps=3):
    """How often this rank compares its layers with those of the others."""
    compared = []
    compare = LayerWatch._compare
    LayerWatch._compare = lambda self, number: compared.append(self.names[number]) or compare(self, number)
    try:
        train_steps(build(config), config, 0, steps)
    finally:
        LayerWatch._compare = compare
    assert comm.world_size() == 2
    return compared


def test_a_model_without_draws_on_the_host_does_not_pay(ranks, tiny_config):
    assert ranks(2, comparisons, tiny_config(data_parallel="fsdp")) == [[], []]
