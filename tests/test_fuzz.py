"""A short round of tests/fuzz.py: hostile input is taken, or refused in a line."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import fuzz

ANY = st.randoms(use_true_random=True)
# The same inputs in every run; `make fuzz` tries others.
LONG = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=100, **LONG)  # `make fuzz` goes on for as long as one likes
@given(chance=ANY)
def test_readers_take_or_refuse_what_they_find(folder, chance):
    fuzz.fuzz_readers(chance, folder)


@pytest.mark.slow("commands that are started one by one")
@settings(max_examples=30, **LONG)
@given(chance=ANY)
def test_commands_take_or_refuse_their_words(folder, data_keys, chance):
    fuzz.run_command(fuzz.strange_command(chance, folder, data_keys), folder)


def test_files_without_damage_are_taken(folder, monkeypatch):
    for harm in ("damaged", "with_a_strange_value"):
        monkeypatch.setattr(fuzz, harm, lambda data, _chance: data)
    monkeypatch.setattr(fuzz, "CHANCE_OF_A_LOST_FILE", 0)
    chance = random.Random(0)
    for kind in (*fuzz.good_files(folder), *fuzz.good_stores()):
        fuzz.read_damaged(chance, folder, kind)


def test_what_a_reader_lets_through_is_noticed(folder, monkeypatch):
    monkeypatch.setattr(fuzz, "read_strange_environment", lambda _: [].pop())
    monkeypatch.setattr(random.Random, "choice", lambda _, kinds: kinds[0])
    with pytest.raises(IndexError):
        fuzz.fuzz_readers(random.Random(0), folder)
