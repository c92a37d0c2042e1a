"""Objects of a store that is elsewhere (gs://, s3://, https://, memory://): fetched, retried, and kept on this node.

fsspec speaks to the servers. A chunk that was fetched stays in a cache on the node's own disk (utils/node_cache.py),
for all of its processes; zarr's own caches belong to one process each, and those of fsspec have no bound. A server that
does not answer, or answers with something else, such as a page to sign in, is asked again for a while, with growing
pauses; then a ConnectionLostError says which object it was. Only what could be decoded is kept.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from utils.errors import ArgumentParser, ConnectionLostError, UsageError, first_line, float_in_range, int_in_range
from utils.node_cache import NodeCache
from utils.signals import stop_asked
from weather.sources.chunk_sources import Place, Use, take_any
from weather.sources.file_formats import ZARR_METADATA

log = logging.getLogger(__name__)
IN_FLIGHT = 16  # requests of a process to one store at a time
# Seconds between two attempts.
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 10.0
LONGEST_ANSWER = 60.0  # seconds that one attempt may take
UNLISTED = ("http://", "https://")  # servers that do not say what they have
INSTALL = "pip install -r requirements/era5.txt"
TEMPORARY_STATUS = (408, 425, 429)  # of HTTP, besides 500 and more: ask again
NO_ACCESS_STATUS = (401, 403)
BAD = "bad answer"
SHOWN = 60  # bytes of a page in place of a chunk
# Errors of a program, and not of a line.
PERMANENT = (TypeError, ValueError, LookupError, AttributeError, ImportError, NotImplementedError, ArithmeticError)
# Public buckets need no account; whoever has one names it in one of these variables.
ANONYMOUS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gs": ({"token": "anon"}, ("GOOGLE_APPLICATION_CREDENTIALS",)),
    "gcs": ({"token": "anon"}, ("GOOGLE_APPLICATION_CREDENTIALS",)),
    "s3": ({"anon": True}, ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE")),
}


@dataclass(frozen=True)
class RemoteOptions:
    """The keys of a config that tell how a remote store is read: see utils/schema.py."""

    cache_to: str | None = None
    cache_gib: float = 50.0
    retry_seconds: int = 60


def is_address(text: str) -> bool:
    """Tell whether a text is the address of something that is elsewhere."""
    return "://" in text


def add_remote_options(parser: ArgumentParser) -> None:
    """Add an option for each of RemoteOptions."""
    usual = RemoteOptions()
    option = parser.add_argument
    option("--cache_to", metavar="FOLDER", help="keep chunks of a remote store here, on a disk of this node")
    option(
        "--cache_gib", type=float_in_range(0, 1e6), default=usual.cache_gib, help="GiB of them at most (%(default)s)"
    )
    patience = "seconds for which a lost connection is retried (%(default)s)"
    option("--retry_seconds", type=int_in_range(1, 10**6), default=usual.retry_seconds, help=patience)


class BadAnswerError(Exception):
    """A server gave other bytes than those that were asked for."""


class RemoteObjects:
    """The objects below an address, a ChunkSource. Several threads may read at a time.

    Raises UsageError for an address that cannot be used.
    """

    def __init__(self, address: str, options: RemoteOptions):
        self.address = address
        self.options = options
        self.files, self.root = _file_system(address)
        self.cache = NodeCache(options.cache_to, options.cache_gib) if options.cache_to else None
        self.pool = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="chunks")
        self.lock = threading.Lock()
        # When the last attempt failed, which was logged, and when the last answer came, as time.monotonic() has it.
        self.lost_since: float | None = None
        self.answered_at = -math.inf

    def read_all(self, places: Sequence[Place], uses: Sequence[Use]) -> Iterator[None]:
        """As ChunkSource says; all are requested at once. Raises as `fetch` does."""
        if len(places) == 1:
            self.fetch(places[0], uses[0])
            yield
            return
        fetches = [self.pool.submit(self.fetch, *each) for each in zip(places, uses, strict=True)]
        try:
            for fetch in fetches:
                fetch.result()
                yield
        finally:
            # Left early: no thread may still write where its use does.
            for fetch in fetches:
                fetch.cancel() or fetch.exception()

    def fetch(self, place: Place, use: Use = take_any, check: Use = take_any) -> memoryview:
        """The bytes at a place, from the cache if they are there, after they were given to their use.

        check: a use of what the server sends alone: what is kept has passed it. What a use refuses is a bad answer: it
        is not kept, and asked for again. Raises FileNotFoundError for an object that does not exist, UsageError where
        the server refuses to give it, and ConnectionLostError where no good answer comes for `retry_seconds`.
        """

        def use_first(content: memoryview) -> None:
            check(content)
            use(content)

        is_metadata = place.key.rpartition("/")[2] in ZARR_METADATA
        if self.cache is None or is_metadata:  # metadata may change, when years are added to a store
            return self._fetch_patiently(place, use_first)
        name = f"{self.address}/{place.key} {place.first} {place.length}"
        content = self._use_kept(self.cache, name, use)
        if content is None:
            with self.cache.alone(name):
                content = self._use_kept(self.cache, name, use)  # another process has fetched it meanwhile
                if content is None:
                    content = self._fetch_patiently(place, use_first)
                    self.cache.put(name, content)
        return content

    def _use_kept(self, cache: NodeCache, name: str, use: Use) -> memoryview | None:
        """The bytes under a name in the cache, after their use; None, and no more there, where that refuses them."""
        content = cache.get(name)
        if content is None:
            return None
        try:
            use(content)
        except Exception:  # each codec has its own
            cache.drop(name)
            return None
        return content

    def names(self, prefix: str) -> set[str] | None:
        """The names of all objects below a folder; None where the server does not list them."""
        found = self._listed(self.files.find, prefix)  # where it is None, a missing chunk is noticed when it is read
        if found is None:
            return None
        start = len(self.root.strip("/")) + 1
        return {name.strip("/")[start:] for name in found}

    def children(self, prefix: str) -> list[str]:
        """The names in a folder, without those in its folders; none where the server does not list them."""
        found = self._listed(partial(self.files.ls, detail=False), prefix)
        return [name.rstrip("/").rpartition("/")[2] for name in found or ()]

    def _listed(self, find: Callable[[str], Iterable[str]], prefix: str) -> Iterable[str] | None:
        """What the file system finds below a folder; None where the server does not list it."""
        if self.address.startswith(UNLISTED):
            return None
        try:
            folder = f"{self.root}/{prefix}"
            return find(folder.rstrip("/"))
        except Exception:  # a bucket that anyone may read, but not list
            return None

    def _fetch_patiently(self, place: Place, use: Use) -> memoryview:
        """Fetch and use, again and again while the server does not answer, or not with what was asked for."""
        patience = self.options.retry_seconds
        began = time.monotonic()
        pause = FIRST_PAUSE
        while True:
            asked_at = time.monotonic()
            try:
                data = memoryview(self._fetch_once(place))
                _use_answer(data, use)
            except Exception as error:
                reason = self._temporary_reason(error, place)
            else:
                self._note_answer()
                return data
            lost_since = self._note_silence(reason, asked_at)
            # All requests of one outage end together: those that begin in the middle of it do not wait as long.
            deadline = min(began, lost_since) + patience
            is_too_late = time.monotonic() + pause > deadline
            # A scheduler that asks to stop does not wait as long.
            if is_too_late or stop_asked.wait(pause):
                got = "no good answer" if reason.startswith(BAD) else "no answer"
                end = f"for {patience} s" if is_too_late else "until a signal asked to stop"
                what = f"{self.address}: lost at {place.key}: {got} {end} ({reason})"
                raise ConnectionLostError(f"{what}; repeat the command to resume")
            pause = min(2 * pause, LONGEST_PAUSE)

    def _note_silence(self, reason: str, asked_at: float) -> float:
        """Say once that the server does not answer; returns since when, as time.monotonic() has it.

        asked_at: when the attempt that failed began. One that began before another one was answered belongs to an
        outage that is over, and is not announced again.
        """
        with self.lock:
            if asked_at < self.answered_at:
                return asked_at
            if self.lost_since is None:
                self.lost_since = time.monotonic()
                patience = self.options.retry_seconds
                log.warning("%s does not answer (%s): asking again for %d s", self.address, reason, patience)
            return self.lost_since

    def _note_answer(self) -> None:
        with self.lock:
            self.answered_at = time.monotonic()
            if self.lost_since is not None:
                self.lost_since = None
                log.warning("%s answers again", self.address)

    def _fetch_once(self, place: Place) -> bytes:
        """One request. Raises what fsspec and its libraries raise, and ConnectionError for an answer cut short."""
        # fsspec counts from the end, and ends at the end, as slices of Python do.
        key, first, length = place
        path = f"{self.root}/{key}"
        is_whole = first == 0 and length is None
        end = None if length is None or first + length == 0 else first + length
        begin = None if is_whole else first
        if self.files.async_impl:
            from fsspec.asyn import sync

            seconds = min(LONGEST_ANSWER, max(1.0, self.options.retry_seconds / 2))
            data = sync(self.files.loop, self.files._cat_file, path, begin, end, timeout=seconds)
        else:
            data = self.files.cat_file(path, begin, end)
        if length is not None and len(data) > length:  # a server that knows no ranges sends the whole object
            data = data[first:end]
        if length is not None and len(data) < length:
            raise ConnectionError(f"{len(data)} of {length} bytes came")
        return data

    def _temporary_reason(self, error: Exception, place: Place) -> str:
        """What is wrong with a line, in words. Raises what asking again does not mend."""
        if isinstance(error, FileNotFoundError):
            raise error
        if isinstance(error, BadAnswerError):
            return str(error)
        stated = str(getattr(error, "status", None) or getattr(error, "code", None))
        status = int(stated) if stated.isdecimal() else None
        reason = first_line(error)
        if status in NO_ACCESS_STATUS or isinstance(error, PermissionError):
            what = f"{self.address}: no access to {place.key} ({status or reason})"
            raise UsageError(f"{what}: is the address right, and the store public?") from None
        is_refused = status is not None and status < 500 and status not in TEMPORARY_STATUS
        if is_refused or isinstance(error, PERMANENT):
            raise UsageError(f"{self.address}: {place.key} cannot be read: {reason}") from error
        return reason


def _use_answer(data: memoryview, use: Use) -> None:
    """Give what a server sent to its use. Raises BadAnswerError for what that refuses."""
    try:
        use(data)
    except Exception as error:  # each codec has its own
        beginning = bytes(data[:SHOWN]).lstrip()
        page = f", a page: {beginning.decode(errors='replace')}" if beginning.startswith(b"<") else ""
        raise BadAnswerError(f"{BAD}: {first_line(error)}{page}") from error


def _file_system(address: str) -> tuple[Any, str]:
    """(file system of fsspec, path in it) of an address. Raises UsageError for one that it does not know."""
    try:
        import fsspec
    except ImportError as error:
        raise UsageError(f"{address} needs the package fsspec ({error}): {INSTALL}") from None
    protocol = address.partition("://")[0]
    options, variables = ANONYMOUS.get(protocol, ({}, ()))
    has_account = any(os.environ.get(name) for name in variables)
    try:
        files, root = fsspec.url_to_fs(address, **({} if has_account else options))
    except ImportError as error:
        raise UsageError(f"{address}: {first_line(error)}: {INSTALL}") from None
    except Exception as error:  # each file system has its own
        raise UsageError(f"{address}: cannot be opened: {first_line(error)}") from None
    return files, root.rstrip("/")
