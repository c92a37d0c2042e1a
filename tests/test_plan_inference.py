"""Plans of a forward pass without gradients: published memory, what ranks really send and hold, grids of plans."""

import json

import pytest

import benchmark
import plan
from tests.support.refusals import refusal
from tests.test_plan_trace import GIB, NUMBERS, settings
from tools.instruments.rank_case import RankCase, build_case
from tools.instruments.ranks import Case, Process, Teams
from tools.planner.hardware import load_gpu
from tools.planner.plan import plan_layout
from tools.planner.trace import Trace, measured_inference, trace_step

# Peak GiB of a forward pass at 1024 x 1024 of NVIDIA PhysicsNeMo's ShardTensor tutorial, by GPUs that share an image:
# measured in a process that has trained, so gradients and the optimizer's state lie beside it.
PUBLISHED = {1: 2.5, 2: 2.2, 4: 2.0, 8: 1.9}
SHARD = "--yaml_config=config/shard.yaml", "--config=classify_1024", "--gpu=a100-80gb"
SMALL = "--device=cpu", "--depth=4", "--local_batch_size=4"


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=NUMBERS), 4, pytest.param(8, marks=NUMBERS)])
def test_published_memory_of_domain_parallel_inference(gpus):
    alone = " --noddp" if gpus > 1 else ""
    words = f"--config=classify_1024 --data_parallel=ddp --domain_method=ring --domain_parallel={gpus}{alone}"
    config, layout = settings("config/shard.yaml", words, gpus)
    gpu = load_gpu("a100-80gb")
    training = plan_layout(config, layout, gpu)
    forward_pass = plan_layout(config, layout, gpu, inference=True)
    beside = training.memory["gradients"] + training.memory["optimizer"]
    assert (forward_pass.peak + beside) / GIB == pytest.approx(PUBLISHED[gpus], rel=0.05)


def forecast_on(rank: Process, case: Case) -> Trace:
    """On a rank: the Trace of a real forward pass."""
    own = RankCase(rank, case)
    own.forecast(1)
    return measured_inference(own.step, own.x)


LAYOUTS = {
    "fsdp": ("train.py", "--config=quick --data_parallel=fsdp"),
    "sequence": ("train_mp.py", "--config=mp_quick --tensor_parallel=2 --sequence_parallel"),
    "ring": ("train_mp.py", "--config=mp_quick --context_parallel=2 --cp_method=ring"),
    "pipeline": ("train_mp.py", "--config=mp_quick --pipeline_parallel=2 --gradient_accumulation=2"),
    "domain": ("train_shard.py", "--config=shard_quick --domain_parallel=2"),
}


@pytest.fixture(scope="module")
def teams():
    with Teams(build_case("one", "train.py", ["--config=quick", "--device=cpu"], 1).config) as started:
        yield started


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forward_pass_sends_holds_and_computes_what_is_planned(teams, layout):
    script, words = LAYOUTS[layout]
    case = build_case(layout, script, [*words.split(), *SMALL], 2)
    found = teams.call(2, forecast_on, case)[0]
    planned = trace_step(case.config, case.layout, "cpu", inference=True)[0]
    assert found.messages == planned.messages and found.messages
    assert found.held == planned.held
    assert flops(found) == flops(planned) > 0
    assert found.memory["peak"] == pytest.approx(
        planned.memory["peak"], rel=0.1
    )  # a ring of fake tensors holds a block more


def flops(trace):
    return sum(operation.flops * calls for operation, calls in trace.operations.items())


def test_a_forward_pass_has_no_phase_of_training_and_holds_no_state_of_it(capsys):
    plan.main([*SHARD, "--gpus=2", "--domain_parallel=2", "--depth=2", "--inference", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["inference"]
    assert {message["phase"] for message in found["collectives"]} == {"forward"}
    assert found["memory_bytes"]["gradients"] == found["memory_bytes"]["optimizer"] == 0
    plan.main([*SHARD, "--gpus=2", "--domain_parallel=2", "--depth=2", "--inference"])
    text = capsys.readouterr().out
    assert "at most at once, in a forward pass" in text and "optimizer" not in text


def test_a_grid_has_a_row_for_gpus_and_a_column_for_values_and_says_where_memory_ends(capsys):
    words = [*SHARD, "--gpu=a100-40gb", "--gpus=1..2", "--depth=2"]
    plan.main([*words, "--grid", "local_batch_size=1,32"])
    speed, memory, gain, reduction = capsys.readouterr().out.strip().split("\n\n")
    one, two = ([cell.strip() for cell in line.split("|")[1:-1]] for line in speed.splitlines()[2:])
    assert [one[0], two[0]] == ["1", "2"] and float(two[1]) > float(one[1])
    assert one[2] == "out of memory" and float(two[2]) > 0
    assert "local_batch_size 32" in memory and "1.00" in gain and "out of memory" in reduction

    plan.main([*words, "--grid", "img_size=256,512x256", "--inference", "--json"])
    cells = json.loads(capsys.readouterr().out)
    assert [(cell["gpus"], cell["img_size"]) for cell in cells] == [
        (1, "256"), (1, "512x256"), (2, "256"), (2, "512x256"),
    ]  # fmt: skip
    assert all(cell["inference"] and cell["step_time_s"] > 0 for cell in cells)


def test_a_cell_that_no_script_runs_says_why(capsys):
    plan.main([*SHARD, "--gpus=1..2", "--depth=1", "--grid", "img_size=8,256"])
    text = capsys.readouterr().out
    second_row = text.splitlines()[3].split("|")
    assert [cell.strip() for cell in second_row][1:3] == ["2", "-"]
    assert text.endswith("\n\n-: classify_1024: domain parallel: 1 rows of patches cannot be split over 2 ranks\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpus=1..2", "--grid", "img_size"], "--grid 'img_size': expected a key and its values"),
        (["--gpus=2", "--grid", "img_size=64", "--top=2"], "--grid goes without --top"),
        (["--gpus=2", "--grid", "depht=1,2"], "unknown option '--depht'"),
        (["--gpus=1..4", "--inference"], "--inference plans one layout; --grid compares"),
    ],
)
def test_what_cannot_be_planned_so_is_one_line(words, line):
    with refusal(line):
        plan.main([*SHARD, *words])


def test_a_picture_of_a_training_step_is_refused_before_anything_is_measured():
    with refusal("--memory_png goes without --inference"):
        benchmark.main(["layouts", "domain", "--inference", "--memory_png=memory.png"])


def test_forward_passes_are_measured_in_layouts(tmp_path, capsys):
    file = tmp_path / "out.json"
    small = [
        "--embed_dim=32",
        "--depth=2",
        "--num_heads=2",
        "--patch_size=4",
        "--device=cpu",
        "--steps=1",
        "--rounds=1",
    ]
    benchmark.main(["layouts", "domain", "--inference", "--sizes=68", "--layouts", "domain2", f"--json={file}", *small])
    one, shared = json.loads(file.read_text())["rows"]
    assert one["messages"] == {"forward": {}, "backward": {}, "update": {}}
    assert shared["messages"]["forward"] and not shared["messages"]["backward"] and not shared["messages"]["update"]
    assert one["speedup"] == one["reduction"] == 1 and shared["reduction"] > 0
    assert shared["memory"]["parameters"] < one["memory"]["parameters"]  # fsdp over the ranks of the image
    assert capsys.readouterr().out.startswith("Forward passes without gradients")
