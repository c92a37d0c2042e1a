"""`benchmark.py dp` measures what the theory of each strategy says, and ends whatever happens to a rank."""

import json
import signal
import sys
import time

import psutil
import pytest
from matplotlib.colors import to_hex
from pandas import DataFrame

import benchmark
from tests.support import programs
from tests.support.launch import popen
from tools.benchmarks.cases import STATES
from tools.benchmarks.layouts import STRATEGIES, by_kind, run_dp, strategy_cases
from tools.instruments.rank_case import figures_of, hidden_share, seconds_of
from tools.instruments.team import Team
from tools.pictures import SHADES, draw_bars, panels
from utils.errors import UsageError, run_main

WORDS = [
    "--config=quick", "--img_size", "16", "32", "--embed_dim=64", "--depth=3", "--num_heads=2", "--local_batch_size=2",
    "--device=cpu",
]  # fmt: skip
UNITS = 4  # the blocks, and what is left


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """{(strategy, ranks): row} and the folder with all that the command wrote."""
    folder = tmp_path_factory.mktemp("dp")
    benchmark.main([
        "dp", "--world_sizes", "4", "1", "2", "--rounds=2", "--steps=1", f"--json={folder}/dp.json",
        f"--png={folder}/dp.png", *WORDS,
    ])  # fmt: skip
    result = json.loads((folder / "dp.json").read_text())
    return result, {(row["strategy"], row["ranks"]): row for row in result["rows"]}, folder


def calls_of(row):
    return {kind: calls for kind, (calls, _) in by_kind(row["messages"]).items()}


def bytes_of(row, messages="messages"):
    return {kind: size for kind, (_, size) in by_kind(row[messages]).items()}


def test_every_strategy_at_every_world_size_has_a_row(measured):
    result, rows, folder = measured
    expected = [("independent", 1)]
    expected += [(name, size) for size in (2, 4) for name in ("independent", *STRATEGIES)]
    assert list(rows) == expected
    assert result["local_batch_size"] == 2 and result["machine"]["device"] == "cpu"
    for (name, _), row in rows.items():
        assert row["samples_per_sec"] > 0 and row["of_one_rank"] > 0 and len(row["efficiency_of_rounds"]) == 2
        assert row["hidden"] is None
        assert name != "independent" or row["efficiency"] == 1
    assert (folder / "dp.png").read_bytes().startswith(b"\x89PNG")


def test_memory_of_four_ranks_is_within_5_percent_of_the_formulas(measured):
    result, rows, _ = measured
    values = 4 * result["parameters"]  # bytes of one number for each parameter
    for name, copies in (
        ("independent", 4),
        ("ddp", 4),
        ("zero1", 2 + 2 / 4),
        ("zero2", 1 + 4 / 4),
        ("fsdp", 4 / 4),
        ("hsdp", 4 / 2),  # two groups of two
    ):
        row = rows[name, 4]
        held = sum(row["memory"][part] for part in STATES)
        assert held == pytest.approx(copies * values, rel=0.05), name
        theory = pytest.approx(copies * values, rel=0.01)  # zero1 never divides a tensor; Adam counts steps
        assert sum(row["predicted_memory"][part] for part in STATES) == theory, name
        for part in STATES:
            assert row["memory"][part] == pytest.approx(row["predicted_memory"][part], rel=1e-3), (name, part)
    activations = {row["memory"]["activations"] for row in rows.values()}
    assert len(activations) == 1 and activations.pop() > 0  # the same local batch everywhere


@pytest.mark.parametrize("n", [2, 4])
def test_messages_are_those_of_the_formulas(measured, n):
    def sharded(gathered, scattered):
        return {"all_gather": gathered, "reduce_scatter": scattered}

    result, rows, _ = measured
    values = 4 * result["parameters"]
    one_way = values * (n - 1) / n
    s = n // 2
    hsdp = sharded(2 * UNITS, UNITS) | {"all_reduce": UNITS}
    hsdp_bytes = {
        "all_gather": 2 * values * (s - 1) / s,
        "reduce_scatter": values * (s - 1) / s,
        "all_reduce": values / s,
    }
    if s == 1:  # nothing is sharded: each rank is a group
        hsdp, hsdp_bytes = {"all_reduce": UNITS}, {"all_reduce": values}
    for name, calls, sent in (
        ("independent", {}, {}),
        ("ddp", {"all_reduce": 1}, {"all_reduce": 2 * one_way}),
        ("zero1", {"all_reduce": 1, "broadcast": n}, {"all_reduce": 2 * one_way, "broadcast": values}),
        ("zero2", sharded(UNITS, UNITS), sharded(one_way, one_way)),
        ("fsdp", sharded(2 * UNITS, UNITS), sharded(2 * one_way, one_way)),
        ("hsdp", hsdp, hsdp_bytes),
    ):  # fmt: skip
        row = rows[name, n]
        assert calls_of(row) == calls, name
        assert bytes_of(row) == pytest.approx(sent, rel=1e-6), name
        assert bytes_of(row, "predicted_messages") == pytest.approx(sent), name


@pytest.mark.slow("nine variants of strategies, each trained")
def test_a_strategy_may_have_options_of_its_own(capsys):
    names = [
        "fsdp", "fsdp,wrap_policy=none", "fsdp,wrap_policy=size,wrap_min_params=10000", "fsdp,gather_dtype=bf16",
        "ddp,gradient_compression=bf16", "ddp,activation_checkpointing=full",
        "ddp,activation_checkpointing=full,checkpointing_interval=2", "ddp,activation_checkpointing=selective",
        "zero2,gather_dtype=bf16,gradient_accumulation=2",
    ]  # fmt: skip
    result = run_dp(WORDS, names, [2], steps=1, rounds=1)
    rows = {row["strategy"]: row for row in result["rows"]}
    values = 4 * result["parameters"]
    most = {name: row["memory"]["parameters at most"] for name, row in rows.items()}
    assert most[names[2]] < most["fsdp"] < most[names[1]] == pytest.approx(1.5 * values, rel=1e-3)
    full, every_second, selective = (rows[name]["memory"]["activations"] for name in names[5:8])
    assert full < min(every_second, selective)
    whole = rows["independent"]["memory"]["activations"]
    assert max(every_second, selective) < whole
    assert rows[names[8]]["memory"]["activations"] < 0.6 * whole  # of one of two micro-batches
    assert bytes_of(rows[names[4]]) == {"all_reduce": values / 2}
    for name, row in rows.items():
        assert bytes_of(row) == pytest.approx(bytes_of(row, "predicted_messages")), name
        held = [row["memory"][part] for part in STATES]
        assert sum(held) == pytest.approx(sum(row["predicted_memory"][part] for part in STATES), rel=0.01), name
        assert row["of_one_rank"] is None
    assert "read from the kernels of a GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--strategies", "ddp", "zero9"], "data_parallel: 'zero9' should be 'ddp', 'zero1'"),
        (["--strategies", "fsdp,wrap_polic=none"], "unknown option '--wrap_polic' .did you mean '--wrap_policy'"),
        (["--strategies", "ddp", "fsdp,bucket_cap_mb=1"], "bucket_cap_mb belongs to data_parallel ddp and zero1"),
        (["--world_sizes", "2", "0"], "argument --world_sizes: 0 is not within"),
        (["--rounds", "0"], "argument --rounds: 0 is not within"),
        (["--world_sizes=2", "--strategies", "hsdp,dp_shard=3"], "2 data-parallel ranks cannot be split"),
        (["--gradient_accumulation=3"], "cannot be shared by 1 ranks in 3 micro-batches"),
        (["--num_heads=7"], "embed_dim 64 is not a multiple of num_heads 7"),
        (["--world_sizes=2", "--strategies", "fsdp,local_batch_size=4"], "is not local_batch_size 4 x 2 ranks"),
        (["--enable_cuda_graphs"], "needs a GPU"),  # refused by the ranks
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line_and_status_2(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        run_main(lambda: benchmark.main(["dp", *WORDS, *words]))
    error = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(error) == 1 and error[0].startswith("error: ")
    with pytest.raises(UsageError, match=message):
        raise UsageError(error[0])


def test_it_is_not_started_by_torchrun(monkeypatch):
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match="starts its ranks itself"):
        run_dp(WORDS)


def test_a_rank_that_is_gone_ends_the_others():
    case = strategy_cases(WORDS, ["ddp"], 2)[1]
    with pytest.raises(UsageError, match="rank 1 of 2 has ended|rank 0 of 2 failed"):
        with Team(2, case.config) as team:
            team.call(figures_of, case)
            assert min(team.call(seconds_of, case, 1)) > 0
            team.processes[1].kill()
            team.call(seconds_of, case, 1)
    assert not any(process.is_alive() for process in team.processes)


@pytest.mark.slow("the processes that a benchmark starts by itself, without forks for Ctrl-C, and how they end with it")
@pytest.mark.parametrize("how", ["ctrl-c", "kill -INT", "kill -KILL"])
def test_interrupted_it_leaves_no_process_behind(how):
    words = ["benchmark.py", "dp", *WORDS, "--strategies", "ddp", "--rounds=100000"]
    process = popen([sys.executable, *words]) if how == "ctrl-c" else programs.start(words)
    try:
        family = psutil.Process(process.pid)
        deadline = time.monotonic() + 120
        expected = 4 if how == "ctrl-c" else 3  # 1 + 2 ranks, and a tracker where nothing is forked
        while len(family.children(recursive=True)) < expected and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(5 if how == "ctrl-c" else 2)  # some of them train
        children = family.children(recursive=True)
        for one in [family, *children] if how == "ctrl-c" else [family]:
            one.send_signal(signal.SIGKILL if how == "kill -KILL" else signal.SIGINT)
        assert process.wait(60) == (-signal.SIGKILL if how == "kill -KILL" else 130)
        assert not psutil.wait_procs(children, 120)[1]
    finally:
        process.kill()
        process.communicate()


def test_hidden_is_the_share_of_communication_under_compute():
    assert hidden_share([(0, 10)], [(5, 20)]) == 0.5
    assert hidden_share([(0, 10), (5, 10), (20, 30)], [(0, 4), (2, 4), (25, 26)]) == 0.25
    assert hidden_share([(0, 10)], []) == 0
    assert hidden_share([], [(0, 1)]) is None


def test_the_older_ways_of_the_chapter_run():
    done = programs.run(["-m", "docs.examples.older_ways", "--devices", "cpu", "cpu"])
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert printed.count("same output True") == 2 and "place 1, cpu: blocks [3, 4, 5]" in printed


@pytest.mark.parametrize("columns", [1, 3])
def test_bars_of_a_column_have_its_colour(columns):
    _, (axes,) = panels(2)
    draw_bars(axes, DataFrame({f"{n} ranks": [1.0, 2.0] for n in range(columns)}, ["ddp", "fsdp"]), SHADES)
    found = dict.fromkeys(to_hex(bar.get_facecolor()) for bar in axes.patches)
    assert list(found) == list(SHADES[:columns])
