"""train_shard.py as a user runs it: train.py's losses, a run that moves between layouts, one line for a bad one."""

import signal

import pytest

from tests.support import programs
from tests.support.launch import losses, torchrun, wait_for
from tests.support.programs import finish

COMMON = {"num_iters": 60, "checkpoint_every": 20, "validate_every": 4}


def shard(words):
    return programs.start_ranks(["train_shard.py", "--yaml_config=config/ViT.yaml", *words])


def test_a_run_that_moves_from_one_layout_to_another_has_the_losses_of_train_py(tiny_options, tmp_path):
    serial = programs.start(["train.py", *tiny_options(run_num="serial", **COMMON)])
    first = shard(tiny_options(run_num="moved", domain_parallel=2, domain_method="ring", **COMMON))
    wait_for(tmp_path / "logs/quick/moved/out.log", "Saved checkpoint iter-00000020", first[0])
    first[0].send_signal(signal.SIGTERM)
    (status, output), (other, _) = map(finish, first)
    assert "on 2 x cpu: domain 2" in output and status == other == 75, output
    then = shard(tiny_options(run_num="moved", domain_parallel="1x2", data_parallel="fsdp", **COMMON))
    status, output = finish(then[0])
    assert status == 0 and "on 2 x cpu: domain 1x2" in output and "Resuming at iteration" in output, output
    assert serial.wait() == 0
    assert losses(tmp_path, "moved") == pytest.approx(losses(tmp_path, "serial"), rel=1e-5)


@pytest.mark.slow("torchrun itself")
def test_under_torchrun_there_is_no_more_than_the_line(tiny_options):
    words = ["--yaml_config=config/ViT.yaml", *tiny_options(domain_parallel=2, patch_size=16)]
    status, output = finish(torchrun(words, script="train_shard.py"))
    assert status != 0 and "exitcode  : 2 " in output
    assert "quick: domain parallel: 1 rows of patches cannot be split over 2 ranks" in output
    assert "Traceback" not in output.split("ChildFailedError")[0].rsplit("Traceback", 1)[0]
