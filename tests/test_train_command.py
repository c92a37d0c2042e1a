"""train.py as a user runs it: exit status, one line for bad input, signals."""

import errno
import random
import shutil
import signal
import time

import h5py
import numpy as np
import pytest

import train
from tests.support import programs
from tests.support.launch import losses, wait_for
from tests.support.refusals import refusal
from training.checkpoints import files as checkpoint_files
from weather import year_files


def start(words):
    return programs.start(["train.py", *words])


def finish(process):
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.slow("a signal at a random time; test_stop_signals.py sends it at known ones")
def test_terminated_at_a_random_time_and_run_again_ends_with_the_same_losses(tiny_options, tmp_path):
    common = {"num_iters": 800, "checkpoint_every": 50, "num_data_workers": 1}
    whole = start(tiny_options(run_num="whole", **common))
    parts = start(tiny_options(run_num="parts", **common))
    wait_for(tmp_path / "logs/quick/parts/out.log", "Starting training", parts)
    time.sleep(random.uniform(0, 2))
    parts.send_signal(random.choice([signal.SIGTERM, signal.SIGUSR1]))
    status, _, err = finish(parts)
    assert status == 75, err
    assert not (tmp_path / "logs/quick/parts/summary.json").exists()
    status, out, err = finish(start(tiny_options(run_num="parts", **common)))
    assert status == 0, err
    assert "Resuming at iteration" in out
    assert finish(whole)[0] == 0
    assert losses(tmp_path, "parts") == losses(tmp_path, "whole")


def test_a_usage_error_is_one_line_and_status_2(tiny_options):
    status, _, err = finish(start(tiny_options(train_data_path="nowhere/train")))
    assert status == 2
    assert err.startswith("error: nowhere/train: no such data folder") and err.count("\n") == 1


def test_a_loss_that_is_not_finite_is_status_1(tiny_options):
    status, _, err = finish(start(tiny_options(lr=1e30, num_iters=50)))
    assert status == 1
    assert err.splitlines()[-1].startswith("error: iteration ") and "last good checkpoint: " in err


def test_help_lists_every_option():
    status, out, _ = finish(start(["--help"]))
    assert status == 0
    for option in ("--yaml_config", "--config", "--run_num", "--no-enable_jit", "--local_batch_size", "--seed"):
        assert option in out


@pytest.fixture
def refused(tiny_options, tmp_path):
    """Assert that train.py refuses options with a line, at once, and leaves no run folder."""

    def check(line, leaves_run=False, **overrides):
        with refusal(line):
            train.main(tiny_options(**overrides))
        assert leaves_run or not (tmp_path / "logs").exists()

    return check


def test_bad_settings_are_refused_before_anything_is_written(refused):
    refused("1979.h5: has 20 channels, 21 were asked for", n_in_channels=21)
    refused("has 16 x 32 points, img_size asks for", img_size=[32, 64])
    refused(r"quick: img_size \[16, 32\] cannot be cut into patches of \[5, 5\]", patch_size=5)
    refused("quick: embed_dim 32 is not a multiple of num_heads 3", num_heads=3)
    refused("global_batch_size 39 is larger than the training data", global_batch_size=39)
    refused("device 'tpu9000': not a device torch knows", device="tpu9000")
    refused("device '.*': not on this machine", device="xla")
    refused("missing.npy: No such file", global_means_path="missing.npy")


def test_a_rollout_that_cannot_be_trained_is_refused(refused, tmp_path, sample_folder, tiny_options):
    refused("1979.h5: has 20 frames, dt 1 x 20 steps of a rollout needs at least 21", rollout_steps=20)
    refused(
        "rollout_schedule .*: give pairs of an iteration, in increasing order", rollout_schedule=["[5, 2]", "[3, 4]"]
    )
    refused("rollout_schedule .*: .* 1 to 1000", rollout_schedule=["[5, 1001]"])
    refused(
        "rollout_steps 2: the model takes 20 channels and forecasts 18, not enough", rollout_steps=2, n_out_channels=18
    )
    refused("predict change: n_out_channels must not exceed n_in_channels", predict="change", n_in_channels=18)
    refused("1979.h5: no field 'land' .lat, lon. of numbers; it has orography", forcings="land")
    refused(r"forcings \['hour', 'hour'\]: one is named twice", forcings=["hour", "hour"])
    refused("channel_weights and pressure_weights belong to loss squared_error", pressure_weights=True)
    shutil.copytree(sample_folder / "stats", tmp_path / "stats")
    (tmp_path / "stats/change_stds.npy").unlink()
    refused(
        "change_stds.npy: not there; .* make it with `python -m weather.year_files TRAIN_FOLDER",
        predict="change", global_stds_path=tmp_path / "stats/global_stds.npy",
    )  # fmt: skip


@pytest.mark.parametrize(
    "keys", [{"forcings": "hour"}, {"rollout_steps": 2}, {"predict": "change"}, {"loss": "squared_error"}]
)
def test_keys_of_forecasts_are_refused_by_other_tasks(refused, keys):
    refused(f"{next(iter(keys))} belongs to task forecast, not to transport", task="transport", **keys)


def test_weights_to_begin_with_that_do_not_fit_are_refused(refused, tmp_path, tiny_options):
    train.main(tiny_options(num_iters=2, warmup=0, expdir=tmp_path / "other"))
    other = tmp_path / "other/quick/00"
    refused("was trained with depth 2, not 1: give --depth=2, or other weights", init_from=other, depth=1)
    refused(r"img_size \[16, 32\], not \[16, 16\]: give --img_size 16 32, or", init_from=other, img_size=[16, 16])
    refused(r"was trained with forcings \[\], not \['hour'\]", init_from=other, forcings="hour")
    refused("nowhere: no such folder", init_from="nowhere")
    (tmp_path / "empty").mkdir()
    refused("empty: no whole checkpoint in it", init_from=tmp_path / "empty")


def test_statistics_of_the_change_are_made_for_data_that_came_without(tmp_path, sample_folder, capsys):
    shutil.copytree(sample_folder / "stats", tmp_path / "stats")
    expected = np.load(tmp_path / "stats/change_stds.npy")
    (tmp_path / "stats/change_stds.npy").unlink()
    year_files.main([str(sample_folder / "train"), str(tmp_path / "stats")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "stats/change_stds.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "stats/change_stds.npy"), expected)
    years = [h5py.File(path, locking=False)["fields"][:].astype(float) for path in (sample_folder / "train").iterdir()]
    squares = [np.square(np.diff(year, axis=0)) for year in years]
    np.testing.assert_allclose(expected[0, :, 0, 0], np.sqrt(np.concatenate(squares).mean((0, 2, 3))), rtol=1e-6)
    with refusal("nothing: holds no .h5, .nc or .zarr"):
        year_files.main([str(tmp_path / "nothing"), str(tmp_path)])


def test_a_log_folder_that_cannot_be_written_is_refused(tiny_options, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):  # a line and status 2 of run_main
        train.main(tiny_options(expdir=tmp_path / "file"))


def test_a_run_of_other_settings_is_left_alone(refused, tiny_options, tmp_path):
    train.main(tiny_options(num_iters=2, warmup=0))
    before = (tmp_path / "logs/quick/00/summary.json").read_text()
    line = r"run of other settings: depth \(2 there, 1 now\), lr \(0.001 there, 0.5 now\); choose another --run_num$"
    refused(line, leaves_run=True, num_iters=2, warmup=0, depth=1, lr=0.5)
    line = r"optimizer \(Adam there, Muon now\); choose another --run_num, and --init_from \S+/quick/00 to begin with"
    refused(line, leaves_run=True, num_iters=2, warmup=0, optimizer="Muon")
    assert (tmp_path / "logs/quick/00/summary.json").read_text() == before


def test_the_second_of_two_runs_in_one_folder_is_refused_and_the_first_goes_on(tiny_options, tmp_path):
    options = tiny_options(num_iters=3000, run_num="shared", checkpoint_every=3000)
    first = start(options)
    log = tmp_path / "logs/quick/shared/out.log"
    wait_for(log, "Starting training", first)
    status, _, err = finish(start(options))
    assert status == 2
    assert f"shared is in use: process {first.pid} on " in err and err.count("\n") == 1
    assert first.poll() is None and log.read_text().count("Starting training") == 1
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 75
    status, _, err = finish(start(tiny_options(num_iters=3000, run_num="shared", lr=0.5)))
    assert status == 2 and "holds a run of other settings" in err  # and nobody owns it


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ((errno.ENOSPC, "No space left on device"), r"make room on its disk \(--keep_checkpoints, now 2\)"),
        ((errno.EDQUOT, "Disk quota exceeded"), r"make room on its disk \(--keep_checkpoints, now 2\)"),
        ((errno.EROFS, "Read-only file system"), "see that it can be written"),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_told_soon_with_what_is_whole_and_what_to_do(
    tiny_options, tmp_path, monkeypatch, error, remedy
):
    write = checkpoint_files.write_safetensors

    def fail_at_the_second(path, *contents):
        if "iter-00000100" in str(path):
            raise OSError(*error)
        return write(path, *contents)

    monkeypatch.setattr(checkpoint_files, "write_safetensors", fail_at_the_second)
    whole = "iter-00000050"
    line = rf"iter-00000100: the checkpoint could not be written: .*{error[1]}: {remedy}, and repeat .* {whole}"
    with refusal(line):
        train.main(tiny_options(num_iters=10_000, warmup=0, checkpoint_every=50, validate_every=10_000))
    assert not (tmp_path / "logs/quick/00/checkpoints/iter-00000150").exists()
    assert "iter-00000150" not in (tmp_path / "logs/quick/00/out.log").read_text()
