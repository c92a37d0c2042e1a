"""The cache of a node stays within its bound, whoever is killed, and gives all of an entry or nothing."""

import contextlib
import os
import signal
import time
import zlib

import pytest

from tests.support import forked
from tests.support.refusals import refusal
from utils.node_cache import HEADER, NodeCache

GIB = 2**30


def size_of(folder):
    total = 0
    for path in folder.glob("??/*"):
        with contextlib.suppress(FileNotFoundError):  # another process has renamed it meanwhile
            total += path.stat().st_size
    return total


def test_what_was_put_is_got_by_every_process_that_has_the_folder(tmp_path):
    first, second = NodeCache(tmp_path, 1), NodeCache(tmp_path, 1)
    assert first.get("a") is None
    first.put("a", b"chunk")
    first.put("none", b"")
    assert bytes(second.get("a")) == b"chunk" and bytes(second.get("none")) == b""


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    cache = NodeCache(tmp_path, 10 * (100 + HEADER.size) / GIB)
    for number in range(10):
        cache.put(str(number), bytes([number]) * 100)
        os.utime(cache._path(str(number)), (number, number))
    cache.get("0")
    cache.put("new", b"x" * 100)
    there = {name for name in [*map(str, range(10)), "new"] if cache.get(name)}
    assert {"0", "new", "9"} <= there and not there & {"1", "2"}
    assert size_of(tmp_path) <= cache.limit
    cache.put("too large", b"x" * cache.limit)
    assert cache.get("too large") is None and cache.get("new")


def test_a_smaller_bound_is_kept_from_the_start(tmp_path):
    cache = NodeCache(tmp_path, 1)
    for number in range(10):
        cache.put(str(number), b"x" * 1000)
    smaller = NodeCache(tmp_path, 3000 / GIB)
    assert 0 < size_of(tmp_path) <= smaller.limit


def fill(folder, limit, first, count):
    cache = NodeCache(folder, limit / GIB)
    for number in range(first, first + count):
        name, content = str(number % 40), bytes([number % 40]) * (500 + 20 * (number % 40))
        with cache.alone(name):
            found = cache.get(name)
            if found is None:
                cache.put(name, content)
            else:
                assert bytes(found) == content


@pytest.mark.slow("several processes on one cache, some of them killed")
def test_processes_that_write_at_once_and_are_killed_keep_the_bound_and_whole_entries(tmp_path):
    limit, context = 20_000, forked.context()
    processes = [context.Process(target=fill, args=(tmp_path, limit, first, 400)) for first in (0, 7, 20)]
    endless = context.Process(target=fill, args=(tmp_path, limit, 3, 10**9))
    for process in (*processes, endless):
        process.start()
    while not size_of(tmp_path):
        time.sleep(0.01)
    largest = 0
    looking = NodeCache(tmp_path, limit / GIB)
    for _ in range(50):
        with looking._locked():  # no entry goes, and none is booked, between two that are counted
            largest = max(largest, size_of(tmp_path))
        time.sleep(0.005)
    os.kill(endless.pid, signal.SIGKILL)
    for process in (*processes, endless):
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert 0 < largest <= limit and size_of(tmp_path) <= limit
    fill(tmp_path, limit, 0, 400)
    assert size_of(tmp_path) <= limit


def test_room_that_is_booked_and_not_written_yet_is_not_given_away(tmp_path, monkeypatch):
    """Another process counts all files while an entry of 4,000 bytes is on its way."""
    limit, checksum = 10_000, zlib.crc32
    slow, other = (NodeCache(tmp_path, limit / GIB) for _ in range(2))

    def interrupted(content):
        monkeypatch.undo()
        for name in "bcdef":
            other.put(name, b"x" * 1_900)
        return checksum(content)

    monkeypatch.setattr("utils.node_cache.zlib.crc32", interrupted)
    slow.put("a", b"x" * 4_000)
    assert slow.get("a") and slow.get("f") and size_of(tmp_path) <= limit


def test_a_folder_that_cannot_be_used_is_refused_and_a_full_disk_is_said_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    with refusal("give a folder on a disk of this node", f"cache_to {tmp_path / 'file'}"):
        NodeCache(tmp_path / "file", 1)
    cache = NodeCache(tmp_path / "cache", 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_book", full)
    cache.put("a", b"1")
    cache.put("b", b"1")
    assert len(caplog.messages) == 1 and "chunks are not kept: No space left on device" in caplog.messages[0]
    assert cache.get("a") is None
