"""Models that take an image for the globe, on data of a region."""

from utils.errors import UsageError
from utils.schema import Config
from weather.fields.grid import Grid

# Our network that joins the last column to the first.
JOINING = "unet"
# The one that takes both axes for periodic: its filters are of frequencies.
PERIODIC = "afno"


def check_columns(config: Config, grid: Grid) -> list[str]:
    """Hold the model against the columns of its images; returns notes on what is let pass.

    Raises UsageError for a model that joins the eastern edge of a region to the western one.
    """
    if grid.goes_around:
        return []
    west = grid.longitude[0]
    east = grid.longitude[-1]
    columns = f"columns from {west:g} to {east:g} degrees do not go around the globe"
    if config.model == JOINING:
        raise UsageError(
            f"{config.config}: {columns}, and model {JOINING} joins the last to the first: train vit, neighborhood or "
            "a model of your own"
        )
    if config.model == PERIODIC:
        return [f"{columns}, and model {PERIODIC} takes images for periodic: expect errors at their edges"]
    return []
