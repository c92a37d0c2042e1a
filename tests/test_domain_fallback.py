"""--domain_fallback gather in training and in the planner; a program of one's own, which no trainer of ours starts."""

import textwrap
from collections import Counter

import pytest
import torch

from distributed.shard.missing_rules import fallback
from tests.support import programs
from tests.support.launch import losses, torchrun
from tests.support.layout_parity import own_part, train_steps
from tests.support.marks import needs_torch
from tests.support.programs import finish
from tools.instruments.counting import CollectiveCounter
from tools.planner.trace import trace_step
from training.assembly import build_step, random_batch
from utils import comm

RENORMED = {"model": "tests.support.without_a_rule:Renormed", "global_batch_size": 2}
CPU = torch.device("cpu")


def test_a_run_with_the_fallback_has_the_loss_of_one_device_and_says_what_was_whole(tiny_options, tmp_path):
    options = RENORMED | {"num_iters": 6, "global_batch_size": 4}
    serial = programs.start(["train.py", *tiny_options(run_num="serial", **options)])
    words = ["train_shard.py", "--yaml_config=config/ViT.yaml"]
    refused = programs.start_ranks([*words, *tiny_options(run_num="no", domain_parallel=2, **options)])
    statuses, outputs = zip(*map(finish, refused), strict=True)
    output = "".join(outputs)
    assert 0 not in statuses and "no rule for renorm" in output and "--domain_fallback gather" in output, output
    gather = {"domain_parallel": 2, "domain_fallback": "gather", "run_num": "gather"}
    status, output = finish(programs.start_ranks([*words, *tiny_options(**gather, **options)])[0])
    assert status == 0, output
    assert serial.wait() == 0
    lines = [line for line in output.splitlines() if "Operations on whole tensors" in line]
    assert len(lines) == 1 and "renorm: " in lines[0] and "MB gathered" in lines[0], output
    assert losses(tmp_path, "gather") == pytest.approx(losses(tmp_path, "serial"), rel=1e-5)


def messages_of_a_step(config):
    """(kind, bytes sent): calls, of a real step, as tools.planner counts those of a traced one."""
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    step = build_step(config, CPU)
    x, y = random_batch(step.task, CPU)
    step(0, x, y)
    fallback.calls.clear()
    with CollectiveCounter() as counter:
        step(1, x, y)
    return dict(counter.calls), dict(counter.bytes), fallback.fallback_lines()


def test_the_planner_knows_the_messages_of_the_fallback(ranks, tiny_config):
    config = tiny_config(**RENORMED, domain_parallel=2, domain_fallback="gather", data_parallel="ddp")
    calls, sent, said = ranks(2, messages_of_a_step, config)[0]
    assert "renorm: 1 calls" in said[0]
    (trace,) = trace_step(config, config.layout(2), "cpu")
    planned_calls, planned_bytes = Counter(), Counter()
    for message, n in trace.messages.items():
        planned_calls[message.kind] += n
        planned_bytes[message.kind] += n * message.sent
    assert calls["all_gather"] == planned_calls["all_gather"] == 2
    assert sent["all_gather"] == planned_bytes["all_gather"]


OWN = """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.nn.parallel import DistributedDataParallel
    from distributed.shard_tensor import ShardTensor

    def train(mesh):
        model = DistributedDataParallel(torch.nn.Conv2d(3, 3, 3, padding=1))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            x = ShardTensor.from_local(torch.randn(1, 3, 8, 8), mesh["domain"], [Shard(2)])
            model(x).square().mean().backward()
            optimizer.step()

    def main():
        dist.init_process_group("gloo")
        train(init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "domain")))
        dist.destroy_process_group()  # after the model is gone: a reducer that is the last to hold gloo may hang
        print("left")

    main()
"""


@pytest.mark.slow("four ranks on two dimensions in a program without the trainer")
def test_a_program_of_ones_own_ends_well(tmp_path):
    program = tmp_path / "own.py"
    program.write_text(textwrap.dedent(OWN))
    status, output = finish(torchrun([], 4, script=str(program), PYTHONPATH="."))
    assert status == 0 and output.count("left") == 4, output


@pytest.mark.slow("the example of the docs, as a program")
def test_the_example_of_a_model_of_ones_own_ends_well():
    status, output = finish(torchrun(["docs.examples.own_model"], 2, script="-m"))
    assert status == 0 and "output and gradients are those of the whole image" in output, output


def dropped_and_kept(config, steps=2):
    """Training with dropout; afterwards the default generators of all ranks of an image are alike."""
    comm.build_mesh(CPU, config.layout(comm.world_size()))
    step = build_step(config, CPU)
    losses = train_steps(step, config, 0, steps)
    return losses.tolist(), torch.rand(4).tolist(), own_part(torch.zeros(4, 1, *config.img_size), config).shape


TRACED = needs_torch((2, 13), "cannot trace the rules of ShardTensor in a block")
COMPILED = pytest.param({"enable_jit": True}, marks=[TRACED, pytest.mark.slow("dropout of compiled layers")])


@pytest.mark.parametrize("extra", [{}, {"activation_checkpointing": "full"}, COMPILED], ids=str)
def test_default_generators_stay_alike_on_uneven_parts(ranks, tiny_config, extra):
    config = tiny_config(
        img_size=[36, 16], patch_size=4, domain_parallel=2, dropout=0.2, global_batch_size=4, depth=1, **extra
    )
    (losses, first, one), (others, second, two) = ranks(2, dropped_and_kept, config)
    assert losses == others and first == second and one != two
