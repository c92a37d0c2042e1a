"""What a check found, as a line for people and as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.preflight.rendezvous import RollCall


@dataclass
class Finding:
    """level: ok, warn or FAIL. advice is for the reader of a warn or a FAIL. values: numbers, for JSON."""

    level: str
    what: str
    found: str
    advice: str = ""
    values: dict[str, Any] | None = None

    def __post_init__(self):
        if self.level == "ok":
            self.advice = ""

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold, and Finding(**...) takes."""
        return asdict(self)

    def line(self) -> str:
        """The finding as text."""
        return f"{self.level:<5} {self.what:<14} {self.found}{f' - {self.advice}' if self.advice else ''}"


def merge(answers: Iterable[list[dict[str, Any]]], ranks: "RollCall") -> list[Finding]:
    """One list out of every rank's findings (as dicts): equal ones become one, which names its ranks where not all."""
    whose: dict[str, list[int]] = {}
    for rank, findings in enumerate(answers):
        for finding in findings:
            whose.setdefault(json.dumps(finding), []).append(rank)
    merged = []
    for text, members in whose.items():
        common = Finding(**json.loads(text))
        if len(members) < ranks.size:
            common.found = f"{ranks.names(members)}: {common.found}"
        merged.append(common)
    return merged
