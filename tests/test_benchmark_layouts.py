"""`benchmark.py layouts` measures what the theory of each layout says, and ends whatever happens to a rank."""

import json
import os
import re
import signal
import sys
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch

import benchmark
from tests.support import forked, programs
from tests.support.launch import popen, wait_until
from tests.support.refusals import refusal
from tools.benchmarks import cases, layouts
from tools.benchmarks.layouts import INDEPENDENT, ONE, STRATEGIES, domain_cases, layout_cases
from tools.instruments.counting import Collective
from tools.instruments.ranks import Pool, RanksFailed, Teams, is_out_of_memory
from tools.instruments.step_phases import phases_of
from tools.instruments.tracker import Tracker, by_phase
from tools.planner.trace import HELD, STATES, trace_step
from tools.tables import MIB
from training.models.build import build_model

COMMON = ["--num_heads=2", "--device=cpu"]
DP = ["--config=quick", "--img_size", "16", "32", "--embed_dim=64", "--depth=3", "--local_batch_size=2", *COMMON]
# 9 x 8 patches: rows that two ranks share unequally, 5 and 4.
MP = ["--config=mp_quick", "--img_size", "36", "32", "--depth=2", "--global_batch_size=4", *COMMON]
LAYOUTS = [
    "tp2", "tp2,sequence_parallel", "tp2,tp_backend=dtensor", "cp2", "cp2,cp_method=ring", "cp2,cp_method=all_to_all",
    "pp2", "pp2,pp_schedule=gpipe", "dp2,data_parallel=zero1", "tp2xcp2", "cp2xdp2,data_parallel=fsdp",
    "tp2xpp2,sequence_parallel",
]  # fmt: skip
FEW = ["tp2,sequence_parallel", "cp2,cp_method=all_to_all", "pp2"]
WIDTH = 32
LONG = 1000  # bytes of an answer
DOMAIN = ["--embed_dim=32", "--depth=2", "--patch_size=4", "--num_classes=1000", *COMMON]
DOMAINS = [*layouts.DOMAINS, "domain2,amp_mode=bf16"]


ALL = pytest.mark.slow("every method and schedule of model parallelism, and two kinds together")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Call with a preset and options: {(size, layout): row}; the command runs once, with a picture."""
    known = {}

    def rows(preset, *words):
        key = (preset, words)
        if key not in known:
            folder = tmp_path_factory.mktemp(preset)
            files = [f"--json={folder}/out.json", f"--png={folder}/out.png"]
            benchmark.main(["layouts", preset, "--steps=1", *files, *words])
            assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
            figures = json.loads((folder / "out.json").read_text())
            assert figures["machine"]["device"] == "cpu"
            known[key] = {(row["size"], row["layout"]): row for row in figures["rows"]}
        return known[key]

    return rows


@pytest.fixture
def dp(measured):
    return measured("dp", "--rounds=1", "--sizes", "4", "1", *DP)


@pytest.fixture(params=[pytest.param(FEW, id="few"), pytest.param(LAYOUTS, id="all", marks=ALL)])
def mp(measured, request):
    rows = measured("mp", "--rounds=2", "--layouts", *request.param, f"--sizes={WIDTH}", *MP)
    return {name: row for (_, name), row in rows.items()}


@pytest.fixture
def domain(measured):
    rows = measured("domain", "--rounds=1", "--layouts", *DOMAINS, "--sizes=68", *DOMAIN)
    return {name: row for (_, name), row in rows.items()}


def test_every_layout_of_every_size_has_a_row(dp, mp, domain):
    assert list(dp) == [("ranks 1", INDEPENDENT), *(("ranks 4", name) for name in (INDEPENDENT, *STRATEGIES))]
    assert list(mp) in ([ONE, *FEW], [ONE, *LAYOUTS])
    assert list(domain) == [ONE, *DOMAINS]
    for row in [*dp.values(), *mp.values(), *domain.values()]:
        assert min(row["seconds"], row["memory"]["peak"], row["speedup"]) > 0
        assert row["samples_per_sec"] == pytest.approx(row["batch"] / row["seconds"])
        assert not row["out_of_memory"]
        if row["layout"] in (INDEPENDENT, ONE):
            assert row["speedup"] == 1 and not any(row["messages"].values())
    assert len(mp["pp2"]["speedup_of_rounds"]) == 2


@pytest.mark.slow("measured steps beside their plans; test_plan_counts.py counts quickly")
def test_a_step_holds_and_sends_what_is_planned_and_no_more(dp, mp, domain):
    cases = {("dp", case.name): case for case in layouts.strategy_cases(DP, STRATEGIES, 4)}
    cases |= {("mp", case.name): case for case in layout_cases([*MP, f"--embed_dim={WIDTH}"], list(mp)[1:])}
    cases |= {("domain", case.name): case for case in domain_cases(DOMAIN, DOMAINS, 68)}
    for (preset, name), case in cases.items():
        row = {"dp": dp, "mp": mp, "domain": domain}[preset][("ranks 4", name) if preset == "dp" else name]
        traces = trace_step(case.config, case.layout, "cpu")
        uneven = 0.12 if "all_to_all" in name else 1e-6  # the plan is of one rank, which has another share
        for phase, kinds in by_phase(*[trace.messages for trace in traces]).items():
            expected = {kind: [calls, pytest.approx(size, rel=uneven)] for kind, (calls, size) in kinds.items()}
            assert row["messages"][phase] == expected, (name, phase)
        for part in HELD:
            held, planned = row["memory"][part], max(trace.held[part] for trace in traces)
            if part == "activations" and "dtensor" in name:
                assert held is None
            else:  # zero1: a tensor is never divided
                assert held == pytest.approx(planned, rel=0.05 if part == "activations" else 0.02), (name, part)


def test_memory_of_four_ranks_is_within_5_percent_of_theory(dp):
    values = dp["ranks 1", INDEPENDENT]["memory"]["parameters"]  # bytes of one number for each parameter
    copies = {INDEPENDENT: 4, "ddp": 4, "zero1": 2 + 2 / 4, "zero2": 1 + 4 / 4, "fsdp": 4 / 4, "hsdp": 4 / 2}
    for name, times in copies.items():
        held = sum(dp["ranks 4", name]["memory"][part] for part in STATES)
        assert held == pytest.approx(times * values, rel=0.05), name
    activations = {row["memory"]["activations"] for row in dp.values()}
    assert len(activations) == 1 and activations.pop() > 0  # the same local batch everywhere


def test_memory_is_what_tensors_hold(domain):
    """Of one device: weights, gradients, two moments and activations."""
    (case,) = domain_cases(DOMAIN, [], 68)
    weights = 4 * sum(p.numel() for p in build_model(case.config).parameters())
    assert 4 * weights < domain[ONE]["memory"]["peak"] < 5 * weights + 2 * domain[ONE]["memory"]["activations"]


def test_memory_through_a_step_rises_and_falls_and_is_drawn(dp, tmp_path):
    rows = [row for (size, _), row in dp.items() if size == "ranks 4"]
    for row in rows:
        parts = dict(layouts.stretches(row["curve"]))
        assert list(parts) == ["forward", "backward", "update"]
        assert 0 < parts["forward"][0] < max(parts["forward"])
        assert parts["backward"][-1] < max(parts["backward"]) <= row["memory"]["peak"] / MIB * 1.001
    held = {row["layout"]: layouts.stretches(row["curve"])[0][1][0] for row in rows}
    # zero2 has its weights whole from the forward pass on alone: before it, it holds what fsdp holds.
    assert held["fsdp"] == held["zero2"] < held["hsdp"] < held["zero1"] < held["ddp"]
    layouts.write_memory_picture(tmp_path / "memory.png", {"rows": rows})
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    with refusal("there is no training step to draw"):
        layouts.write_memory_picture(tmp_path / "none.png", {"rows": [rows[0] | {"curve": []}]})


def test_a_domain_keeps_less_than_one_device(domain):
    """Half of the tokens' activations and, with fsdp, half of the weights, gradients and moments."""
    one, domain2, whole_weights, half = (domain[name]["memory"] for name in (ONE, *DOMAINS[1:]))
    assert domain2["activations"] == whole_weights["activations"] < 0.75 * one["activations"]
    assert domain2["peak"] < whole_weights["peak"] < one["peak"]
    assert half["activations"] < 0.9 * domain2["activations"]


@pytest.mark.slow("nine variants of strategies, each trained")
def test_a_strategy_may_have_options_of_its_own():
    names = [
        "fsdp", "fsdp,wrap_policy=none", "fsdp,wrap_policy=size,wrap_min_params=10000", "fsdp,gather_dtype=bf16",
        "ddp,gradient_compression=bf16", "ddp,activation_checkpointing=full",
        "ddp,activation_checkpointing=full,checkpointing_interval=2", "ddp,activation_checkpointing=selective",
        "zero2,gather_dtype=bf16,gradient_accumulation=2",
    ]  # fmt: skip
    rows = {row["layout"]: row for row in layouts.run(DP, "dp", names, [2], None, steps=1, rounds=1)["rows"]}
    values = rows[INDEPENDENT]["memory"]["parameters"]
    most = {name: row["memory"]["parameters at most"] for name, row in rows.items()}
    assert most[names[2]] < most["fsdp"] < most[names[1]] == pytest.approx(1.5 * values, rel=1e-3)
    full, every_second, selective = (rows[name]["memory"]["activations"] for name in names[5:8])
    assert full < min(every_second, selective)
    whole = rows[INDEPENDENT]["memory"]["activations"]
    assert max(every_second, selective) < whole
    assert rows[names[8]]["memory"]["activations"] < 0.6 * whole  # of one of two micro-batches
    assert rows[names[4]]["messages"]["backward"] == {"all_reduce": (1, values / 2)}


def test_where_memory_runs_out_the_sweep_goes_on(capsys):
    options = {"sizes": (24, 88), "steps": 1, "rounds": 2, "memory_limit_gib": 1.4e-3}
    rows = layouts.run(DOMAIN, "domain", ["dp2"], **options)["rows"]
    out = {(row["layout"], row["size"]) for row in rows if row["out_of_memory"]}
    assert out == {(ONE, "88 x 88"), ("dp2", "88 x 88")}
    for row in rows:
        assert ("seconds" in row) == (not row["out_of_memory"])
    printed = capsys.readouterr()
    assert "out of memory" in printed.out
    assert re.findall(r"^turn (\d) of 8, ", printed.err, re.M) == list("123456")
    _, so_far = printed.err.split("after round 1 of 2:\n")
    table = so_far.partition("turn 5")[0].split("\n")
    assert len([line for line in table if line.startswith("| dp2 ")]) == 2
    assert sum("out of memory" in line for line in table) == 2


OF_RANKS = pytest.mark.slow("more lines of ranks that have started: test_refusals.py has each of them")


@pytest.mark.parametrize(
    "preset, words, message",
    [
        ("dp", ["--layouts", "ddp", "zero9"], "data_parallel: 'zero9' should be 'ddp', 'zero1'"),
        ("dp", ["--layouts", "fsdp,wrap_polic=none"], "unknown option '--wrap_polic' (did you mean '--wrap_policy'"),
        ("dp", ["--layouts", "ddp", "fsdp,bucket_cap_mb=1"], "bucket_cap_mb belongs to data_parallel ddp and zero1"),
        ("dp", ["--sizes", "2", "0"], "argument --sizes: 0 is not within"),
        ("dp", ["--rounds", "0"], "argument --rounds: 0 is not within"),
        ("dp", ["--sizes=2", "--layouts", "hsdp,dp_shard=3"], "2 data-parallel ranks cannot be split"),
        ("dp", ["--gradient_accumulation=3"], "cannot be shared by 1 ranks in 3 micro-batches"),
        ("dp", ["--num_heads=7"], "embed_dim 64 is not a multiple of num_heads 7"),
        ("dp", ["--sizes=2", "--layouts", "fsdp,local_batch_size=4"], "is not local_batch_size 4 x 2 ranks"),
        ("dp", ["--enable_cuda_graphs"], "needs a GPU"),  # refused by the ranks
        ("mp", ["--layouts", "tp0"], "layout 'tp0': expected sizes"),
        ("mp", ["--layouts", "tp4096"], "4096 ranks are too many for "),
        ("mp", ["--layouts", "tp1"], "layout 'tp1': it has one rank"),
        ("mp", ["--layouts", "pp2,gradient_accumulation=1"], "pp_schedule 1f1b over 2 stages needs at least as many"),
        ("mp", ["--layouts", "dp3"], "global_batch_size 4 cannot be shared by 3"),
        ("mp", ["--layouts", "tp2xdp2,tp_backend=dtensor"], "tp_backend dtensor goes with data_parallel zero2"),
        ("mp", ["--layouts", "tp2", "--tensor_parallel=2"], "1 ranks cannot be split as tp 2"),
        ("mp", ["--config=nothing"], "config/mp.yaml: no config 'nothing'"),
        pytest.param("mp", ["--layouts", "tp3"],
                     "layout 'tp3': tensor parallel: 2 heads cannot be split over 3 ranks", marks=OF_RANKS),
        ("domain", ["--layouts", "domain2xdomain2"], "layout 'domain2xdomain2': expected sizes of domain, tp, dp"),
        ("domain", ["--sizes", "30"], "img_size [30, 30] cannot be cut into patches of [4, 4]"),
        pytest.param("domain", ["--layouts", "domain3,domain_method=all_to_all"], "cannot split 2 heads over 3 ranks",
                     marks=OF_RANKS),
        ("domain", ["--layouts", "domain4", "--sizes", "8"], "2 rows of patches cannot be split over 4 ranks"),
        ("domain", ["--memory_limit_gib", "0"], "argument --memory_limit_gib: 0 is not within"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line(preset, words, message, capfd):
    common = {"dp": DP, "mp": MP, "domain": DOMAIN}[preset]
    with refusal(re.escape(message)):
        benchmark.main(["layouts", preset, *common, *words])
    told = capfd.readouterr().err
    assert [line for line in told.splitlines() if not line.startswith("turn ")] == []  # of the ranks


def test_it_is_not_started_by_torchrun():
    with mock.patch.dict(os.environ, programs.launch_variables(0, 2)), refusal("starts its ranks itself"):
        benchmark.main(["layouts", "mp", *MP])


def test_a_rank_that_the_system_kills_is_out_of_memory_and_another_that_ends_ends_the_others():
    case = layout_cases([*MP, "--embed_dim=32"], ["tp2"])[1]
    with Teams(case.config) as teams:
        assert len(cases.turn(teams, case, 1, None, False)) == 2
        ranks = list(teams.running[2].processes)
        ranks[1].kill()
        assert cases.turn(teams, case, 1, None, False) is None
        assert not any(process.is_alive() for process in ranks)
        assert len(cases.turn(teams, case, 1, None, False)) == 2  # by new ones
        ranks = list(teams.running[2].processes)
        ranks[1].terminate()
        with refusal("rank 1 of 2 has ended|rank 0 failed"):
            cases.turn(teams, case, 1, None, False)
    assert not any(process.is_alive() for process in ranks)


@pytest.mark.slow("the processes that a benchmark starts by itself, without forks for Ctrl-C, and how they end with it")
@pytest.mark.parametrize("how", ["ctrl-c", "kill -INT", "kill -KILL"])
def test_interrupted_it_leaves_no_process_behind(how):
    words = ["benchmark.py", "layouts", "dp", *DP, "--layouts", "ddp", "--rounds=100000"]
    process = popen([sys.executable, *words]) if how == "ctrl-c" else programs.start(words)
    try:
        family = psutil.Process(process.pid)
        expected = 4 if how == "ctrl-c" else 3  # 1 + 2 ranks, and a tracker where nothing is forked
        wait_until(lambda: len(family.children(recursive=True)) >= expected, 120)
        time.sleep(5 if how == "ctrl-c" else 2)  # some of them train
        children = family.children(recursive=True)
        for one in [family, *children] if how == "ctrl-c" else [family]:
            one.send_signal(signal.SIGKILL if how == "kill -KILL" else signal.SIGINT)
        assert process.wait(60) == (-signal.SIGKILL if how == "kill -KILL" else 130)
        assert not psutil.wait_procs(children, 120)[1]
    finally:
        process.kill()
        process.communicate()


def test_a_gradient_that_lies_where_an_activation_was_handed_on_counts_as_backward():
    sent = [SimpleNamespace(tensor=torch.zeros(3))]
    stage = SimpleNamespace(forward_one_chunk=None, get_fwd_send_ops=lambda: sent, get_bwd_send_ops=lambda: sent)
    parallel = SimpleNamespace(pipeline=SimpleNamespace(stages=[stage], used=[stage]))
    task, scaler = SimpleNamespace(predict=None), SimpleNamespace(step=None)
    step = SimpleNamespace(parallel=parallel, task=task, scaler=scaler, loss=None)
    listener = Tracker()
    message = Collective("send", 12, None, [[sent[0].tensor]])
    with phases_of(step, listener, lambda before, phase: None):
        stage.get_fwd_send_ops()
        assert listener.phase_of(message) == "forward"
        stage.get_bwd_send_ops()
        assert listener.phase_of(message) == "backward"


def test_peak_memory_is_the_most_that_is_alive_at_once():
    x = torch.ones(1000)
    with Tracker([x]) as live:
        y = x + 1
        z = y.view(10, 100)  # no memory of its own
        torch.empty(5000, device="meta").view(50, 100)  # none at all: torch is asked for a shape
        del y
        w = z * 2
        del z, w
        x + 1
    assert live.memory()["peak"] == 3 * 4000


def test_a_tensor_that_is_freed_while_bytes_are_added_up_does_no_harm():
    """As Python's garbage collection may free one at any time."""
    tensors = [torch.ones(10), torch.ones(20)]

    class Freeing(set):
        def __contains__(self, number):
            tensors.clear()
            return super().__contains__(number)

    live = Tracker(tensors)
    assert live.nbytes(Freeing([0])) == 40
    assert not live.storages


def test_what_counts_as_out_of_memory():
    assert all(map(is_out_of_memory, (
        MemoryError(), torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory: you tried to allocate"),
    )))  # fmt: skip
    assert not is_out_of_memory(RuntimeError("size mismatch")) and not is_out_of_memory(ValueError("out of memory"))


def test_the_older_ways_of_the_chapter_run():
    done = programs.run(["-m", "docs.examples.older_ways", "--devices", "cpu", "cpu"])
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert printed.count("same output True") == 2 and "place 1, cpu: blocks [3, 4, 5]" in printed


def killed_while_it_answers(_):
    send = Connection._send

    def send_in_part(pipe, message):
        send(pipe, bytes(message)[:LONG])
        if len(message) > LONG:
            os.kill(os.getpid(), signal.SIGKILL)

    Connection._send = send_in_part
    return bytes(100 * LONG)


def test_a_rank_that_is_killed_while_it_answers_is_named():
    with Pool(forked.context()) as pool, pytest.raises(RanksFailed) as failed:
        pool.call(1, killed_while_it_answers)
    assert str(failed.value.failures[0]) == "rank 0 of 1 has ended (out of memory?)"
