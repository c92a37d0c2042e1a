"""train_shard.py as a user runs it: train.py's losses, a run that moves between layouts, one line for a bad one."""

import contextlib
import importlib
import io
import os
import signal
import time
import unittest.mock

import pytest
import torch

from tests.support import programs
from tests.support.launch import summary, torchrun
from tests.support.programs import finish
from utils import comm
from utils.errors import run_main

COMMON = {"num_iters": 60, "checkpoint_every": 20, "validate_every": 4}


def shard(words):
    return programs.start_ranks(["train_shard.py", "--yaml_config=config/ViT.yaml", *words])


def test_a_run_that_moves_from_one_layout_to_another_has_the_losses_of_train_py(tiny_options, tmp_path):
    serial = programs.start(["train.py", *tiny_options(run_num="serial", **COMMON)])
    first = shard(tiny_options(run_num="moved", domain_parallel=2, domain_method="ring", **COMMON))
    log = tmp_path / "logs/quick/moved/out.log"
    while not (log.exists() and "Saved checkpoint iter-00000020" in log.read_text()):
        assert first[0].poll() is None, first[0].said()
        time.sleep(0.02)
    first[0].send_signal(signal.SIGTERM)
    (status, output), (other, _) = map(finish, first)
    assert "on 2 x cpu: domain 2" in output and status == other == 75, output
    then = shard(tiny_options(run_num="moved", domain_parallel="1x2", data_parallel="fsdp", **COMMON))
    status, output = finish(then[0])
    assert status == 0 and "on 2 x cpu: domain 1x2" in output and "Resuming at iteration" in output, output
    assert serial.wait() == 0
    expected, found = summary(tmp_path, "serial"), summary(tmp_path, "moved")
    for key in ("train_loss", "val_loss", "rmse"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key


def outcome(script, words):
    """Exit status of a script on this rank, which a launcher is pretended to have started, and what it says."""
    launcher = {
        "RANK": comm.rank(), "LOCAL_RANK": comm.rank(), "WORLD_SIZE": comm.world_size(), "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }  # fmt: skip
    said, main = io.StringIO(), importlib.import_module(script).main
    with (
        unittest.mock.patch.dict(os.environ, {name: str(value) for name, value in launcher.items()}),
        unittest.mock.patch.object(comm, "init", return_value=torch.device("cpu")),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as end,
    ):
        run_main(lambda: main(words))
    return end.value.code, said.getvalue()


SHARD, TRAIN, MP = "train_shard", "train", "train_mp"
NOT_HERE = "config/ViT.yaml: quick: train_shard.py goes without sequence_parallel and tp_backend dtensor"


@pytest.mark.parametrize(
    ("size", "script", "options", "line"),
    [
        (4, SHARD, {"domain_parallel": 3}, "4 ranks cannot be split as domain 3 x dp: 4 is not a multiple of 3"),
        (
            4, SHARD, {"domain_parallel": 4, "patch_size": 8},
            "quick: domain parallel: 2 rows of patches cannot be split over 4 ranks",
        ),
        (2, SHARD, {"domain_parallel": "2x"}, "domain_parallel '2x': expected ranks along latitude, or 2x2 for tiles"),
        (2, SHARD, {"domain_parallel": 0}, "command line: domain_parallel: 0"),
        (2, SHARD, {"domain_parallel": 2, "sequence_parallel": True}, NOT_HERE),
        (2, SHARD, {"tensor_parallel": 2, "sequence_parallel": True}, NOT_HERE),
        (4, SHARD, {"domain_parallel": 2, "tensor_parallel": 2, "tp_backend": "dtensor"}, NOT_HERE),
        (2, SHARD, {"context_parallel": 2}, "context_parallel 2: the model is split by train_mp.py"),
        (2, TRAIN, {"domain_parallel": 2}, "domain_parallel 2: the model is split by train_shard.py"),
        (2, MP, {"domain_parallel": "1x2"}, "domain_parallel 1x2: the model is split by train_shard.py"),
        (
            3, SHARD, {"domain_parallel": 3, "domain_method": "all_to_all", "global_batch_size": 3},
            "quick: domain parallel: all_to_all cannot split 2 heads over 3 ranks",
        ),
        (
            2, SHARD, {"domain_parallel": 2, "domain_method": "ring", "dropout": 0.1},
            "quick: domain parallel: ring attention cannot drop out attention weights; use gather or all_to_all",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_the_same_line_on_every_rank(ranks, tiny_options, size, script, options, line):
    words = ["--yaml_config=config/ViT.yaml", *tiny_options(**{"global_batch_size": 8} | options)]
    for status, said in ranks(size, outcome, script, words):
        assert status == 2
        assert said.startswith(f"error: {line}") and said.count("\n") == 1, said


def test_under_torchrun_there_is_no_more_than_the_line(tiny_options):
    words = ["--yaml_config=config/ViT.yaml", *tiny_options(domain_parallel=2, patch_size=16)]
    status, output = finish(torchrun(words, script="train_shard.py"))
    assert status != 0 and "exitcode  : 2 " in output
    assert "quick: domain parallel: 1 rows of patches cannot be split over 2 ranks" in output
    assert "Traceback" not in output.split("ChildFailedError")[0].rsplit("Traceback", 1)[0]
