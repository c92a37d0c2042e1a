"""Show the contents of a checkpoint, or export its weights as one file.

python -m tools.checkpoint show logs/quick/00                          # list the contents and verify the files
python -m tools.checkpoint export logs/quick/00 model.safetensors      # the weights alone, unsharded
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tools.tables import format_table
from training.checkpoints.files import read_marker, write_safetensors
from training.checkpoints.weights import find, stored_tensors
from utils.errors import ArgumentParser, UsageError, run_main
from utils.files import whole_file


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The unsharded weights and buffers of a model, {name as in the plain model: CPU tensor}. One process suffices.

    The averaged weights, where the run kept an average. A weight that has several names stands under each.
    """
    # The tensors are read in place, so that each is allocated first.
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}}
    for name, stored in stored_tensors(folder).items():
        part, _, own = name.partition(".")
        if part in parts:
            parts[part][own] = torch.empty(stored.size, dtype=stored.properties.dtype)
    dcp.load(parts, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    weights = parts["model"] | parts["ema"]  # an average takes the place of the weight
    tied = read_marker(folder)["trainer"].get("tied", {})  # {further name: the name under which it is stored}
    for name, first in tied.items():
        if first in weights:
            weights[name] = weights[first]
    return weights


def with_own_memory(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors; one that stands under several names is copied, since a file takes no shared memory."""
    # load_weights puts one tensor object under all names of a weight, so its id tells.
    seen = set[int]()
    apart: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        apart[name] = tensor.clone() if id(tensor) in seen else tensor
        seen.add(id(tensor))
    return apart


def export(path: Path | str, out: Path | str) -> None:
    """Write the weights of a checkpoint to one safetensors file, with its config as JSON in the file's metadata.

    Raises UsageError if the checkpoint is damaged, or if `out` exists or cannot be written.
    """
    out = Path(out)
    # The target is looked at first, since reading a checkpoint may take long.
    if out.exists():
        raise UsageError(f"{out}: exists already")
    folder, marker = find(path)
    weights = with_own_memory(load_weights(folder))
    metadata = {
        "format": "pt",
        "iteration": str(marker["iteration"]),  # the metadata of a safetensors file are texts
        "config": json.dumps(marker["config"]),
    }
    with whole_file(out) as part:
        write_safetensors(part, weights, metadata)
    values = sum(tensor.numel() for tensor in weights.values())
    print(f"{out}: {len(weights)} tensors, {values:,} values of iteration {marker['iteration']} ({folder})")


def show(path: Path | str) -> None:
    """Print the contents of a checkpoint. Raises UsageError if there is none, or if it is damaged."""
    folder, marker = find(path)
    print(f"checkpoint   {folder}")
    print(f"iteration    {marker['iteration']}")
    print(f"val_loss     {marker['val_loss']}")
    print(f"config       {(marker['config'] or {}).get('config')}")
    print(f"world size   {marker['world_size']}")
    print(f"hashes       verified, {len(marker['files'])} files")  # by find
    # Names begin with their part, so that sorting keeps each part together.
    tensors = dict(sorted(stored_tensors(folder).items()))
    rows = []
    for name, stored in tensors.items():
        shape = str(list(stored.size))
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        rows.append((name, shape, dtype, len(stored.chunks), _bytes(stored)))
    columns = {"tensor": "", "shape": "", "dtype": "", "shards": "d", "bytes": ","}
    print(f"\n{format_table(columns, rows)}\n")

    # A checkpoint need not have all parts: an average is kept on request.
    for part in ("model", "ema", "optimizer", "random"):
        of_part = [stored for name, stored in tensors.items() if name.startswith(f"{part}.")]
        if not of_part:
            continue
        values = sum(stored.size.numel() for stored in of_part)
        size = sum(map(_bytes, of_part))
        print(f"{part:<12} {len(of_part)} tensors, {values:,} values, {size:,} bytes")


def _bytes(stored: TensorStorageMetadata) -> int:
    return stored.size.numel() * stored.properties.dtype.itemsize


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; raises UsageError for a checkpoint that cannot be used."""
    parser = ArgumentParser(prog="python -m tools.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shower = commands.add_parser("show", help="list the contents of a checkpoint, and verify it")
    exporter = commands.add_parser("export", help="write the model's weights to one safetensors file")
    for command in (shower, exporter):
        command.add_argument("checkpoint", metavar="CKPT", help="checkpoint, folder of checkpoints, or folder of a run")
    exporter.add_argument("out", metavar="OUT", help="the file to write, model.safetensors")
    args = parser.parse_args(argv)
    if args.command == "export":
        export(args.checkpoint, args.out)
    else:
        show(args.checkpoint)


if __name__ == "__main__":
    run_main(main)
