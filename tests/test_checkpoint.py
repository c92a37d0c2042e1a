"""Checkpoints are whole or passed over, written while training goes on, and nothing in them is unpickled."""

import json
import logging
import os
import pickle
import signal
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support import programs
from tests.support.refusals import refusal
from training.checkpoints import files as checkpoint_files
from training.checkpoints.files import (
    DTYPES,
    MARKER,
    CheckpointError,
    bytes_of,
    describe,
    digest,
    verify,
    write_safetensors,
)
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import collect_state, restore_state
from utils import comm
from utils.errors import UsageError


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
    return CheckpointFolder(tmp_path / "checkpoints", keep=2, config={"config": "short", "embed_dim": 384})


def save(folder, iteration, wait=True, **kwargs):
    return folder.save(iteration, collect_state(*model_and_optimizer(0)), {"sum": 0.1 + 0.2}, wait=wait, **kwargs)


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
    assert marker["world_size"] == 1 and marker["config"] == folder.config
    for _ in range(5):
        train(other, other_optimizer)
    assert torch.equal(weights(model), weights(other))


def test_looking_for_a_checkpoint_leaves_a_new_optimizer_at_its_first_step(folder):
    results = []
    for look in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if look:
            assert folder.load_newest(collect_state(model, optimizer)) is None
        train(model, optimizer)
        results.append(weights(model))
    assert torch.equal(*results)


@pytest.fixture
def held_write(monkeypatch):
    """Writes wait for this event."""
    released, write = threading.Event(), checkpoint_files.write_safetensors

    def held(*args):
        assert released.wait(30)
        return write(*args)

    monkeypatch.setattr(checkpoint_files, "write_safetensors", held)
    yield released
    released.set()


def test_a_checkpoint_holds_what_was_there_at_save_though_training_goes_on(folder, held_write):
    model, optimizer = model_and_optimizer(0)
    for iteration in (1, 2):  # the second copies into the buffers of the first
        train(model, optimizer)
        saved = weights(model)
        held_write.clear()
        path = folder.save(iteration, collect_state(model, optimizer), {})
        assert folder.stall_seconds > 0 and not path.exists() and not (folder.path / MARKER).exists()
        train(model, optimizer)
        held_write.set()
        marker, other, _ = load(folder)
        assert torch.equal(weights(other), saved)
        assert folder.write_seconds > 0 and verify(path) == marker


def test_only_one_write_is_in_flight(folder, held_write):
    save(folder, 1, wait=False)
    threading.Timer(0.2, held_write.set).start()
    save(folder, 2, wait=False)
    assert (folder.path / "iter-00000001" / MARKER).exists()
    assert folder.newest_name() == "iter-00000002"


def test_nothing_is_unpickled(folder, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("unpickled")

    save(folder, 1)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert load(folder)[0]["iteration"] == 1


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def with_text_as_marker(text):
    return lambda ckpt: (ckpt / MARKER).write_bytes(text)


DAMAGES = {
    "no marker": lambda ckpt: (ckpt / MARKER).unlink(),
    "half a marker": lambda ckpt: os.truncate(ckpt / MARKER, 50),
    "a flipped bit in the marker": lambda ckpt: flip_bit(ckpt / MARKER),
    **{
        f"a marker of {text[:9]}": with_text_as_marker(text)
        for text in (b"", b"[]", b"[" * 100_000, b"\xff\xfe", b"{}")
    },
    "a missing file": lambda ckpt: next(ckpt.glob("*.safetensors")).unlink(),
    "a flipped bit": lambda ckpt: flip_bit(next(ckpt.glob("*.safetensors"))),
    "a truncated file": lambda ckpt: next(ckpt.glob("*.safetensors")).write_bytes(b""),
}


NO_JSON_OBJECTS = [name for name in DAMAGES if name.startswith("a marker of") and name != "a marker of b'[]'"]
DAMAGED = [
    pytest.param(damage, id=name, marks=[pytest.mark.slow("more texts that no marker has")] * (name in NO_JSON_OBJECTS))
    for name, damage in DAMAGES.items()
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(folder, damage, caplog):
    save(folder, 1)
    damage(save(folder, 2))
    with pytest.raises(CheckpointError):
        verify(folder.path / "iter-00000002")
    with caplog.at_level(logging.WARNING):
        assert load(folder)[0]["iteration"] == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "iter-00000002" in warning and "passing over it" in warning and "\n" not in warning
    save(folder, 2)  # the run reaches the same iteration again
    assert load(folder)[0]["iteration"] == 2


def with_hashes(ckpt, algorithm):
    """Give the marker of a checkpoint hashes by another algorithm."""
    marker = json.loads((ckpt / MARKER).read_text())
    del marker["sha256"]
    marker["files"] = {name: describe(ckpt / name, algorithm) for name in marker["files"]}
    (ckpt / MARKER).write_text(json.dumps({"sha256": digest(marker), **marker}))


def test_hashes_of_earlier_versions_are_checked_as_well(folder):
    save(folder, 1)
    ckpt = save(folder, 2)
    with_hashes(ckpt, "sha256")
    assert load(folder)[0]["iteration"] == 2
    flip_bit(next(ckpt.glob("*.safetensors")))
    with pytest.raises(CheckpointError, match="is damaged"):
        verify(ckpt)
    assert load(folder)[0]["iteration"] == 1


def test_a_hash_that_nobody_knows_is_no_whole_checkpoint(folder):
    ckpt = save(folder, 1)
    marker = json.loads((ckpt / MARKER).read_text())
    del marker["sha256"]
    marker["files"] = {name: {"bytes": held["bytes"], "newer": "0"} for name, held in marker["files"].items()}
    (ckpt / MARKER).write_text(json.dumps({"sha256": digest(marker), **marker}))
    with pytest.raises(CheckpointError, match="is damaged"):
        verify(ckpt)


def full_disk(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["folder.whole_file", "files.write_safetensors"])
@pytest.mark.parametrize("wait", [True, False], ids=["at once", "in the background"])
def test_a_full_disk_is_an_oserror_and_leaves_the_checkpoint_before(folder, monkeypatch, name, wait):
    save(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(f"training.checkpoints.{name}", full_disk)
        with pytest.raises(OSError, match="No space left"):
            save(folder, 2, wait)
            save(folder, 3)
    folder.wait()  # told once
    assert [path.name for path in folder.folders()] == ["iter-00000001"]
    assert load(folder)[0]["iteration"] == 1
    save(folder, 2)
    assert {path.name for path in folder.path.iterdir()} == {"iter-00000001", "iter-00000002"}


def tensors_of_every_dtype():
    """Of several sizes, one without a dimension and one without an element."""
    shapes = {"two": (3, 5), "none": (), "empty": (0, 4), "Höhe, 2 m": (7,)}
    found = {}
    for dtype in DTYPES:
        for name, shape in shapes.items():
            found[f"{name} {dtype}"] = torch.randn(shape).abs().to(dtype)
    return found


def test_a_file_is_what_the_safetensors_library_reads(tmp_path):
    written, path = tensors_of_every_dtype(), tmp_path / "some.safetensors"
    told = write_safetensors(path, written, {"format": "pt"})
    assert told == describe(path)
    read = load_file(path)
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert bytes(bytes_of(read[name])) == bytes(bytes_of(tensor)), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_dtype_without_a_name_in_the_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a: torch.complex128 cannot be written"):
        write_safetensors(tmp_path / "some", {"a": torch.zeros(1, dtype=torch.complex128)}, {})


def test_a_save_hashes_what_it_writes_and_reads_no_file_back(folder, monkeypatch):
    def refuse(path):
        raise AssertionError(f"{path} is read")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "describe", refuse)
        path = save(folder, 1)
    assert verify(path)["iteration"] == 1


def save_two(path):
    """Run on every rank: two checkpoints of one state, of which each rank writes a file."""
    folder = CheckpointFolder(path, keep=2)
    for iteration in (1, 2):
        folder.save(iteration, collect_state(*model_and_optimizer(0)), {}, wait=True)


def load_newest(path, hidden=()):
    """Run on every rank: iteration of the checkpoint that is taken, and the files that this rank hashed.

    hidden: names of files that rank 1 does not see.
    """
    hashed, whole, exists = [], checkpoint_files.describe, Path.exists

    def counted(path, algorithm):
        hashed.append(path.name)
        return whole(path, algorithm)

    def seen(path, **kwargs):
        is_hidden = path.name in hidden and comm.rank() == 1
        return exists(path, **kwargs) and not is_hidden

    with mock.patch.object(checkpoint_files, "describe", counted), mock.patch.object(Path, "exists", seen):
        try:
            marker = CheckpointFolder(path, keep=2).load_newest(collect_state(*model_and_optimizer(9)))
        except UsageError as error:
            return str(error), hashed
    return marker["iteration"], hashed


FILES = ["shard-00000.safetensors", "shard-00001.safetensors"]


def test_each_rank_hashes_its_share_of_the_files(ranks, tmp_path):
    ranks(2, save_two, tmp_path)
    assert ranks(2, load_newest, tmp_path) == [(2, FILES[:1]), (2, FILES[1:])]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_bit, lambda path: os.truncate(path, 100), Path.unlink],
                         ids=["flipped", "truncated", "missing"])  # fmt: skip
def test_all_ranks_pass_over_what_one_of_them_finds_damaged(ranks, tmp_path, name, damage):
    ranks(2, save_two, tmp_path)
    damage(tmp_path / "iter-00000002" / name)
    assert [iteration for iteration, _ in ranks(2, load_newest, tmp_path)] == [1, 1]


def test_a_file_that_one_rank_does_not_see_is_no_damage(ranks, tmp_path):
    """A run would begin anew, or go on from an older checkpoint, where a folder is not shared among hosts."""
    ranks(2, save_two, tmp_path)
    for error, _ in ranks(2, load_newest, tmp_path, FILES):
        assert "rank 1 on" in error and f"does not see {FILES[1]}, which rank 0 sees" in error


def test_others_may_read_a_checkpoint_as_far_as_the_umask_says(folder):
    path = save(folder, 1)
    modes = {file.stat().st_mode for file in path.iterdir()}
    assert modes == {(path / MARKER).stat().st_mode}


def one_rank_has_a_full_disk(path):
    """The outcome of each save; training's collectives go on while a write is held."""
    folder, model = CheckpointFolder(path, keep=3), model_and_optimizer(0)
    released, full, write = threading.Event(), threading.Event(), checkpoint_files.write_safetensors
    outcomes = []

    def held(*args):
        assert released.wait(30)
        return (full_disk if full.is_set() and comm.rank() == 1 else write)(*args)

    checkpoint_files.write_safetensors = held
    try:
        for iteration in (1, 2, 3):
            released.clear()
            (full.set if iteration == 2 else full.clear)()
            folder.save(iteration, collect_state(*model), {})
            total = comm.all_reduce(torch.ones(1)).item()
            released.set()
            try:
                folder.wait()
                outcomes.append((total, None))
            except OSError as error:
                outcomes.append((total, error.strerror))
    finally:
        checkpoint_files.write_safetensors = write
    return outcomes


def test_a_full_disk_of_one_rank_is_told_to_all_and_nothing_is_lost(ranks, tmp_path):
    expected = [(2.0, None), (2.0, "No space left on device"), (2.0, None)]
    assert ranks(2, one_rank_has_a_full_disk, tmp_path) == [expected, expected]
    assert [path.name for path in CheckpointFolder(tmp_path, 3).folders()] == ["iter-00000003", "iter-00000001"]


PROGRAM = """
import os, signal, sys, threading, torch
from training.checkpoints import folder as checkpoint
from training.checkpoints import files as checkpoint_files
from training.checkpoints.folder import CheckpointFolder

checkpoint.EXIT_SECONDS = 2
folder, tensors = CheckpointFolder(sys.argv[1], keep=2), {"model": {"a": torch.ones(1000)}}
folder.save(1, tensors, {}, wait=True)
begun, write = threading.Event(), checkpoint_files.write_safetensors
def slow(*args):
    begun.set()
    threading.Event().wait(float(sys.argv[3]))
    return write(*args)
checkpoint_files.write_safetensors = slow
folder.save(2, tensors, {})
begun.wait()
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
raise RuntimeError("training failed")
"""


@pytest.mark.parametrize(
    ("end", "seconds", "status", "left"),
    [
        pytest.param(
            "killed",
            60,
            -signal.SIGKILL,
            [".iter-00000002.writing", "iter-00000001"],
            marks=pytest.mark.slow("a process that is killed in mid-write"),
        ),
        ("fails", 0.5, 1, ["iter-00000001", "iter-00000002"]),
        ("fails", 600, 1, [".iter-00000002.writing", "iter-00000001"]),
    ],
    ids=["killed", "fails, short write", "fails, endless write"],
)
def test_a_process_that_ends_in_mid_write_never_hangs_or_leaves_half_a_checkpoint(tmp_path, end, seconds, status, left):
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = tmp_path / "checkpoints"
    assert programs.run([tmp_path / "program.py", folder, end, seconds], timeout=60).returncode == status
    assert sorted(path.name for path in folder.iterdir()) == left


def test_the_newest_and_the_best_are_kept_and_a_score_that_is_no_number_is_none(folder):
    """min() over NaN would call any checkpoint the best, and the best one would be removed."""
    for iteration, loss in enumerate([1.0, 0.5, float("nan"), None, 3.0], 1):
        save(folder, iteration, val_loss=loss)
    assert [path.name for path in folder.folders()] == ["iter-00000005", "iter-00000004", "iter-00000002"]


def test_only_listed_tensors_are_read(folder, tmp_path):
    """A reader takes any safetensors file of a folder, and SHA-256 says nothing of one that is not listed."""
    path = save(folder, 1)
    other = CheckpointFolder(tmp_path / "other", keep=1)
    stranger = next(save(other, 1).glob("*.safetensors"))
    (path / "a-stranger.safetensors").write_bytes(stranger.read_bytes())
    with refusal(r"iter-00000001: a-stranger.safetensors is not one of its files .*take it"):
        load(folder)


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(folder, monkeypatch):
    save(folder, 1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PermissionError, match="checkpoints"):
        load(folder)


def test_a_file_that_cannot_be_read_is_passed_over(folder, monkeypatch, caplog):
    save(folder, 1)
    newest = save(folder, 2)
    whole = checkpoint_files.describe

    def refuse(path, algorithm):
        if path.parent == newest:
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path, algorithm)

    monkeypatch.setattr(checkpoint_files, "describe", refuse)
    assert load(folder)[0]["iteration"] == 1
    assert "iter-00000002: shard-00000.safetensors cannot be read: Permission denied; passing over it" in caplog.text
