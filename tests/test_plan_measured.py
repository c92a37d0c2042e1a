"""The planner on a machine that was measured: what is measured, how it is written and read, and times from it."""

import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plan
from tests.support.refusals import refusal
from tools.instruments import collective_speed, operation_speed
from tools.instruments.rank_case import seconds_of
from tools.instruments.ranks import Teams
from tools.instruments.tracker import Message, Operation
from tools.planner import calibrate, hardware, search, validate
from tools.planner.hardware import gpu_of, load_gpu
from tools.planner.plan import plan_layout
from tools.planner.step_time import step_time
from tools.planner.trace import Trace, trace_step
from utils.config import SCRIPTS, load_config
from utils.yaml_files import ROOT

CPU = torch.device("cpu")
# Sizes of tensors that are measured in seconds, where all of them take a minute.
SMALL = {
    "ROWS": (64,), "WIDTHS": (32,), "HEADS": (32,), "TOKENS": (64,), "MOVED": (2**14,), "PATCHES": ((4, 4, 16),),
    "FOOTPRINT": {"cpu": 2**22},
}  # fmt: skip
SMALLER = f"""
import pathlib, runpy, sys
from tools.instruments import operation_speed
from tools.planner import calibrate
vars(operation_speed).update({SMALL})
calibrate.MEASURED = pathlib.Path(sys.argv[0]).parent  # another test may look at this repository's files meanwhile
runpy.run_path("plan.py", run_name="__main__")
"""
TWO = ["--nproc_per_node", "2"]
MEASURE = calibrate.measure_machine


def measure_small(*args):
    """On a rank: as calibrate.measure_machine, with small tensors."""
    vars(operation_speed).update(SMALL)
    return MEASURE(*args)


def made(ranks=2, **changes):
    """A made entry: products at 1 and 2 GFLOP/s by size, data at 1 GB/s, 10 us of the host for each operation."""
    moves = [[0, 1e4, 1e-5], [0, 1e8, 1e-1]]
    operations = {
        "mm": {"float32": [[1e6, 1e4, 1e-3], [1e9, 1e7, 0.5]]},
        "add": {"float32": moves}, "clone": {"float32": moves},
        "attention": {"float32, heads of 32": [[1e6, 1e4, 1e-3], [1e9, 1e6, 1.0]]},
        "attention_backward": {"float32, heads of 32": [[1e6, 1e4, 2e-3], [1e9, 1e6, 2.0]]},
    }  # fmt: skip
    host = {"forward": 1e-5, "backward": 1e-5, "update": 1e-5}
    kinds = {kind: {"latency": 1e-3, "bandwidth": 1e9, "ranks": ranks} for kind in collective_speed.KINDS}
    machine = {
        "device": "cpu", "processor": "abacus", "cores": 2, "torch_version": "", "threads": 1, "ranks": ranks,
        "overlap": 0.0, "around": {},
        "compute": {str(n): {"operations": operations, "host": host} for n in {1, ranks}},
        "collectives": {"inside": kinds} if ranks > 1 else {},
    }  # fmt: skip
    return {"measured": machine | changes, "memory_gib": 8.0, "overhead_gib": 0.3, "workspace_mib": 0.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of measured entries."""
    monkeypatch.setattr(hardware, "MEASURED", tmp_path)
    monkeypatch.setattr(calibrate, "MEASURED", tmp_path)
    return tmp_path


def settings_of(*words, ranks=1, script="train.py"):
    config = load_config([*words, "--device=cpu", "--depth=2"], None, ranks, *SCRIPTS[script][:2])
    return config, config.layout(ranks)


# -------------------------------------------------------------------------------------------------------- measuring


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e12), st.integers(0, 6), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_latency_and_bandwidth_are_found_again_whatever_one_size_was_disturbed_by(latency, bandwidth, which, seed):
    sizes = np.geomspace(latency * bandwidth / 1000, latency * bandwidth * 1000, 7)
    seconds = (latency + sizes / bandwidth) * np.random.default_rng(seed).uniform(0.98, 1.02, 7)
    seconds[which] *= 3
    found = collective_speed.fit(list(zip(sizes, seconds, strict=True)))
    assert found == pytest.approx((latency, bandwidth), rel=0.25)


def test_places_are_the_ranks_of_a_node_and_their_peers():
    assert collective_speed.places([[0, 1], [2, 3], [4]]) == {
        "inside": [[0, 1], [2, 3]], "across": [[0, 2, 4]],
    }  # fmt: skip
    assert collective_speed.places([[0]]) == {}


def test_every_operator_that_takes_long_in_a_step_is_measured_by_its_name(monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(operation_speed, name, value)
    found = operation_speed.measure_operations(CPU, (torch.float32, torch.bfloat16), 1e-4)
    assert all(min(s for *_, s in sizes) > 0 for types in found.values() for sizes in types.values())
    for words in ([], ["--amp_mode=bf16"]):
        (trace,) = trace_step(*settings_of("--config=quick", *words), "cpu")
        sizes = Counter()
        for operation, calls in trace.operations.items():
            sizes[operation.name] += calls * (operation.flops + operation.moved)
        unknown = {name: size for name, size in sizes.items() if name not in found}
        assert sum(unknown.values()) < 0.05 * sum(sizes.values()), unknown


# ------------------------------------------------------------------------------------------------------------ times


def seconds(flops, moved, kind="matmul", name="mm", dtype="float32", head=0):
    operation = Operation("forward", kind, flops, moved, torch.float32, name)
    return gpu_of("made", made()).measured.speeds(1).seconds(operation, dtype, head)


def test_an_operation_takes_what_was_measured_and_between_two_sizes_a_time_between():
    assert seconds(1e6, 1e4) == pytest.approx(1e-3) and seconds(1e9, 1e7) == pytest.approx(0.5)
    assert 1e8 / 2e9 < seconds(1e8, 1e6) < 1e8 / 1e9
    assert seconds(1e12, 1e10) == pytest.approx(500, rel=0.01)  # beyond the largest: at its rate
    assert seconds(0, 1e6, "copy", "other") == pytest.approx(1e-3)  # an operator that was not measured
    assert seconds(1e6, 1e4, "matmul", "mm", "bfloat16") == pytest.approx(1e-3)  # nor this type


def test_attention_is_read_by_tokens_and_size_of_heads_not_by_their_number():
    one = seconds(1e6, 1e4, "attention", "attention", head=48)
    assert one == pytest.approx(1e-3)
    assert seconds(8e6, 8e4, "attention", "attention", head=48) == pytest.approx(8 * one)


def test_attention_of_a_type_takes_the_time_of_the_kernel_that_computes_it():
    """On a GPU float32 and 16 bits have kernels of their own, and the trace knows a third one, the CPU's."""
    entry = made()
    operations = entry["measured"]["compute"]["1"]["operations"]
    operations["_fast_attention"] = {"bfloat16, heads of 32": [[1e6, 1e4, 1e-6], [1e9, 1e6, 1e-3]]}
    speeds = gpu_of("made", entry).measured.speeds(1)
    operation = Operation("forward", "attention", 1e6, 1e4, torch.bfloat16, "_attention_for_cpu")
    assert speeds.seconds(operation, "bfloat16", 32) == pytest.approx(1e-6)
    assert speeds.seconds(operation, "float32", 32) == pytest.approx(1e-3)


def step_of(*words, phase="forward", operations=0, messages=(), ranks=1, script="train.py", entry=None, **changes):
    """StepTime on the made machine of so many products of a millisecond. messages: (kind, number of 2 ms each)."""
    config, layout = settings_of(*words, ranks=ranks, script=script)
    counted = Counter({Operation(phase, "matmul", 1e6, 1e4, torch.float32, "mm"): operations})
    sent = Counter({Message(phase, kind, "dp", 10**6): calls for kind, calls in messages})
    trace = Trace({}, {}, counted, sent, {"dp": (0, 1)} if sent else {})
    return step_time([trace], config, layout, gpu_of("made", entry or made(**changes)))


def test_on_a_cpu_the_host_and_messages_come_on_top_of_computing():
    case = {"phase": "backward", "operations": 3, "messages": [("all_reduce", 2)], "ranks": 2}
    found = step_of("--config=quick", **case, around={"ddp": {"backward": 0.5}})
    expected = {"matmul": 3e-3, "launch": 3e-5 + 0.5, "communication dp": 2 * (1e-3 + 1e-3)}
    assert {name: s for name, s in found.parts.items() if s} == pytest.approx(expected)
    assert found.phases == pytest.approx({"forward": 0, "backward": found.seconds, "update": 0})
    hidden = step_of("--config=quick", **case, overlap=1.0)
    assert hidden.parts["communication dp"] < found.parts["communication dp"]


def test_a_step_of_several_ranks_takes_as_long_as_the_slowest_computes():
    one, two = (step_of("--config=quick", operations=3, ranks=n, slowest=1.5).parts["matmul"] for n in (1, 2))
    assert one == pytest.approx(3e-3) and two == pytest.approx(1.5 * one)


def test_on_a_cpu_fully_shard_waits_for_each_of_its_messages():
    words = "--config=quick", "--data_parallel=fsdp"
    found = step_of(*words, operations=300, messages=[("all_gather", 2)], ranks=2, overlap=1.0)
    assert found.parts["communication dp"] == pytest.approx(2 * (1e-3 + 1e-3))


@pytest.mark.parametrize(
    ("words", "blocks"),
    [((), 2), (("--checkpointing_interval=2",), 1), (("--local_batch_size=4", "--gradient_accumulation=2"), 4)],
)
def test_a_block_that_is_computed_again_costs_the_host_what_was_measured(words, blocks):
    words = "--config=quick", "--activation_checkpointing=selective", *words
    assert step_of(*words, around={"selective": {"forward": 0.05, "backward": 0.2}}).seconds == pytest.approx(
        0.25 * blocks
    )


def test_a_stage_that_works_alone_is_as_fast_as_one_rank_alone():
    words = "--config=mp_quick", "--pipeline_parallel=2", "--gradient_accumulation=2"
    alone = json.loads(json.dumps(made()))  # the parts of made() are shared
    point = alone["measured"]["compute"]["1"]["operations"]["mm"]["float32"][0]
    point[-1] /= 2
    case = {"phase": "backward", "operations": 4, "ranks": 2, "script": "train_mp.py"}
    busy, free = (step_of(*words, **case, entry=entry).parts for entry in (made(), alone))
    idle = 4e-3 + 4e-5  # of a micro-batch of two
    assert busy["matmul"] == free["matmul"] == pytest.approx(4e-3)
    assert busy["bubble"] == pytest.approx(idle / 2) and free["bubble"] == pytest.approx(idle / 2 - 2 * 2e-3 / 2)


def test_collectives_that_were_not_measured_are_named_with_the_remedy():
    config, layout = settings_of("--config=quick", ranks=2)
    with refusal("alone: all_reduce .* was not measured, .* 1 rank.*: .* torchrun"):
        plan_layout(config, layout, gpu_of("alone", made(ranks=1)))


# ---------------------------------------------------------------------------------------------------------- entries


def test_a_plan_rests_on_an_entry_by_its_name_and_says_of_what_machine(folder, capsys):
    (folder / "mine.json").write_text(json.dumps(made()))
    plan.main(["--config", "quick", "--depth", "2", "--gpus", "2", "--data_parallel", "ddp", "--gpu", "mine"])
    assert "it rests on measurements of abacus, 2 cores" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibrate", "--name", "../x"], "--name ../x: letters"),
        (["--calibrate", "--name", "h100"], "--name h100: .* no name of hardware.yaml"),
        (["--calibrate", "--device", "abacus"], "abacus"),
        (["--calibrate", "--nam", "x"], "unrecognized arguments: --nam x"),
    ],
)
def test_options_that_cannot_be_used_are_refused(words, message, folder):
    with refusal(message):
        plan.main(words)
    assert not list(folder.iterdir())


# --------------------------------------------------------------------------------------------------------- at scale


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 4096])
def test_the_slowest_of_many_is_expected_where_drawn_ones_are(ranks):
    drawn = np.random.default_rng(1).standard_normal((2000, ranks)).max(axis=1).mean()
    assert search.expected_slowest(ranks) == pytest.approx(drawn, rel=0.02, abs=0.05)


def test_a_step_at_scale_waits_for_the_slowest_rank_and_for_its_samples():
    config, layout = settings_of("--config=quick", "--local_batch_size=4", ranks=2)

    def at_scale(**changes):
        gpu = gpu_of("made", made() | {"jitter": 0.0, "node_read": 1e15, "total_read": 1e15} | changes)
        time = search.at_scale(plan_layout(config, layout, gpu)).time
        return time.seconds, time.bound

    plain, bound = at_scale()
    assert plain == plan_layout(config, layout, gpu_of("made", made())).time.seconds and bound != "reading"
    assert at_scale(jitter=0.1) == (pytest.approx(plain * (1 + 0.1 * search.expected_slowest(2))), bound)
    size = 8 * (config.n_in_channels + config.n_out_channels) * 32 * 64 * 4  # 8 samples of both ranks, in float32
    assert at_scale(total_read=size / plain / 3) == (pytest.approx(3 * plain), "reading")
    assert at_scale(node_read=size / plain / 2) == (pytest.approx(2 * plain), "reading")


def test_a_curve_says_what_it_assumes(folder, capsys):
    (folder / "mine.json").write_text(json.dumps(made() | {"jitter": 0.5, "total_read": 1e6}))
    words = ["--gpus", "1..2", "--gpu", "mine", "--data_parallel", "ddp"]
    plan.main(["--config", "quick", "--depth", "2", "--activation_checkpointing=none", *words])
    said = capsys.readouterr().out
    assert "vary by 50.0% (jitter)" in said and "0.001 GB/s of all (total_read)" in said and "reading" in said


# ------------------------------------------------------------------------------------------------------------ for real


@pytest.mark.slow("two ranks measure this machine, and real layouts are planned with what they write")
def test_two_ranks_measure_a_machine_for_plans_of_two_ranks(folder):
    script = folder / "smaller.py"
    script.write_text(SMALLER)
    words = "--calibrate", "--name", "test-of-two", "--device", "cpu"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *TWO, script, *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = load_gpu("test-of-two").measured
    assert measured.ranks == 2 and set(measured.collectives["inside"]) == set(collective_speed.KINDS)
    assert "bfloat16" in measured.compute[2].operations["mm"]


@pytest.mark.slow("this machine is measured in turns with real layouts, and those that a search ranks first")
@pytest.mark.nightly
def test_layouts_run_for_real_are_planned_with_what_this_machine_does_in_the_same_minute(capsys, monkeypatch):
    names = "context_parallel=2 cp_method=ring", "1x2 data_parallel=fsdp", "embed_dim=64 (1 rank)"
    cases = [case for case in validate.build_cases(times=True) if case.name.endswith(names)]
    monkeypatch.setattr(validate, "build_cases", lambda times: cases)
    monkeypatch.setattr(calibrate, "measure_machine", measure_small)
    few = "--data_parallel=ddp", "--activation_checkpointing=none", "--pipeline_parallel=1"
    monkeypatch.setattr(validate, "SEARCHED", (*validate.SEARCHED, *few))
    assert validate.validate(1) == 0
    said = capsys.readouterr().out
    assert "3 layouts, 0 differ in counts" in said and "as the search ranks it" in said


@pytest.mark.slow("layouts that are measured in turns")
def test_layouts_that_take_turns_keep_their_method_of_attention():
    cases = [case for case in validate.build_cases() if case.name.startswith("shard_quick domain_parallel=2 domain")]
    assert len({case.config.domain_method for case in cases}) == 2
    with Teams(cases[0].config) as teams:
        for case in cases:
            teams.call(2, seconds_of, case)  # all are there before the first is looked at
        real = [teams.call(2, validate.real_trace, case) for case in cases]
    for case, figures in zip(cases, real, strict=True):
        assert validate.differ(figures, trace_step(case.config, case.layout, "cpu")) == "equal", case.name
