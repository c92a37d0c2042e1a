"""The training loop on one device, in this process."""

import json
import math
import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils._python_dispatch import TorchDispatchMode

import train
from tests.support.marks import slow_but, slow_rows_but
from tests.support.refusals import refusal
from tools.checkpoint import load_weights
from training.checkpoints.weights import find
from training.run.report import print_result
from training.run.telemetry import words_of_seconds
from training.step.optimizer import learning_rate
from training.step.step import TrainingStep
from utils.config import read_named_config
from utils.errors import NonFiniteLossError


@pytest.fixture
def run(tiny_options, tmp_path):
    """Train in this process; returns the run's summary, loss curve and folder."""

    def start(**overrides):
        status = train.main(tiny_options(**overrides))
        folder = tmp_path / "logs/quick" / str(overrides.get("run_num", "00"))
        file = folder / "summary.json"
        return SimpleNamespace(
            status=status, folder=folder, summary=json.loads(file.read_text()) if file.exists() else None,
            curve=scalars(folder, "Loss/train"), log=(folder / "out.log").read_text(),
        )  # fmt: skip

    return start


def scalars(folder, tag):
    """File after file: TensorBoard orders by name, and two runs of one process in one second may be .99 and .100."""
    found = {}
    for file in sorted(folder.glob("events*"), key=lambda file: file.stat().st_mtime_ns):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        if tag in events.Tags()["scalars"]:
            values = {event.step: event.value for event in events.Scalars(tag)}
            found = {step: value for step, value in found.items() if step < min(values)} | values
    return found


def stop_after(monkeypatch, iteration):
    """The signal arrives while this iteration is computed."""
    step = TrainingStep.__call__

    def stopping(self, done, *batch, **options):
        output = step(self, done, *batch, **options)
        if done + 1 == iteration:
            os.kill(os.getpid(), signal.SIGTERM)
        return output

    monkeypatch.setattr(TrainingStep, "__call__", stopping)


def same_losses(one, other):
    keys = ("train_loss", "val_loss", "best_val_loss", "rmse", "acc", "persistence_rmse", "climatology_rmse")
    return all(one.summary[k] == other.summary[k] for k in keys) and one.curve == other.curve


@pytest.mark.parametrize("iterations", [1, 12, 25])
def test_num_iters_is_honoured_exactly(run, iterations):
    """38 training samples in batches of 4: less than an epoch, more than one, more than two."""
    result = run(num_iters=iterations, warmup=0)
    assert result.summary["iterations"] == iterations
    assert sorted(result.curve) == list(range(1, iterations + 1))


def test_it_learns(run):
    result = run(num_iters=150, lr=3e-3, warmup=10)
    assert result.curve[150] < 0.5 * result.curve[1]
    assert result.summary["rmse"]["v10"] < result.summary["climatology_rmse"]["v10"]


def test_the_summary_says_what_was_done(run):
    summary = run().summary
    assert summary["config"] == "quick" and summary["world_size"] == 1 and summary["device"] == "cpu"
    assert summary["samples_per_sec"] > 0 and summary["peak_memory_bytes"] > 2**20
    for kind in ("rmse", "persistence_rmse", "climatology_rmse", "acc"):
        assert len(summary[kind]) == 20
        assert all(math.isfinite(value) for value in summary[kind].values())
    assert 0 <= summary["data_wait_fraction"] < 1


def test_the_log_reads_like_the_reference(run):
    log = run(num_iters=25).log
    for epoch in (1, 2, 3):
        assert f"Time taken for epoch {epoch} is " in log
    assert log.count(" sec, avg ") == 3 and log.count(" samples/sec") == 3
    assert log.count("Avg train loss=") == 3
    assert log.count("Avg val loss=") == log.count("Total validation time: ") == 2  # epoch 2 and the end
    assert "Peak memory: " in log


def test_the_log_says_how_far_the_run_is_and_how_long_it_takes_yet(run):
    log = run(num_iters=25).log
    said = re.findall(r"Epoch (\d) of (\d), about (\d+) s left", log)
    assert [(epoch, of) for epoch, of, _ in said] == [("1", "3"), ("2", "3")]  # the third one is the end
    assert [words_of_seconds(seconds) for seconds in (4.4, 89, 90, 1200, 3600 * 3.52)] == [
        "4 s",
        "89 s",
        "2 min",
        "20 min",
        "3.5 h",
    ]


def test_the_time_left_knows_that_longer_forecasts_take_longer(run, tiny_config, monkeypatch):
    config = tiny_config(num_iters=10, rollout_schedule=[[4, 2], [6, 4]])
    assert config.forecast_steps(0, 10) == 4 * 1 + 2 * 2 + 4 * 4
    assert config.forecast_steps(3, 7) == 1 + 2 * 2 + 4 and config.forecast_steps(5, 5) == 0

    # An epoch has 9 iterations. After the first one 9 steps have taken 10 s, and 1 + 15 * 2 are left; after the second
    # one 10 + 8 * 2 and 7 * 2.
    monkeypatch.setattr("training.run.telemetry.Clock.elapsed", lambda clock: 10.0)
    log = run(num_iters=25, rollout_schedule=[[10, 2]]).log
    assert re.findall(r"about (\d+) s left", log) == ["34", "5"]


def test_tensorboard_has_losses_speed_skill_and_pictures(run, pictures):
    folder = run().folder
    tags = EventAccumulator(str(folder)).Reload().Tags()
    assert {"Loss/train", "Loss/valid", "learning_rate", "speed/samples_per_sec"} <= {*tags["scalars"]}
    assert sorted(tag for tag in tags["scalars"] if tag.startswith("rmse/"))[0] == "rmse/00_u10"
    assert sum(tag.startswith("valid_acc/") for tag in tags["scalars"]) == 20
    assert set(tags["images"]) == {"forecast/u10", "forecast/z500"}
    in_order = sorted(tag.partition("/")[0] for tag in tags["scalars"] + tags["images"])
    assert (in_order[0], in_order[-1]) == ("Loss", "valid_acc")


def test_tensorboard_draws_the_rmse_of_all_forecasts_of_a_channel_into_one_chart(run):
    folder = run(num_iters=1, warmup=0).folder
    events = EventAccumulator(str(folder)).Reload()
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    (group,) = layout.category
    assert [chart.title for chart in group.chart][:2] == ["u10", "v10"] and len(group.chart) == 20
    assert list(group.chart[1].multiline.tag) == [f"{kind}rmse/01_v10" for kind in ("", "persistence_", "climatology_")]
    drawn = {tag for chart in group.chart for tag in chart.multiline.tag}
    assert drawn <= {*events.Tags()["scalars"]} and len(list(folder.glob("events*"))) == 1


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(run):
    one, two, other = run(run_num="1"), run(run_num="2"), run(run_num="3", seed=5)
    assert same_losses(one, two)
    assert one.curve != other.curve


def check_resume(run, monkeypatch, iteration, options):
    """A run that is stopped at an iteration and started again has the losses of an undisturbed one."""
    whole = run(run_num="whole", **options)
    with monkeypatch.context() as patch:
        stop_after(patch, iteration)
        stopped = run(run_num="parts", **options)
    assert stopped.status == 75 and stopped.summary is None
    assert f"Saved checkpoint iter-{iteration:08d}" in stopped.log
    resumed = run(run_num="parts", **options)
    assert f"Resuming at iteration {iteration} of " in resumed.log
    assert same_losses(whole, resumed)


@pytest.mark.parametrize("workers", slow_but([2], [0, 2], "samples that are read in the process of the run"))
@pytest.mark.parametrize("iteration", slow_but([10], [3, 10, 19, 24], "other places in an epoch"))
def test_a_stopped_run_continues_bit_for_bit(run, monkeypatch, iteration, workers):
    """In mid-epoch, at the end of one (sample 38 comes in step 10), before a validation, in the last step but one."""
    options = {"num_iters": 25, "dropout": 0.1, "num_data_workers": workers, "checkpoint_every": 7}
    check_resume(run, monkeypatch, iteration, options)


STAGES = {
    "forcings": ["hour", "day", "orography"], "predict": "change", "rollout_schedule": ["[3, 2]", "[7, 3]"], "ema": 0.9,
    "input_frames": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("iteration", "options"),
    slow_rows_but(
        [0], [(5, STAGES), (2, STAGES), (8, STAGES), (7, {"enable_channels_last": True})], "other stages and weights"
    ),
)
def test_a_run_over_several_steps_or_of_other_weights_continues_bit_for_bit(run, monkeypatch, iteration, options):
    check_resume(run, monkeypatch, iteration, options)


def test_a_run_starts_from_the_weights_of_another(run):
    told = {key: STAGES[key] for key in ("forcings", "predict")}
    first = run(run_num="first", ema=0.5, **told)
    second = run(run_num="second", ema=0.9, init_from=str(first.folder), lr=1e-12, **told)
    assert "Initial weights are those of" in second.log
    assert second.summary["rmse"] == pytest.approx(first.summary["rmse"], rel=1e-4)  # it has learnt nothing
    newest = max((first.folder / "checkpoints").iterdir())
    third = run(run_num="third", init_from=str(newest), lr=1e-12, **told)
    assert third.summary["rmse"] == pytest.approx(first.summary["rmse"], rel=1e-4)


def test_an_ensemble_starts_from_the_weights_of_a_single_forecast(run):
    """All of them; those for noise, which it did not have, are drawn."""
    first = run(run_num="first", ema=0.5)
    told = {"loss": "crps", "ensemble_size": 2, "noise_features": 6, "num_iters": 2, "warmup": 0, "lr": 1e-12}
    second = run(run_num="second", init_from=str(first.folder), **told)
    assert "drawn for noise (4): noise_embed.first.weight" in second.log
    before, after = (load_weights(find(each.folder, "best")[0]) for each in (first, second))
    new = after.keys() - before.keys()
    assert len(new) == 4 and before.keys() < after.keys() and all(after[name].any() for name in new)
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-6, atol=1e-9)


def test_persistence_is_that_of_the_data_whatever_a_model_writes_to_its_input(run):
    own = {"model": "tests.support.own_models:Overwriting", "num_iters": 1, "warmup": 0}
    scored = [run(**own, run_num=str(by), model_args={"by": by}).summary for by in (1.0, 0.5)]
    assert scored[0]["persistence_rmse"] == scored[1]["persistence_rmse"]


@pytest.mark.parametrize("model", ["tests.support.own_models:Deaf", "vit"])
def test_members_that_are_equal_are_told_of(run, model):
    told = run(model=model, loss="crps", ensemble_size=2, num_iters=2, warmup=0).log
    are_equal = model != "vit"
    assert (f"the 2 members of the ensemble are equal: what model {model} gives" in told) == are_equal


def test_a_finished_run_shows_its_result_again(run, capsys):
    first = run()
    capsys.readouterr()
    assert run().status is None
    printed = capsys.readouterr().out
    assert "finished run; its result" in printed and "u10 (m s-1)" in printed
    assert json.loads((first.folder / "summary.json").read_text()) == first.summary


def test_a_loss_that_is_not_finite_ends_the_run_and_names_iteration_and_checkpoint(run, monkeypatch):
    step = TrainingStep.__call__

    def poisoned(self, iteration, *batch, **options):
        if iteration == 9:
            next(self.parallel.model.parameters()).data.fill_(math.nan)
        return step(self, iteration, *batch, **options)

    monkeypatch.setattr(TrainingStep, "__call__", poisoned)
    line = r"iteration 10: the training loss is nan; last good checkpoint: iter-00000008 in "
    with pytest.raises(NonFiniteLossError, match=line):
        run(num_iters=20, checkpoint_every=4)


@pytest.mark.parametrize(
    "options",
    [
        {"amp_mode": "bf16"},
        {"amp_mode": "fp16"},
        {"clip_grad_norm": 0.1},
        {"optimizer": "AdamW"},
        {"lr_schedule": "constant"},
        {"n_out_channels": 4},
        {"n_in_channels": 3, "n_out_channels": 5},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_options_train(run, options):
    result = run(num_iters=40, lr=3e-3, **options)
    assert result.curve[40] < 0.9 * result.curve[1]


def test_mixed_precision_stays_near_full_precision(run):
    full, mixed = run(run_num="full"), run(run_num="mixed", amp_mode="bf16")
    assert mixed.curve != full.curve
    assert list(mixed.curve.values()) == pytest.approx(list(full.curve.values()), rel=0.02)


def test_clipping_bounds_the_global_gradient_norm(run, monkeypatch):
    norms, step = [], torch.optim.AdamW.step

    def recording(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads])).item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    run(clip_grad_norm=0.05)
    assert len(norms) >= 12
    assert max(norms) <= 0.05 * (1 + 1e-4)
    assert max(norms) > 0.04


def test_a_step_never_waits_for_the_device(run, monkeypatch):
    """Reading a tensor's value on the host waits for the device; between two readings of the loss there is none."""

    class Readings(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Readings.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
            return func(*args, **(kwargs or {}))

    step, counts = TrainingStep.__call__, []

    def counted(self, iteration, *batch, **options):
        with Readings():
            output = step(self, iteration, *batch, **options)
        counts.append(Readings.count)
        return output

    monkeypatch.setattr(TrainingStep, "__call__", counted)
    run(num_iters=6, clip_grad_norm=1.0, enable_fused=True)
    assert counts == [0] * 6
    with Readings():
        torch.ones(1).item()
    assert Readings.count == 1


def test_cosine_schedule_with_warmup(tiny_config):
    config = tiny_config(num_iters=110, warmup=10, lr=1.0)
    rates = [learning_rate(config, i) for i in range(110)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10:] == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 100)) for i in range(100)])
    constant = tiny_config(num_iters=110, warmup=10, lr=1.0, lr_schedule="constant")
    assert {learning_rate(constant, i) for i in range(10, 110)} == {1.0}


def test_the_command_to_try_next_is_that_of_this_run_and_one_change(tiny_config, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    words = "--config=quick", "--run_num", "my run", "--model", "my_unet:UNet", "--model_args", "{width: 8}"
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "code/train.py"), *words])
    summary = {"iterations": 12, "run": "logs/quick/00", "accuracy": 0.5}
    print_result(summary, "accuracy 0.500", tiny_config(expdir="my logs"))
    *_, curves, following = capsys.readouterr().out.splitlines()
    assert curves.endswith("tensorboard --logdir 'my logs'")
    wanted = "/python code/train.py --config=quick --model my_unet:UNet --model_args '{width: 8}' --run_num=bf16"
    assert following.startswith("try next:") and following.endswith(f"{wanted} --amp_mode=bf16")
    print_result(summary, "accuracy 0.500", tiny_config(amp_mode="bf16"))
    assert "try next" not in capsys.readouterr().out


def test_a_finished_run_refuses_options_that_it_was_not_made_with(run):
    run(num_data_workers=0)
    with refusal(r"finished run, made with other options: num_data_workers \(0 there, 1 now\)"):
        run(num_data_workers=1)
    assert run(num_data_workers=0, log_every=3).status is None  # of no account


def test_run_num_auto_takes_the_next_free_number(run, tiny_options, tmp_path, monkeypatch):
    run(run_num="03")
    run(run_num="named")
    runs = tmp_path / "logs/quick"
    options = tiny_options(run_num="auto", num_iters=2, warmup=0)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for number in ("04", "05"):
        train.main(options)
        assert json.loads((runs / number / "summary.json").read_text())["run"].endswith(number)
        assert read_named_config(runs / number / "config.yaml", "quick")["run_num"] == number
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # the job is requeued: it goes on in its folder
    before = sorted(folder.name for folder in runs.iterdir())
    train.main(options)
    assert sorted(folder.name for folder in runs.iterdir()) == before
