"""All nine answers are checked at once; a wrong one is told what its run would look like, or where to look."""

from types import ModuleType
from typing import Any

from exercises.checks.common import Draw, Wrong

WORLD_SIZES = (1,)
RIGHT = {  # of the faults in broken_runs.py
    "tensor": {"ranks": [0, 1], "where": "blocks.1.mlp.fc2", "cause": "missing sum"},
    "domain": {"ranks": [0], "where": "wide", "cause": "halo"},
    "data": {"ranks": [1], "where": "all", "cause": "learning rate"},
}
SEEN = {  # of each cause, what one would see
    "samples": "then the batch would differ, before anything is computed",
    "seed": "then the initial weights would differ, before the forward pass",
    "missing sum": "then an output would differ, first that of a layer of which every rank computes one term of a sum",
    "double sum": "then an output would be twice what it should be, and differ by 1.0e+00 on every rank",
    "halo": "then an output would differ, first that of a convolution that reads beyond a cut of the image",
    "norm": "then an output would differ, first that of a norm",
    "gradients": "then outputs and loss would be equal, and gradients differ",
    "learning rate": "then gradients would be equal, and the weights of this rank differ after step 1",
    "moments": "then the weights after step 1 would be equal",
}


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check each of ANSWERS. Raises Wrong, with a line for each wrong one."""
    wrong = []
    for run, right in RIGHT.items():
        answers = exercise.ANSWERS.get(run, {})
        for question, answer in right.items():
            given = answers.get(question)
            if isinstance(given, list):
                given = sorted(set(given))
            if given in (None, "", []):
                wrong.append(f"{run}, {question}: no answer")
            elif given != answer:
                wrong.append(f"{run}, {question}: {hint(question, given, answer)}")
    if wrong:
        raise Wrong("\n  - ".join(wrong))


def hint(question: str, given: Any, answer: Any) -> str:
    """The reply to a wrong answer."""
    if question == "cause":
        return SEEN.get(given, f"{given!r} is none of {', '.join(SEEN)}")
    if question == "ranks":
        if not isinstance(given, list):
            return "a list of ranks is asked for, such as [0, 1]"
        if others := set(answer) - set(given):
            return f"rank {min(others)} differs too in the row where the difference begins"
        return f"rank {min(set(given) - set(answer))} is equal in the row where the difference begins"
    if given == "all":
        return "some rows of this stage are equal"
    if answer == "all":
        return "it is not the only row of this stage that differs: how many are equal?"
    if answer.startswith(f"{given}."):
        return f"a part of {given} differs before it"
    return "in which row of the second table does a number above 1e-08 stand first?"
