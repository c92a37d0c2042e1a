"""`benchmark.py mp` counts what the theory of each layout says, and ends whatever happens to a rank."""

import json
from types import SimpleNamespace

import pytest
import torch

import benchmark
from tools.benchmarks.cases import HELD
from tools.benchmarks.layouts import ONE, layout_cases, run_mp
from tools.instruments.counting import Collective
from tools.instruments.phases import phases_of
from tools.instruments.rank_case import figures_of, seconds_of
from tools.instruments.team import Teams
from tools.instruments.tracker import Tracker
from utils.errors import UsageError, run_main

# 9 x 8 patches: rows that two ranks share unequally, 5 and 4.
WORDS = [
    "--config=mp_quick", "--img_size", "36", "32", "--depth=2", "--num_heads=2", "--global_batch_size=4",
    "--device=cpu",
]  # fmt: skip
LAYOUTS = [
    "tp2", "tp2,sequence_parallel", "tp2,tp_backend=dtensor", "cp2", "cp2,cp_method=ring", "cp2,cp_method=all_to_all",
    "pp2", "pp2,pp_schedule=gpipe", "dp2,data_parallel=zero1",
]  # fmt: skip
B, L, ROWS, COLUMNS = 4, 2, 9, 8


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """{(layout, embed_dim): row} and the folder with all that the command wrote."""
    folder = tmp_path_factory.mktemp("mp")
    benchmark.main([
        "mp", "--layouts", *LAYOUTS, "--embed_dims", "32", "64", "--rounds=2", "--steps=1", f"--json={folder}/mp.json",
        f"--png={folder}/mp.png", *WORDS,
    ])  # fmt: skip
    result = json.loads((folder / "mp.json").read_text())
    return result, {(row["layout"], row["embed_dim"]): row for row in result["rows"]}, folder


def test_every_layout_of_every_size_has_a_row(measured):
    result, rows, folder = measured
    assert set(rows) == {(name, d) for d in (32, 64) for name in (ONE, *LAYOUTS)}
    assert result["tokens"] == ROWS * COLUMNS and result["machine"]["device"] == "cpu"
    for (name, _), row in rows.items():
        assert row["step_seconds"] > 0 and row["ratio"] > 0 and len(row["ratio_of_rounds"]) == 2
        assert row["ranks"] == (1 if name == ONE else 2)
        assert name != ONE or (row["ratio"] == 1 and not any(row["messages"].values()))
    assert (folder / "mp.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("d", [32, 64])
def test_tensor_parallel_sends_two_all_reduces_a_block_each_way(measured, d):
    messages = measured[1]["tp2", d]["messages"]
    one = [2 * L, 2 * L * B * ROWS * COLUMNS * d * 4]  # an all-reduce over two ranks is worth its own size
    assert messages == {"forward": {"all_reduce": one}, "backward": {"all_reduce": one}, "update": {}}


@pytest.mark.parametrize("d", [32, 64])
def test_context_parallel_gathers_keys_and_values_once_a_block(measured, d):
    row = measured[1]["cp2", d]
    kv = [L, L * 2 * B * 5 * COLUMNS * d * 4]  # the shorter band is filled up
    assert row["messages"]["forward"] == {"all_gather": kv, "all_reduce": [1, 2 * B * 4]}
    gradients = [1, row["memory"]["gradients"]]
    assert row["messages"]["backward"] == {"reduce_scatter": kv, "all_reduce": gradients}
    assert row["messages"]["update"] == {}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sends_what_the_theory_asks_for_and_no_more(measured, name):
    for d in (32, 64):
        row = measured[1][name, d]
        for phase, kinds in row["predicted_messages"].items():
            assert set(row["messages"][phase]) == set(kinds), phase
            for kind, (calls, size) in kinds.items():
                assert row["messages"][phase][kind] == [calls, pytest.approx(size, rel=1e-6)], (phase, kind)


@pytest.mark.parametrize("name", [ONE, *LAYOUTS])
def test_memory_is_that_of_the_formulas(measured, name):
    for d in (32, 64):
        row = measured[1][name, d]
        for part in HELD:
            held, formula = row["memory"][part], row["predicted_memory"][part]
            if part == "activations" and "dtensor" in name:
                assert held is None
            elif part == "activations":
                assert held == pytest.approx(formula, rel=0.05), d
            else:
                assert held == pytest.approx(formula, rel=0.02), (part, d)  # zero1: a tensor is never divided


def test_theory_holds_in_two_dimensions():
    names = ["tp2xcp2", "cp2xdp2,data_parallel=fsdp", "tp2xpp2,sequence_parallel"]
    for row in run_mp([*WORDS, "--embed_dim=32"], names, steps=1, rounds=1)["rows"]:
        for phase, kinds in row["predicted_messages"].items():
            expected = {kind: pytest.approx(both) for kind, both in kinds.items()}
            assert row["messages"][phase] == expected, (row["layout"], phase)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--layouts", "tp2xtp2"], "layout 'tp2xtp2': expected sizes of tp, cp, pp, dp"),
        (["--layouts", "sp2"], "layout 'sp2': expected sizes of tp, cp, pp, dp"),
        (["--layouts", "tp0"], "layout 'tp0': expected sizes"),
        (["--layouts", "tp4096"], "4096 ranks are too many for "),
        (["--layouts", "tp1"], "layout 'tp1': it has one rank"),
        (["--layouts", "tp2,sequence"], "unknown option '--sequence'"),
        (["--layouts", "pp2,gradient_accumulation=1"], "pp_schedule 1f1b over 2 stages needs at least as many"),
        (["--layouts", "dp3"], "global_batch_size 4 cannot be shared by 3"),
        (["--layouts", "tp2xdp2,tp_backend=dtensor"], "tp_backend dtensor goes with data_parallel zero2"),
        (["--layouts", "tp2", "--tensor_parallel=2"], "1 ranks cannot be split as tp 2"),
        (["--rounds", "0"], "argument --rounds: 0 is not within 1 to 1048576"),
        (["--embed_dims", "0"], "argument --embed_dims: 0 is not within"),
        (["--embed_dims", "63"], "embed_dim 63 is not a multiple of num_heads 2"),
        (["--config=nothing"], "config/mp.yaml: no config 'nothing'"),
        (["--layouts", "tp3"], "layout 'tp3': tensor parallel: 2 heads cannot be split over 3 ranks"),  # by the ranks
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line_and_status_2(words, message, capfd):
    with pytest.raises(SystemExit) as end:
        run_main(lambda: benchmark.main(["mp", *WORDS, *words]))
    error = capfd.readouterr().err.splitlines()
    assert end.value.code == 2 and len(error) == 1 and error[0].startswith("error: ")
    assert message in error[0]


def test_it_is_not_started_by_torchrun(monkeypatch):
    launch = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match="starts its ranks itself"):
        run_mp(WORDS)


def test_a_rank_that_is_gone_ends_the_others():
    case = layout_cases([*WORDS, "--embed_dim=32"], ["tp2"])[1]
    with pytest.raises(UsageError, match="rank 1 of 2 has ended|rank 0 of 2 failed"):
        with Teams(case.config) as teams:
            teams.call(2, figures_of, case)
            assert min(teams.call(2, seconds_of, case, 1)) > 0
            processes = teams.running[2].processes
            processes[1].kill()
            teams.call(2, seconds_of, case, 1)
    assert not any(process.is_alive() for process in processes)


def test_a_gradient_that_lies_where_an_activation_was_handed_on_counts_as_backward():
    sent = [SimpleNamespace(tensor=torch.zeros(3))]
    stage = SimpleNamespace(forward_one_chunk=None, get_fwd_send_ops=lambda: sent, get_bwd_send_ops=lambda: sent)
    parallel = SimpleNamespace(pipeline=SimpleNamespace(stages=[stage], used=[stage]))
    step = SimpleNamespace(parallel=parallel, scaler=SimpleNamespace(step=None), loss=None)
    listener = Tracker()
    message = Collective("send", 12, None, [[sent[0].tensor]])
    with phases_of(step, listener):
        stage.get_fwd_send_ops()
        assert listener.phase_of(message) == "forward"
        stage.get_bwd_send_ops()
        assert listener.phase_of(message) == "backward"
