"""Drawings of the ladder as a whole, and of rung 1."""

from collections.abc import Sequence

from docs.drawings.canvas import RANKS, Drawing

Span = tuple[float, float, str, str]  # start, length, words, fill


def ladder() -> Drawing:
    """The dimension that each rung splits."""
    d = Drawing(
        800, 250, "What each rung of the ladder splits over two devices: nothing, the batch, the model, the image"
    )
    # Each rung is (title, script, what it splits).
    rungs = [
        ("1  one device", "train.py", "nothing is split"),
        ("2  data parallel", "train.py", "the batch is split"),
        ("3  model parallel", "train_mp.py", "the model is split"),
        ("4  domain parallel", "train_shard.py", "each image is split"),
    ]
    for i, (name, script, what) in enumerate(rungs):
        x = 20 + i * 195
        d.words(x + 85, 22, name, "middle", 15, bold=True)
        d.words(x + 85, 42, script, "middle", 12)
        d.words(x + 85, 232, what, "middle", 13)
        _images(d, x, i)
        _model(d, x, i)
    return d


def _images(d: Drawing, x: float, rung: int) -> None:
    """Four images of a batch, in the colours of the devices that read them."""
    for k in range(4):
        left = x + 8 + k * 40
        # Domain parallelism gives each device a half of every image.
        if rung == 3:
            d.box(left, 62, 34, 17, "", "a")
            d.box(left, 79, 34, 17, "", "b")
        else:
            is_of_second = rung == 1 and k > 1
            d.box(left, 62, 34, 34, "", "b" if is_of_second else "a")
    if rung == 2:
        d.words(x + 96, 112, "read by both", size=11)
    d.arrow((x + 85, 102), (x + 85, 122))


def _model(d: Drawing, x: float, rung: int) -> None:
    """The blocks of the model on each device."""
    if rung == 0:
        d.box(x + 45, 128, 80, 80, "whole\nmodel", "a")
    else:
        # Only model parallelism splits the model; the other rungs copy it.
        words = "half of\nevery\nlayer" if rung == 2 else "whole\nmodel"
        d.box(x + 4, 128, 66, 80, words, "a")
        d.box(x + 100, 128, 66, 80, words, "b")
        d.arrow((x + 74, 168), (x + 96, 168), both=True)


def step_time() -> Drawing:
    """Where the time of a step goes, and what reading ahead changes."""
    d = Drawing(800, 270, "Time of a training step, without and with a thread that reads ahead")
    d.words(20, 20, "Without reading ahead: the device waits for each batch", bold=True)
    # Times are points of the drawing, and only their order and ratio matter.
    work: list[Span] = [
        (70, 60, "forward", "a"),
        (130, 100, "backward", "a"),
        (230, 50, "update", "c"),
    ]
    waits: Span = (0, 70, "read", "wait")
    first_step = [waits, *work]
    # Without: two whole steps, each of which waits while its batch is read.
    d.row(120, 40, "device", [*first_step, *_later(first_step, 280)])
    read: Span = (0, 70, "read", "b")
    d.row(120, 72, "reader", [read, *_later([read], 280)])

    d.words(20, 130, "With reading ahead: the next batch is read while this one is used", bold=True)
    # With: only the first batch is waited for.
    d.row(120, 150, "device", [waits, *work, *_later(work, 210)])
    # The reader does not wait for the device, so that batches are ready ahead of time.
    reads = [(90 * k, 70, f"read {k + 1}", "b") for k in range(5)]
    d.row(120, 182, "reader", reads)
    d.arrow((120, 232), (780, 232))
    d.words(780, 247, "time", "end", 12)
    d.legend(120, 242, [("a", "computes"), ("c", "updates"), ("b", "reads"), ("wait", "waits")], 110)
    return d


def _later(spans: Sequence[Span], time: float) -> list[Span]:
    """The same spans, so much later."""
    return [(start + time, length, words, fill) for start, length, words, fill in spans]


def buffers() -> Drawing:
    """The ring of buffers of the data loader."""
    d = Drawing(800, 230, "A ring of four reused buffers between the threads that read and the device that trains")
    states = [("being read", "b"), ("being read", "b"), ("ready", "c"), ("in use", "a")]
    d.box(20, 70, 120, 60, "year files\n(HDF5, Zarr)", "none")
    for k, (words, fill) in enumerate(states):
        d.box(240 + k * 95, 70, 85, 60, f"buffer {k}\n{words}", fill, 12)
    d.box(660, 70, 120, 60, "training step\non the device", "a")
    d.arrow((142, 92), (236, 92), words="thread 1")
    d.arrow((142, 122), (236, 122), words="thread 2")
    d.arrow((622, 100), (656, 100))
    # A used buffer takes the way below the others, back to where buffers are read into.
    d.arrow((566, 134), (566, 175), (282, 175), (282, 134))
    d.words(424, 190, "a buffer that has been used is read into again: its memory is touched once", "middle")
    d.words(424, 40, "one batch each, in pinned memory where there is a GPU", "middle")
    return d


def rollout() -> Drawing:
    """Several steps of a forecast in one step of training."""
    d = Drawing(800, 220, "Training over three steps of a forecast: each prediction is the next input")
    d.box(40, 40, 90, 40, "x0, read", "c")
    for k in range(4):
        x = 40 + k * 205
        if k > 0:
            d.box(x, 40, 90, 40, f"forecast {k}", "a")
        if k < 3:
            d.arrow((x + 92, 60), (x + 203, 60), words="model")
        if k > 0:
            d.box(x, 140, 90, 34, f"x{k}, read", "c")
            d.arrow((x + 45, 138), (x + 45, 84), both=True)
            d.words(x + 54, 112, f"loss {k}", size=12)
    # The gradient takes the way of the forecast backwards.
    d.arrow((700, 196), (90, 196), dashed=True)
    d.words(
        395,
        208,
        "the gradient runs back through every step; the activations of all of them are kept for it",
        "middle",
        12,
    )
    return d


def resharding() -> Drawing:
    """A checkpoint that one layout writes and another reads."""
    d = Drawing(
        800, 250, "A checkpoint of whole tensors, written by four ranks and read by two, along another dimension"
    )
    d.words(110, 24, "4 ranks wrote: rows", "middle", bold=True)
    # Four ranks have a quarter of the rows each, two have half of the columns.
    for k, fill in enumerate(RANKS):
        d.box(40, 50 + 36 * k, 140, 36, f"rank {k}", fill)
    d.words(400, 24, "the checkpoint: one tensor", "middle", bold=True)
    d.box(320, 50, 160, 144, "model.blocks.0.\nattn.qkv.weight\n(1152, 384)", "wait")
    d.words(690, 24, "2 ranks read: columns", "middle", bold=True)
    for k in range(2):
        d.box(620 + 70 * k, 50, 70, 144, f"rank {k}", RANKS[k])
    d.arrow((186, 122), (314, 122), words="own part")
    d.arrow((486, 122), (614, 122), words="what it needs")
    d.words(
        400, 222, "Each part is stored with its place in the tensor, so no layout has to know the other one.", "middle"
    )
    return d
