"""The buffers of batches: few, shared by training and validation, of the size that is asked for, and given back."""

import weakref

import pytest
import torch

from training.tasks import build_task
from utils import data_loader, device

CPU = torch.device("cpu")


def loaders_of(config):
    """Loaders of training and validation, and all buffers that they have."""
    loader, valid_loader = build_task(config).build_loaders(CPU)
    return loader, valid_loader, loader.ring


def copies(batches):
    return [(batch[0].clone(), batch[1].clone()) for batch in batches]


def are_equal(some, others):
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) for one, two in pairs)


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_in_the_middle_of_training_changes_no_batch_of_either(tiny_config, workers):
    config = tiny_config(num_data_workers=workers, rollout_schedule=[[3, 2]], num_iters=8)
    alone, alone_valid, _ = loaders_of(config)
    expected, expected_valid = copies(alone.train(0, 0, 8)), copies(alone_valid.valid())
    loader, valid_loader, ring = loaders_of(config)
    batches, found = loader.train(0, 0, 8), []
    for number in range(8):
        found += copies([next(batches)])
        if number in (2, 5):
            assert are_equal(copies(valid_loader.valid()), expected_valid)
    assert are_equal(found, expected)
    assert valid_loader.ring is ring and len(ring.slots) == (3 if workers else 1)


def test_a_validation_that_is_left_early_does_not_write_into_the_batches_of_training(tiny_config):
    config = tiny_config(num_data_workers=2)
    expected = copies(loaders_of(config)[0].train(0, 0, 8))
    loader, valid_loader, _ = loaders_of(config)
    batches = loader.train(0, 0, 8)
    found = copies([next(batches)])
    begun = valid_loader.valid()
    next(begun)
    found += copies(batches)
    assert are_equal(found, expected)


def test_the_last_loader_that_is_closed_gives_the_buffers_back(tiny_config, monkeypatch):
    emptied = []
    monkeypatch.setattr(data_loader, "empty_host_cache", lambda: emptied.append(True))
    loader, valid_loader, ring = loaders_of(tiny_config(num_data_workers=2))
    ring.pinned = True
    monkeypatch.setattr(data_loader, "Slot", lambda numbers, pinned: FORMER(numbers, pinned=False))
    assert not ring.slots  # nothing is allocated before it is used
    copies(loader.train(0, 0, 2))
    kept = [weakref.ref(slot) for slot in ring.slots]
    valid_loader.close()
    assert all(slot() for slot in kept) and not emptied
    loader.close()
    assert not any(slot() for slot in kept) and emptied == [True]


FORMER = data_loader.Slot


@pytest.fixture
def settings_of_torch(monkeypatch):
    """Call with settings, and what torch knows: how many it is asked to use, and those that are left."""

    def run(kind, before, known):
        state, asked = {"settings": before}, []

        def write(settings):
            asked.append(settings)
            state["settings"] = settings  # so far as it is read
            if known not in settings and settings != before:
                raise RuntimeError("Unrecognized key")

        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: state["settings"], raising=False)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", write, raising=False)
        device.pin_exact_sizes(torch.device(kind))
        return asked, state["settings"]

    return run


EXACT = "pinned_max_round_threshold_mb:1"


@pytest.mark.parametrize(
    ("kind", "before", "known", "after"),
    [
        ("cuda", "", EXACT, EXACT),
        ("cuda", "expandable_segments:True", EXACT, f"expandable_segments:True,{EXACT}"),
        ("cuda", "pinned_max_round_threshold_mb:64", EXACT, "pinned_max_round_threshold_mb:64"),  # the user's own
        ("cuda", "expandable_segments:True", "nothing of this", "expandable_segments:True"),  # an older torch
        ("xpu", "", EXACT, ""),
    ],
)
def test_pinned_memory_is_not_rounded_up_where_torch_knows_how(settings_of_torch, kind, before, known, after):
    _, found = settings_of_torch(kind, before, known)
    assert found == after


def test_the_setting_is_made_before_the_device_is_chosen(monkeypatch):
    done = []
    monkeypatch.setattr(device, "pin_exact_sizes", lambda chosen: done.append(("pinned", chosen)))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: done.append(("set", index)))
    monkeypatch.setattr(device, "stay_near", lambda chosen: done.append(("near", chosen)))
    chosen = device.select_device("auto", 1)
    assert done == [("pinned", chosen), ("set", 1), ("near", chosen)]
