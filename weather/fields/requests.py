"""What a user asks for of data of their own: variables by name, at levels, under names of theirs."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from utils.errors import UsageError
from weather.fields.channels import CHANNELS, ON_LEVELS, Channel, channel_key, channel_of, meaning_of

FORM = "write a variable of the file (t2m), one at levels (z:500,850), or a name for it (rain=tp)"
# [NAME=]VARIABLE[:LEVEL,LEVEL]
REQUEST = re.compile(r"((?P<name>[^=:,\s]+)=)?(?P<variable>[^=:,\s]+)(:(?P<levels>[^=:\s]+))?")


@dataclass(frozen=True)
class Request:
    """A variable that becomes a channel.

    variable: its name in the file. quantity: of era5.yaml, "" where the name is not known. level: the one that is
    taken, in hPa where it is a pressure; None: it has none. is_level_stated: behind a colon, and not by a name such as
    z500. is_renamed: the variable has this name and no other. name: of the channel.
    """

    variable: str
    quantity: str
    level: float | None
    is_level_stated: bool
    is_renamed: bool
    name: str

    @property
    def known(self) -> Channel:
        """The channel with the units of a known quantity; "" are those of the file."""
        return channel_of(self.name)


def parse_requests(texts: Iterable[str]) -> list[Request]:
    """The channels of `t2m z:500,850 rain=tp`, in this order. Raises UsageError.

    A channel of a known quantity has our name for it: 2m_temperature is t2m. Any other keeps its own, with the level
    behind it.
    """
    # Each level is a channel of its own.
    requests: list[Request] = []
    for text in texts:
        match = REQUEST.fullmatch(text)
        if match is None:
            raise UsageError(f"--variables {text}: {FORM}")
        # What stands before the equals sign is the user's, the rest is of the file.
        variable = match["variable"]
        given = match["name"] or ""
        for level in _parse_levels(text, match["levels"]):
            requests.append(_make_request(variable, given, level))
    _check_distinct(requests)
    return requests


def _parse_levels(text: str, levels: str | None) -> list[float | None]:
    if levels is None:
        return [None]
    try:
        return [float(level) for level in levels.split(",")]
    except ValueError:
        raise UsageError(f"--variables {text}: '{levels}' are no levels: {FORM}") from None


def _make_request(variable: str, given: str, stated: float | None) -> Request:
    # The user's name for it, else that of the file, says which quantity it is.
    name = given or variable
    meaning = meaning_of(name)
    quantity = meaning.quantity if meaning is not None else ""
    level_of_name = meaning.level if meaning is not None else None
    # z500:850 would say two things.
    if stated is not None and level_of_name not in (None, stated):
        raise UsageError(f"--variables {variable}:{stated:g}: {name} is of the level {level_of_name}: give one of them")
    # A level may stand in the name alone: z500.
    level = level_of_name if stated is None else stated
    # A name that the user gave stays, unless it is known, and its level completes it.
    at_level = "" if level is None else f"{level:g}"
    channel = name
    if quantity:
        channel = f"{quantity}{at_level}" if quantity in ON_LEVELS else quantity
    elif not given:
        channel = f"{name}{at_level}"
    return Request(variable, quantity, level, stated is not None, bool(given), channel)


def _check_distinct(requests: list[Request]) -> None:
    """Raise UsageError for two channels of one name, and for a variable that is taken for two quantities."""
    # Files and scores tell channels apart by their names.
    by_name: dict[str, Request] = {}
    by_variable: dict[str, Request] = {}
    for request in requests:
        if request.name in by_name:
            raise UsageError(f"--variables: {request.name} is asked for twice: leave one out")
        by_name[request.name] = request
        first = by_variable.setdefault(request.variable, request)
        if (first.quantity, first.is_renamed) != (request.quantity, request.is_renamed):
            raise UsageError(
                f"--variables: {request.variable} is to be {first.name} and {request.name}, which are not of one "
                "quantity: leave one out"
            )


def request_of(quantity: str, level: float | None) -> Request:
    """The request of a quantity of era5.yaml, at a level (hPa) if it lies on levels."""
    at_level = "" if level is None else f"{level:g}"
    return Request(quantity, quantity, level, True, False, f"{quantity}{at_level}")


def humidity_sources(request: Request) -> list[Request]:
    """What relative humidity is derived from, at the same level."""
    return [request_of("q", request.level), request_of("t", request.level)]


ERA5_REQUESTS = [request_of(*channel_key(channel.name)) for channel in CHANNELS]
# What sources of ERA5 are looked through for: the channels, and what humidity may be derived from.
ERA5_SOUGHT = list(ERA5_REQUESTS)
for _request in ERA5_REQUESTS:
    if _request.quantity == "r":
        ERA5_SOUGHT += humidity_sources(_request)
