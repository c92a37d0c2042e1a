"""The examples of docs/domain_parallel.md and its reference run, and send what it says."""

import re
from pathlib import Path

import torch

from docs.examples import domain_messages, own_model
from docs.examples.own_rule import SHAPE, power_spectrum
from tests.support import programs
from tests.support.shard_parity import Case, X, check_all
from utils import comm

CHAPTER = "".join(path.read_text() for path in sorted(Path("docs").rglob("domain_*.md")))


CASES = {
    "latitude in rows of 4 and 3": Case(power_spectrum, (X(SHAPE, (2,)),)),
    "all rows on rank 0": Case(power_spectrum, (X(SHAPE, (2,), {0: (7, 0)}),)),
    "longitude split": Case(power_spectrum, (X(SHAPE, (3,)),)),
    "channels split": Case(power_spectrum, (X(SHAPE, (1,)),)),
    "a copy on every rank": Case(power_spectrum, (X(SHAPE),)),
}


def test_the_rule_of_the_chapter_gives_the_numbers_of_the_whole(ranks):
    ranks(2, check_all, list(CASES.values()))


def test_the_example_prints_what_the_chapter_shows():
    (status, output), (other, nothing) = programs.run_ranks(["-m", "docs.examples.own_rule"])
    assert status == other == 0, output + nothing
    for name in CASES:
        (line,) = [line for line in output.splitlines() if line.startswith(name)]
        assert line in CHAPTER


def test_the_model_of_the_chapter_runs(ranks):
    ranks(2, own_model.train_step)


def counted(config):
    comm.build_mesh(torch.device("cpu"), config.layout(comm.world_size()))
    messages = domain_messages.counted(config)
    return [domain_messages.in_words(messages[phase]) for phase in ("forward", "backward")]


def test_messages_are_counted_as_the_chapter_says(ranks, tiny_config):
    sizes = {"embed_dim": 128, "depth": 4, "num_heads": 4, "img_size": [32, 64], "global_batch_size": 16}
    config = tiny_config(**sizes, domain_parallel=2)
    forward, backward = ranks(2, counted, config)[0]
    assert forward == "4 all_gather of 4,194,304 bytes, 1 all_reduce of 128 bytes"
    assert backward == "1 all_reduce of 3,502,848 bytes, 4 reduce_scatter of 4,194,304 bytes"
    for number in re.findall(r"[\d,]{7,}", forward + backward):
        assert number in CHAPTER
