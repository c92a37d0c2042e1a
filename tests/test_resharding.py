"""A checkpoint of any layout continues under any other: one device, DDP, ZeRO-1, FSDP, HSDP, any number of ranks."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from networks.vit import ViT
from tests.support.marks import slow_rows_but
from tools.checkpoint import export, load_weights
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import collect_state, restore_state
from training.checkpoints.weights import find, stored_tensors
from utils import comm

SAVED, END, BATCH = 3, 6, 12
WRITTEN = [("serial", 1), ("ddp", 2), ("zero1", 3), ("zero2", 2), ("fsdp", 4), ("hsdp", 4), ("offload", 3)]
READ = [
    ("serial", 1), ("ddp", 3), ("zero1", 2), ("zero1", 4), ("zero2", 3), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4),
    ("offload", 2),
]  # fmt: skip


class Run:
    """A small ViT in training under a layout. Rows of its tensors: 3 (so a fourth rank gets none), 15, 32, 96, 128."""

    def __init__(self, layout, seed=0):
        torch.manual_seed(seed)
        self.model = ViT((3, 5), 1, in_channels=3, out_channels=3, embed_dim=32, depth=2, num_heads=2)
        self.module, optimizer_class, options = self.model, torch.optim.Adam, {}
        if layout in ("ddp", "zero1"):
            self.module = DistributedDataParallel(self.model)
        if layout == "zero1":
            from torch.distributed.optim import ZeroRedundancyOptimizer as optimizer_class  # slow to import

            options = {"optimizer_class": torch.optim.Adam, "parameters_as_bucket_view": True}
        if layout in ("zero2", "fsdp", "hsdp", "offload"):
            self._shard(layout)
        for _ in range(2):  # DDP sorts its buckets after the first: in which order gradients are added may change
            self.module(torch.zeros(1, 3, 3, 5)).sum().backward()
            self.model.zero_grad()
        # eps: some gradients are zero but for rounding (the bias of k), which Adam would make as large as any other.
        self.optimizer = optimizer_class(self.model.parameters(), lr=1e-3, eps=1e-4, **options)

    def _shard(self, layout):
        offload = CPUOffloadPolicy(pin_memory=False) if layout == "offload" else OffloadPolicy()
        shape = (2, comm.world_size() // 2) if layout == "hsdp" else (comm.world_size(),)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for unit in (*self.model.blocks, self.model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=layout != "zero2", offload_policy=offload)

    def train(self, first, last):
        own = slice(comm.rank() * BATCH // comm.world_size(), (comm.rank() + 1) * BATCH // comm.world_size())
        for iteration in range(first, last):
            x, y = torch.randn(2, BATCH, 3, 3, 5, generator=torch.Generator().manual_seed(iteration))
            (self.module(x[own]) - y[own]).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, path, iteration):
        folder = CheckpointFolder(path, keep=1, config={"config": "short"})
        folder.save(iteration, collect_state(self.model, self.optimizer), {"sum": 0.3})
        return folder

    def load(self, path):
        tensors = collect_state(self.model, self.optimizer)
        marker = CheckpointFolder(path, keep=1).load_newest(tensors)
        restore_state(tensors, self.model, self.optimizer)
        return marker


def write(layout, path, validate=False):
    """Train, save, train on at once, and save the end too."""
    run = Run(layout)
    run.train(0, SAVED)
    if validate:  # with zero2 the parameters stay gathered after a forward pass alone
        with torch.no_grad():
            run.module(torch.zeros(1, 3, 3, 5))
    folder = run.save(path / "saved", SAVED)
    run.train(SAVED, END)
    folder.wait()
    run.save(path / "end", END).wait()


def resume(layout, paths, out):
    """Continue checkpoints under a layout to the end, and save it."""
    for path in paths:
        run = Run(layout, seed=1)
        assert run.load(path / "saved")["iteration"] == SAVED
        run.train(SAVED, END)
        run.save(out / path.name, END).wait()


def weights(path):
    return load_weights(find(path)[0])


def assert_same_weights(path, other):
    """Bit for bit."""
    found, expected = weights(path), weights(other)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory):
    """Call with (layout, ranks): a folder with the checkpoint `saved`, and the `end` of the same, uninterrupted run."""
    folder = tmp_path_factory.mktemp("written")

    @cache
    def path_of(layout, size):
        path = folder / f"{layout}-{size}"
        ranks(size, write, layout, path)
        return path

    return path_of


@pytest.mark.slow("every layout that reads the checkpoints of every other one")
@pytest.mark.parametrize("reader", READ, ids=str)
def test_every_checkpoint_continues_like_the_serial_run(reader, written, ranks, tmp_path):
    check_continues(reader, WRITTEN, written, ranks, tmp_path)


@pytest.mark.parametrize("reader", [("serial", 1), ("fsdp", 2)], ids=str)
def test_a_checkpoint_of_sharded_state_continues_like_the_serial_run(reader, written, ranks, tmp_path):
    check_continues(reader, [("zero1", 3), ("fsdp", 4)], written, ranks, tmp_path)


def check_continues(reader, writers, written, ranks, folder):
    layout, size = reader
    paths = [written(*writer) for writer in writers]
    ranks(size, resume, layout, paths, folder)
    expected = weights(written("serial", 1) / "end")
    for path in paths:
        found = weights(folder / path.name)
        differences = {name: (found[name] - value).abs().max().item() for name, value in expected.items()}
        assert max(differences.values()) < 1e-6, (path.name, differences)


SAME = slow_rows_but([2, 4], WRITTEN, "other layouts")


@pytest.mark.parametrize(("layout", "size"), SAME, ids=str)
def test_under_the_same_layout_training_goes_on_bit_for_bit(layout, size, written, ranks, tmp_path):
    path = written(layout, size)
    ranks(size, resume, layout, [path], tmp_path)
    assert_same_weights(tmp_path / path.name, path / "end")


def test_a_checkpoint_between_validation_and_training_changes_nothing(written, ranks, tmp_path):
    ranks(2, write, "zero2", tmp_path, validate=True)
    assert_same_weights(tmp_path / "saved", written("zero2", 2) / "saved")
    assert_same_weights(tmp_path / "end", written("zero2", 2) / "end")


def test_every_shard_is_stored_once_and_none_is_empty(written):
    fsdp, hsdp, zero1 = (
        stored_tensors(find(written(*key) / "saved")[0]) for key in (("fsdp", 4), ("hsdp", 4), ("zero1", 3))
    )
    assert [c.sizes[0] for c in sorted(fsdp["model.head.proj.bias"].chunks, key=lambda c: c.offsets)] == [1, 1, 1]
    assert len(fsdp["model.pos_embed.weight"].chunks) == 4 and len(hsdp["model.pos_embed.weight"].chunks) == 2
    assert all(len(stored.chunks) == 1 for stored in zero1.values())
    of_the_fourth = {name for name in fsdp if name.startswith("random.") and name.endswith("3")}
    assert len(of_the_fourth) == 3 and fsdp.keys() - of_the_fourth == zero1.keys()


def test_an_exported_file_holds_the_full_weights(written, tmp_path):
    export(written("fsdp", 4) / "saved", tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    run = Run("serial", seed=1)
    run.load(written("fsdp", 4) / "saved")
    assert exported.keys() == run.model.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in run.model.state_dict().items())
