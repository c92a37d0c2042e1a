"""A bounded cache of bytes in a folder of this node, which all of its processes share.

Every entry is a file with a header (length, checksum), written under another name and then renamed: whoever reads it
gets all of it or nothing, also when a process was killed on the way. The sum of the sizes stays within the bound: room
is booked, under a lock, before an entry is written, and what was not used for longest goes first.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

from utils.errors import UsageError, first_line

log = logging.getLogger(__name__)
HEADER = struct.Struct("<8sIQ")  # name of the format, CRC-32 and length of what follows
FORMAT = b"chunk 2\n"  # what bears an older number may be a page that a proxy gave in place of a chunk
TOTAL = struct.Struct("<Q")
FILLED = 0.9  # of the bound, after something was removed: to look at every file costs time
ABANDONED_SECONDS = 3600  # after which a file that was never renamed belongs to a process that is gone
PARTIAL = "partial-"


class NodeCache:
    """The cache in a folder. gib: its bound. Several objects, in any processes, may have the same folder.

    Raises UsageError where the folder cannot be used.
    """

    def __init__(self, folder: Path | str, gib: float):
        self.folder = Path(folder)
        self.limit = int(gib * 2**30)
        self.is_full = False  # of the disk, which was said
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._set_total(self._make_room(0))
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise UsageError(f"cache_to {folder}: {reason}: give a folder on a disk of this node") from None

    def get(self, name: str) -> memoryview | None:
        """The bytes under a name; None where there are none, or not all of them."""
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0) as file:
                data = memoryview(file.readall())
                os.utime(file.fileno())  # used now
        except OSError:
            return None
        if len(data) >= HEADER.size:
            form, checksum, length = HEADER.unpack(data[: HEADER.size])
            content = data[HEADER.size :]
            is_whole = form == FORMAT and length == len(content)
            if is_whole and zlib.crc32(content) == checksum:
                return content
        # A disk that lost power may have the name of a file and not its content.
        path.unlink(missing_ok=True)
        return None

    def drop(self, name: str) -> None:
        """Keep the bytes under a name no longer: they are whole, and not what was wanted."""
        self._path(name).unlink(missing_ok=True)

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Keep bytes under a name, if they fit. A full disk is said once, in the log, and is no error."""
        # What is larger than the cache would drive out all else, and itself.
        size = HEADER.size + len(content)
        if size > self.limit:
            return
        path = self._path(name)
        partial = path.with_name(f"{PARTIAL}{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(exist_ok=True)
            # A process that is killed behind this line has booked too much, which the next look at all files mends.
            self._book(size, partial)
            with open(partial, "r+b") as file:
                file.write(HEADER.pack(FORMAT, zlib.crc32(content), len(content)))
                file.write(content)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if not self.is_full:
                log.warning("%s: chunks are not kept: %s", self.folder, error.strerror)
            self.is_full = True

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Hold off whoever is inside with the same name, on this node: one fetches it, the others find it then."""
        # 256 locks are enough: two names that share one by chance only wait for each other.
        number = self._digest(name)[:2]
        with open(self.folder / "locks" / number, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold off whoever counts. A killed process gives the lock back."""
        with open(self.folder / "locks" / "total", "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _book(self, size: int, partial: Path) -> None:
        """Count an entry before it is written to `partial`, and remove others where it would be too much."""
        with self._locked():
            total = self._total()
            if total is None or total + size > self.limit:
                total = self._make_room(size)
            # The file has its size from now on: whoever looks at all files counts it too.
            with open(partial, "wb") as file:
                file.truncate(size)
            self._set_total(total + size)

    def _make_room(self, size: int) -> int:
        """Remove the entries not used for longest, until there is room; returns the bytes of those that stay."""
        entries = []
        for path in self.folder.glob("??/*"):
            # Readers remove what is damaged, and writers rename, without the lock.
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime, status.st_size, path))
        # Files may have been removed by hand, so they are counted anew.
        total = sum(length for _, length, _ in entries)
        is_too_much = total + size > self.limit
        most = max(0, int(FILLED * self.limit) - size) if is_too_much else self.limit
        for used, length, path in sorted(entries):
            is_partial = path.name.startswith(PARTIAL)
            is_abandoned = is_partial and time.time() - used > ABANDONED_SECONDS
            is_removed = total > most and not is_partial
            if is_abandoned or is_removed:
                path.unlink(missing_ok=True)
                total -= length
        return total

    def _total(self) -> int | None:
        """The bytes that are booked; None where that cannot be told."""
        # The file is not there at first, and empty if a process was killed while it wrote.
        try:
            (total,) = TOTAL.unpack((self.folder / "total").read_bytes())
        except (OSError, struct.error):
            return None
        return total

    def _set_total(self, total: int) -> None:
        (self.folder / "total").write_bytes(TOTAL.pack(total))

    def _path(self, name: str) -> Path:
        # Names are addresses with slashes, so a file is named by a hash.
        digest = self._digest(name)
        return self.folder / digest[:2] / digest[2:]

    @staticmethod
    def _digest(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()[:40]
