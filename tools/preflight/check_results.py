"""The result of a check, as a line of text and as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tools.preflight.rendezvous import Rendezvous


@dataclass
class CheckResult:
    """level: ok, warn or FAIL. advice: what to do about a warn or a FAIL. values: numbers for the JSON report."""

    level: str
    what: str
    found: str
    advice: str = ""
    values: dict[str, Any] | None = None

    def __post_init__(self):
        if self.level == "ok":
            self.advice = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields, as JSON can hold them and CheckResult(**...) takes them."""
        return asdict(self)

    def line(self) -> str:
        """The result as one line of text."""
        return f"{self.level:<5} {self.what:<14} {self.found}{f' - {self.advice}' if self.advice else ''}"


def merge(answers: Iterable[list[dict[str, Any]]], ranks: Rendezvous) -> list[CheckResult]:
    """Join the results of all ranks (as dicts, in rank order); a result that only some ranks have names them."""
    ranks_of: dict[str, list[int]] = {}
    for rank, results in enumerate(answers):
        for result in results:
            ranks_of.setdefault(json.dumps(result), []).append(rank)
    merged = []
    for text, members in ranks_of.items():
        common = CheckResult(**json.loads(text))
        if len(members) < ranks.size:
            common.found = f"{ranks.names(members)}: {common.found}"
        merged.append(common)
    return merged
