"""Checkpoints are whole or passed over, and nothing in them is unpickled."""

import logging
import pickle
import shutil

import pytest
import torch

from utils.checkpoint import MARKER, CheckpointError, CheckpointFolder, collect_state, restore_state, verify


def model_and_optimizer(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, optimizer)
    return model, optimizer


def train(model, optimizer):
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=2)


def save(folder, iteration, seed=0, **kwargs):
    return folder.save(iteration, collect_state(*model_and_optimizer(seed)), {"sum": 0.1 + 0.2}, **kwargs)


def load(folder):
    model, optimizer = model_and_optimizer(9)
    tensors = collect_state(model, optimizer)
    marker = folder.load_newest(tensors)
    restore_state(tensors, model, optimizer)
    return marker, model, optimizer


def test_training_goes_on_bit_for_bit_from_a_checkpoint(folder):
    model, optimizer = model_and_optimizer(0)
    folder.save(3, collect_state(model, optimizer), {"sum": 0.1 + 0.2})
    for _ in range(5):
        train(model, optimizer)
    marker, other, other_optimizer = load(folder)
    assert marker["iteration"] == 3 and marker["trainer"] == {"sum": 0.1 + 0.2}
    for _ in range(5):
        train(other, other_optimizer)
    assert torch.equal(weights(model), weights(other))


def test_nothing_is_unpickled(folder, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("unpickled")

    save(folder, 1)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert load(folder)[0]["iteration"] == 1


def test_the_newest_and_the_best_are_kept(folder):
    for iteration, loss in ((1, 0.5), (2, 0.2), (3, None), (4, 0.4), (5, 0.3)):
        save(folder, iteration, val_loss=loss)
    assert [path.name for path in folder.folders()] == ["iter-00000005", "iter-00000004", "iter-00000002"]


def test_an_empty_folder_has_no_checkpoint(folder):
    assert folder.load_newest({}) is None
    assert folder.newest_name() == "none"


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "no marker": lambda ckpt: (ckpt / MARKER).unlink(),
    "half a marker": lambda ckpt: (ckpt / MARKER).write_text((ckpt / MARKER).read_text()[:50]),
    "a flipped bit in the marker": lambda ckpt: flip_bit(ckpt / MARKER),
    "a marker of something else": lambda ckpt: (ckpt / MARKER).write_text("[]"),
    "a missing file": lambda ckpt: next(ckpt.glob("*.safetensors")).unlink(),
    "a flipped bit": lambda ckpt: flip_bit(next(ckpt.glob("*.safetensors"))),
    "a truncated file": lambda ckpt: next(ckpt.glob("*.safetensors")).write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(folder, damage, caplog):
    save(folder, 1)
    damage(save(folder, 2))
    with pytest.raises(CheckpointError):
        verify(folder.path / "iter-00000002")
    with caplog.at_level(logging.WARNING):
        assert load(folder)[0]["iteration"] == 1
    assert "iter-00000002" in caplog.text and "passing over it" in caplog.text
    save(folder, 2)  # the run reaches the same iteration again
    assert load(folder)[0]["iteration"] == 2


def test_a_write_cut_off_is_never_taken_for_a_checkpoint(folder, monkeypatch):
    save(folder, 1)

    def cut_off(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("utils.checkpoint.json.dump", cut_off)
        with pytest.raises(OSError, match="No space left"):
            save(folder, 2)
    assert [path.name for path in folder.folders()] == ["iter-00000001"]
    assert load(folder)[0]["iteration"] == 1
    save(folder, 2)
    assert {path.name for path in folder.path.iterdir()} == {"iter-00000001", "iter-00000002"}
    shutil.rmtree(folder.path)


def test_a_full_disk_is_an_oserror_and_leaves_the_checkpoint_before(folder, monkeypatch):
    save(folder, 1)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem.FileSystem.create_stream", full)
        with pytest.raises(OSError, match="No space left"):
            save(folder, 2)
    assert load(folder)[0]["iteration"] == 1
