"""What a check found, as a line for people and as JSON."""

import json
from dataclasses import asdict, dataclass


@dataclass
class Finding:
    """level: ok, warn or FAIL. advice is for the reader of a warn or a FAIL. values: numbers, for JSON."""

    level: str
    what: str
    found: str
    advice: str = ""
    values: dict | None = None

    def __post_init__(self):
        if self.level == "ok":
            self.advice = ""

    def as_dict(self):
        return asdict(self)

    def line(self):
        return f"{self.level:<5} {self.what:<14} {self.found}{f' - {self.advice}' if self.advice else ''}"


def merge(answers, ranks):
    """One list out of every rank's findings (as dicts): equal ones become one, which names its ranks where not all."""
    whose = {}
    for rank, findings in enumerate(answers):
        for finding in findings:
            whose.setdefault(json.dumps(finding), []).append(rank)
    merged = []
    for text, members in whose.items():
        finding = Finding(**json.loads(text))
        if len(members) < ranks.size:
            finding.found = f"{ranks.names(members)}: {finding.found}"
        merged.append(finding)
    return merged
