"""float16: a loss is scaled as on one device, and a step that overflows anywhere is skipped everywhere."""

import pytest
import torch

from tests.support.layout_parity import build, local, overflow_on_the_last_rank, own_part, ranks_and_options
from tests.support.marks import slow_but
from training.step.loss_scaler import OwnScaler
from training.tasks import build_task
from utils import comm

FP16 = {"amp_mode": "fp16", "depth": 2, "img_size": [16, 32], "global_batch_size": 4, "gradient_accumulation": 1}
FUSED = ["tp2", "domain2x2", "tp2xdp2,data_parallel=fsdp"]  # whose ranks hold different gradients


def overflow_on_every_rank(config):
    """Whether weights stay as they are, all of them finite, in a step that overflows on every rank."""
    step = build(config)
    parameters = list(step.parallel.model.parameters())
    before, unscale = [local(p).clone() for p in parameters], step.scaler.unscale_

    def overflow(optimizer):
        local(step.parallel.model.blocks[0].mlp.fc1.weight.grad)[0, 0] = torch.inf
        unscale(optimizer)

    step.scaler.unscale_ = overflow
    batch = build_task(config).random_batch(torch.Generator().manual_seed(1))
    step(0, *(own_part(part, config) for part in batch))
    return all(torch.equal(a, local(b)) for a, b in zip(before, parameters, strict=True))


@pytest.mark.parametrize("overflow", [overflow_on_the_last_rank, overflow_on_every_rank])
@pytest.mark.parametrize("layout", slow_but(FUSED[:2], FUSED, "the decision in other layouts"))
def test_a_fused_optimizer_skips_a_step_that_overflows_on_one_rank_or_on_all(ranks, tiny_config, layout, overflow):
    size, own = ranks_and_options(layout)
    config = tiny_config(**FP16, **own, enable_fused=True)
    expected = (True, 2.0**15) if overflow is overflow_on_the_last_rank else True
    assert ranks(size, overflow, config) == [expected] * size


def gradient_of_the_output(config):
    """This rank's gradient of the model's scaled loss by its own output, and the loss scale."""
    step, seen = build(config), []
    loss = step.task.loss

    def watched(prediction, *others):
        prediction.register_hook(lambda gradient: seen.append(gradient.clone()))
        return loss(prediction, *others)

    step.task.loss = watched
    batch = build_task(config).random_batch(torch.Generator().manual_seed(1))
    step(0, *(own_part(part, config) for part in batch))
    return torch.cat(seen), comm.get_rank("dp"), config, step.scaler.get_scale()


LAYOUTS = ["dp2", "domain2", "cp2", "tp2", "domain2xdp2,data_parallel=fsdp"]


@pytest.mark.parametrize("layout", slow_but(LAYOUTS[:-1], LAYOUTS, "two kinds of parallelism together"))
def test_the_backward_pass_begins_with_the_numbers_of_one_device(ranks, tiny_config, layout):
    whole, _, _, scale = gradient_of_the_output(tiny_config(**FP16))
    size, own = ranks_and_options(layout)
    parts = ranks(size, part_and_its_place, tiny_config(**FP16, **own))
    for part, samples, window, own_scale in parts:
        rows, columns = window
        expected = whole[samples][:, :, rows, columns].float()
        assert own_scale == scale
        torch.testing.assert_close(part.float(), expected, rtol=2e-2, atol=2e-3 * expected.abs().max().item())


def part_and_its_place(config):
    """gradient_of_the_output, with the slices of the samples and of the image that it is of."""
    gradient, rank, config, scale = gradient_of_the_output(config)
    return gradient, slice(rank, None, comm.get_size("dp")), build_task(config).own_window(), scale


def test_a_checkpoint_has_the_scale_of_one_device():
    one, four = (OwnScaler("cpu", True, ranks) for ranks in (1, 4))
    for scaler in (one, four):
        scaler.scale(torch.ones(()))
    assert one.state_dict() == four.state_dict()
    four.load_state_dict(one.state_dict() | {"scale": 2.0**10})
    four.scale(torch.ones(()))
    assert four.get_scale() == 2.0**10 and four.scale(torch.ones(())) == 2.0**8
    OwnScaler("cpu", False, 2).load_state_dict({})  # where nothing is scaled
