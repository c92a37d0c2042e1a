"""The last collectives of a rank, as a file that tells why a run hangs.

torch's flight recorder notes every collective of NCCL and gloo in memory, TORCH_FR_BUFFER_SIZE of them (2000). Sends
and receives are left out: of gloo's it knows nothing. A rank that ends because something went wrong writes its
collectives into the run's folder, and `python -m tools.hang FOLDER` compares the files of all ranks.
"""

import json
import os
import sys
import sysconfig
import threading
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

from utils.files import whole_file

FILE_NAME = "collectives-rank{}.json"
LAST = 200  # collectives of a file
PLACES = 3  # lines of code
LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_folder: Path | None = None
_writing = threading.Lock()
_newest: object = None  # call in the record that this rank has written


def record_in(folder: Path | None) -> None:
    """Name the folder for the records of this process; without one nothing is written."""
    global _folder
    _folder = folder


def write_record(reason: str) -> None:
    """Write what this rank has called so far, and where it is. reason: why it ends, '' if it does not.

    Any thread may call it, whatever the others wait for. A record of the same calls stays as it is; where the file
    cannot be written, this says so and goes on.
    """
    from torch import distributed as dist

    global _newest
    if _folder is None or not dist.is_initialized():
        return
    rank = dist.get_rank()
    try:
        with _writing:
            record = _record(reason, rank, dist.get_world_size())
            newest = record["calls"] and record["calls"][-1] | {"done": None}
            if newest != _newest:  # else the rank has only lost the others since it wrote
                _newest = newest
                with whole_file(_folder / FILE_NAME.format(rank)) as partial:
                    partial.write_text(json.dumps(record))
    except Exception as error:  # whatever it is: this is called where a run must end
        print(f"warning: rank {rank}: its last collectives could not be written: {error}", file=sys.stderr, flush=True)


def _record(reason: str, rank: int, world_size: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "world_size": world_size,
        "start": " ".join(os.environ.get(name, "") for name in LAUNCH),  # files of an earlier start stay in the folder
        "reason": reason,
        "at": _own_code(threading.main_thread().ident or 0),
        "groups": _groups(),
        "calls": _calls()[-LAST:],
    }


def recorded_collectives() -> list[dict[str, Any]]:
    """{group, number, operation} of the collectives that torch still knows of, in the order of their calls."""
    from torch import distributed as dist

    calls = _calls() if dist.is_initialized() else []
    return [{key: call[key] for key in ("group", "number", "operation")} for call in calls]


def _groups() -> dict[str, Any]:
    """{name: [description, ranks]} of the process groups of several ranks that this one is in."""
    from torch.distributed.distributed_c10d import _world

    members = {group: list(_world.pg_group_ranks[group]) for group in _world.pg_map}
    return {_world.pg_names[group]: [group.group_desc, ranks] for group, ranks in members.items() if len(ranks) > 1}


def _calls() -> list[dict[str, Any]]:
    """Collectives of gloo and NCCL, in the order in which this rank called them."""
    import torch._C._distributed_c10d as c10d

    entries = []
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, and NCCL's in a build that has it
        if hasattr(c10d, dump):
            entries += json.loads(getattr(c10d, dump)()).get("entries", [])
    return [
        {
            "group": entry["process_group"][0],
            "number": entry["collective_seq_id"],
            "operation": entry["profiling_name"].partition(":")[2],
            "tensors": [f"{t}{tuple(n)}" for t, n in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)],
            "done": entry["retired"] or entry["state"] == "completed",
        }
        for entry in sorted(entries, key=lambda entry: entry["time_created_ns"])
        if not entry["is_p2p"]
    ]


def _own_code(thread: int) -> list[str]:
    """Lines in which a thread is, innermost first, outside Python's and other libraries: "path:line function"."""
    frames = traceback.walk_stack(sys._current_frames()[thread])
    places = (
        f"{os.path.relpath(code.co_filename)}:{line} {code.co_name}"
        for code, line in ((frame.f_code, line) for frame, line in frames)
        if not code.co_filename.startswith((*LIBRARIES, "<"))
    )
    return list(islice(places, PLACES))
