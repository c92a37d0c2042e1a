"""Every layout of rung 3 trains as one device does with the whole batch."""

import unittest.mock

import pytest
import torch

from tests.support.compilation import TRACED
from tests.support.layout_parity import (
    COMPILED,
    CPU,
    RECOMPUTED,
    check_chain,
    check_in_double,
    check_mixed_precision,
    check_training,
    collectives_of_a_step,
    overflow_on_the_last_rank,
    ranks_and_options,
    train,
)
from tests.support.marks import slow_but
from training.tasks import build_task
from utils import comm
from weather.years.dataset import FieldDataset

# 9 x 10 patches: rows that no number of ranks divides.
SIZES = {
    "img_size": [36, 40],
    "num_heads": 4,
    "depth": 2,
    "global_batch_size": 8,
    "optimizer": "AdamW",
    "num_iters": 50,
}


LAYOUTS = [
    "tp2", "tp4", "tp2,sequence_parallel", "tp2,tp_backend=dtensor", "cp2", "cp3", "cp4", "cp4,cp_method=ring",
    "cp4,cp_method=all_to_all", "cp3,cp_method=ring", "cp2,cp_method=all_to_all", "tp2xcp2",
    "tp2xcp2,sequence_parallel,cp_method=ring", "tp2xdp2", "tp2xdp2,parallel_order=dp-tp",
    "tp2xdp2,data_parallel=zero1", "tp2xdp2,data_parallel=fsdp", "tp2xdp2,sequence_parallel,data_parallel=fsdp",
    "tp2xdp2,tp_backend=dtensor,data_parallel=fsdp", "cp2xdp2", "cp2xdp2,data_parallel=fsdp",
    "cp2xdp2,data_parallel=zero2", "pp2,pp_schedule=gpipe", "pp2", "pp2,pp_schedule=interleaved", "pp4", "pp2xdp2",
    "pp2xdp2,data_parallel=fsdp", "tp2xpp2", "pp2xdp2,pp_schedule=interleaved",
    "pp2xdp2,pp_schedule=interleaved,data_parallel=fsdp",
    "pp2xdp2,data_parallel=fsdp,wrap_policy=size,wrap_min_params=20000", "tp2xdp2,data_parallel=hsdp,dp_shard=1",
    "cp2xdp2,data_parallel=hsdp,dp_shard=1", "tp2xpp2,sequence_parallel", "cp2xpp2",
]  # fmt: skip


def sizes(name):
    """Options of a layout, or of a chain of them, and of one device: a block for each of up to four stages."""
    return SIZES | {"depth": 4 if "pp" in name else 2}


# Each kind of parallelism with each of its methods and schedules, and two kinds at once.
QUICK = [
    "tp2,sequence_parallel", "tp2,tp_backend=dtensor", "cp3", "cp3,cp_method=ring", "cp2,cp_method=all_to_all",
    "tp2xdp2,data_parallel=fsdp", "pp2,pp_schedule=interleaved", "tp2xpp2",
]  # fmt: skip


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS, "other combinations of the same"))
def test_ten_steps_equal_those_of_one_device(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, sizes(layout))


CLIPPED = [
    "tp2xdp2,data_parallel=fsdp", "pp2", "tp2,tp_backend=dtensor", "tp2", "tp2,sequence_parallel",
    "tp2xdp2,tp_backend=dtensor,data_parallel=fsdp", "cp2", "tp2xpp2", "pp2xdp2,data_parallel=fsdp",
]  # fmt: skip


@pytest.mark.parametrize("layout", slow_but(CLIPPED[:1], CLIPPED, "the norm in other layouts"))
def test_clipping_is_by_the_norm_of_the_whole_gradient(ranks, tiny_config, layout):
    check_in_double(ranks, tiny_config, layout, sizes(layout) | {"clip_grad_norm": 0.01})


MIXED = [
    "tp2xdp2,data_parallel=fsdp", "pp2", "tp2", "tp2,sequence_parallel", "cp3", "cp3,cp_method=ring",
    "cp2,cp_method=all_to_all",
]  # fmt: skip


@pytest.mark.parametrize("amp_mode", slow_but(["fp16"], ["bf16", "fp16"], "the other half precision"))
@pytest.mark.parametrize("layout", slow_but(MIXED[:1], MIXED, "half precision in other layouts"))
def test_mixed_precision_trains_as_on_one_device(ranks, tiny_config, layout, amp_mode):
    check_mixed_precision(ranks, tiny_config, layout, sizes(layout), amp_mode)


FUSED = ["tp2", "tp2xdp2,tp_backend=dtensor,data_parallel=fsdp"]


@pytest.mark.parametrize("layout", slow_but(FUSED[:1], FUSED, "DTensors of two dimensions"))
def test_a_fused_optimizer_takes_what_a_rank_holds(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, sizes(layout), enable_fused=True)


def test_a_fused_optimizer_takes_what_the_scaler_of_several_ranks_found(ranks, tiny_config):
    check_mixed_precision(ranks, tiny_config, "tp2", SIZES | {"enable_fused": True}, "fp16")


SEVERAL = ["tp2,sequence_parallel", "pp2", "tp2", "cp3", "tp2xdp2,data_parallel=fsdp"]


@pytest.mark.parametrize("layout", slow_but(SEVERAL[:1], SEVERAL, "recomputation in other layouts"))
def test_recomputed_activations_change_no_number(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, sizes(layout), **RECOMPUTED)


@pytest.mark.slow("compiled layers of models that are split by tensor, context and pipeline parallelism")
@pytest.mark.parametrize("layout", SEVERAL)
def test_compiled_layers_change_no_number(ranks, tiny_config, layout):
    check_training(ranks, tiny_config, layout, sizes(layout), backend=TRACED, **COMPILED)


@pytest.mark.slow("the code that is generated for layers of split models")
def test_generated_code_changes_no_number(ranks, tiny_config):
    check_training(ranks, tiny_config, "tp2xdp2,data_parallel=fsdp", SIZES, **COMPILED)


def batches_read(config):
    """Input and target of two training steps on this rank, and the bytes that it has read from files for them."""
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    read, usual = [0], FieldDataset.read

    def counted(self, index, out):
        read[0] += out.nbytes
        usual(self, index, out)

    with unittest.mock.patch.object(FieldDataset, "read", counted):
        loader, valid = build_task(config).build_loaders(CPU)
        batches = [(x.clone(), y.clone()) for x, y in loader.train(config.seed, 0, 2)]
    loader.close()
    valid.close()
    return torch.stack([torch.stack(batch) for batch in batches]), read[0]


def test_a_sample_is_read_once_by_the_ranks_that_share_it_and_each_band_by_its_rank(ranks, tiny_config):
    [(whole, size)] = ranks(1, batches_read, tiny_config())
    for options in ({"tensor_parallel": 2}, {"pipeline_parallel": 2, "gradient_accumulation": 2}):
        (first, read), (second, nothing) = ranks(2, batches_read, tiny_config(**options))
        assert torch.equal(first, whole) and torch.equal(second, whole)
        assert (read, nothing) == (size, 0)
    bands = ranks(3, batches_read, tiny_config(context_parallel=3))
    assert torch.equal(torch.cat([band for band, _ in bands], dim=4), whole)
    assert [read for _, read in bands] == [size // 2, size // 4, size // 4]  # 4 rows of patches: 2, 1, 1


def test_an_overflow_on_one_tensor_parallel_rank_skips_the_step_on_all(ranks, tiny_config):
    config = tiny_config(**SIZES, tensor_parallel=2, amp_mode="fp16")
    assert ranks(2, overflow_on_the_last_rank, config) == [(True, 2.0**15)] * 2


def test_collectives_of_a_whole_step(ranks, tiny_config):
    depth = SIZES["depth"]

    def counted(size, **options):
        return ranks(size, collectives_of_a_step, tiny_config(**SIZES, **options))[0][0]

    assert counted(2, tensor_parallel=2) == {"all_reduce": 4 * depth}
    # Besides the blocks': one gather after the last norm, one of the gradient before the first block, one reduction.
    sequence = {"all_gather": 4 * depth + 2, "reduce_scatter": 4 * depth, "all_reduce": 1}
    assert counted(2, tensor_parallel=2, sequence_parallel=True) == sequence
    # Context: keys and values, the gradients once, and the norms of the loss.
    assert counted(2, context_parallel=2) == {"all_gather": depth, "reduce_scatter": depth, "all_reduce": 1 + 1}
    # Gradients are reduced once over dp and cp together.
    assert counted(4, context_parallel=2) == {"all_gather": depth, "reduce_scatter": depth, "all_reduce": 1 + 1}
    assert counted(4, tensor_parallel=2) == {"all_reduce": 4 * depth + 1}


def losses_and_shared_weights(config, steps):
    """Of a training; shared are the weights that are whole on every rank."""
    losses, weights, *_ = train(config, steps)
    return losses, {name: value for name, (value, dim) in weights.items() if dim is None}


WHOLE = pytest.mark.slow("the same where every rank has all tokens")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=WHOLE, id="whole tokens"),
        pytest.param({"sequence_parallel": True}, id="sequence parallel"),
    ],
)
def test_shared_weights_stay_equal_to_the_bit(ranks, tiny_config, options):
    config = tiny_config(**SIZES | {"img_size": [16, 32]}, tensor_parallel=2, **options)
    (_, one), (_, other) = ranks(2, losses_and_shared_weights, config, 50)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


DROPPED = ["tp2,sequence_parallel", "cp2", "tp2", "tp2xcp2"]


@pytest.mark.parametrize("layout", slow_but(DROPPED[:1], DROPPED, "dropout in other layouts"))
def test_dropout_replays_and_keeps_shared_weights_equal(ranks, tiny_config, layout):
    size, options = ranks_and_options(layout)
    config = tiny_config(**SIZES, **options, dropout=0.2, activation_checkpointing="full")
    first, again = (ranks(size, losses_and_shared_weights, config, 5) for _ in range(2))
    without = ranks(size, losses_and_shared_weights, tiny_config(**SIZES, **options), 5)
    for (losses, weights), (same, _) in zip(first, again, strict=True):
        assert torch.equal(losses, same)
        assert not torch.equal(losses, without[0][0])
        for name, value in weights.items():
            assert torch.equal(value, first[0][1][name]), name


CHAINS = [
    "tp2xcp2 -> dp4 -> tp4 -> serial",
    "serial -> tp2xdp2,data_parallel=fsdp -> tp4 -> cp3",
    "pp2xdp2,data_parallel=fsdp -> tp2xpp2 -> dp4,data_parallel=fsdp -> tp2xdp2,tp_backend=dtensor,data_parallel=fsdp",
    "tp2xdp2,data_parallel=zero1 -> pp2,pp_schedule=interleaved -> tp2xdp2,data_parallel=fsdp -> serial",
]


@pytest.mark.parametrize("chain", slow_but(CHAINS[:1], CHAINS, "other layouts before and after a checkpoint"))
def test_a_checkpoint_goes_on_under_any_other_layout(ranks, tiny_config, tmp_path, chain):
    check_chain(ranks, tiny_config, chain.split(" -> "), sizes(chain), tmp_path)
