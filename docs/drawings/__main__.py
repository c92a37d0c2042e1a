"""Write every drawing into docs/images/drawings: `make drawings`."""

from collections.abc import Callable
from pathlib import Path

from docs.drawings import data_parallel, domain_parallel, ensembles, first_lessons, model_parallel, narrow, one_device
from docs.drawings.canvas import Drawing

FOLDER = Path(__file__).parents[1] / "images" / "drawings"  # the pages show its files
# A test holds the files to this list, and looks for a page that shows each.
DRAWINGS: tuple[Callable[[], Drawing], ...] = (
    first_lessons.image_to_tokens,
    first_lessons.collectives,
    one_device.ladder,
    one_device.step_time,
    one_device.buffers,
    one_device.rollout,
    one_device.resharding,
    data_parallel.ring,
    data_parallel.ddp_buckets,
    data_parallel.zero_stages,
    data_parallel.fsdp_units,
    data_parallel.mesh,
    model_parallel.column_row,
    model_parallel.sequence_parallel,
    model_parallel.ring_attention,
    model_parallel.pipeline,
    domain_parallel.halo,
    domain_parallel.tiles,
    ensembles.crps,
)

# For a phone, of those that have no picture to step through on the site: NAME_narrow.svg.
NARROW: tuple[Callable[[], Drawing], ...] = (
    narrow.image_to_tokens,
    narrow.ladder,
    narrow.step_time,
    narrow.buffers,
    narrow.rollout,
    narrow.resharding,
    narrow.zero_stages,
    narrow.mesh,
    narrow.sequence_parallel,
    narrow.tiles,
)


def drawings() -> dict[str, Drawing]:
    """{name of its file: drawing}, the wide ones and the narrow ones."""
    drawn = {draw.__name__: draw() for draw in DRAWINGS}
    return drawn | {f"{draw.__name__}_narrow": draw() for draw in NARROW}


def main() -> None:
    """Write them, each to the file of its name."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Drawings are text that git can compare, so they are kept in the repository.
    for name, drawing in drawings().items():
        (FOLDER / f"{name}.svg").write_text(drawing.svg())


if __name__ == "__main__":
    main()
