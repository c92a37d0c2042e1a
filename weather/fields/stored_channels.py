"""The channels of a year: their names and units as the file states them, under our own names."""

from utils.errors import UsageError, reading
from weather.fields.channels import CHANNELS, QUANTITIES, Channel, channel_key, channel_of, find_conversion, split_units
from weather.fields.stored_arrays import StoredArrays, find_names

NO_NAMES = "names no channels: they are taken for "


def read_channels(
    file: StoredArrays,
    count: int,
) -> tuple[list[Channel], list[str]]:
    """The first channels, with the units that the file states, and what was assumed of them, a line each.

    Names of others become ours (u10m is u10), and a channel without units has those of its name. Raises UsageError
    where names or units are no text, or two channels are one.
    """
    # Without names the channels are taken to be ours, in our order.
    names = _read_texts(file, "channel")
    has_names = names is not None
    if names is None:
        by_position = [channel.name for channel in CHANNELS]
        by_position += [f"channel{number}" for number in range(len(CHANNELS), file.shape[1])]
        names = by_position
    units = _read_texts(file, "channel_units") or [""] * file.shape[1]

    channels = []
    for name, stated in zip(names[:count], units[:count], strict=True):
        # Some write the units behind the name.
        bare_name, units_in_name = split_units(name)
        known = channel_of(bare_name)
        channels.append(known._replace(units=stated or units_in_name or known.units))
    _check_different(channels, names, file)

    notes = _unknown_units(channels)
    if not has_names:
        notes.insert(0, NO_NAMES + ", ".join(channel.name for channel in channels))
    return channels, notes


def _read_texts(file: StoredArrays, wanted: str) -> list[str] | None:
    """One text for each channel, without blanks around it; None where the file has none, or numbers."""
    # Names of arrays may differ in case.
    name = next(iter(find_names(file, [wanted])), None)
    if name is None:
        return None
    where = f"{file.path}: '{name}'"
    with reading(where):
        array = file.arrays[name]
        channels = file.shape[1]
        if array.shape != (channels,):
            raise UsageError(f"{where} has shape {array.shape}, the fields need ({channels},)")
        values = array.values
        if values.dtype.kind in "iuf":  # xarray numbers channels that have no names
            return None
        if values.dtype.kind not in "SUTO":
            raise TypeError(f"{values.dtype} is not text")
        texts = [text.decode() if isinstance(text, bytes) else str(text) for text in values]
        return [text.strip(" \0") for text in texts]


def _check_different(channels: list[Channel], names: list[str], file: StoredArrays) -> None:
    """Raise UsageError where two channels have one name. names: those in the file."""
    first_numbers: dict[str, int] = {}
    for number, channel in enumerate(channels):
        # The channel that has this name first.
        first = first_numbers.setdefault(channel.name, number)
        if first != number:
            spelled = f" ('{names[first]}' and '{names[number]}')" if names[first] != names[number] else ""
            raise UsageError(
                f"{file.path}: channels {first} and {number} are both '{channel.name}'{spelled}: "
                "name each for what it holds, or leave one out"
            )


def _unknown_units(channels: list[Channel]) -> list[str]:
    """A line for each unit that era5.yaml does not know, with the channels that are in it."""
    names_by_unit: dict[str, list[str]] = {}
    for channel in channels:
        quantity, _ = channel_key(channel.name)
        is_known = quantity not in QUANTITIES or find_conversion(channel.units, QUANTITIES[quantity].units) is not None
        if not is_known:
            names_by_unit.setdefault(channel.units, []).append(channel.name)
    lines = []
    for unit, names in names_by_unit.items():
        its_range = "their ranges are" if len(names) > 1 else "its range is"
        lines.append(f"the unit '{unit}' of {', '.join(names)} is not known: {its_range} not checked")
    return lines
