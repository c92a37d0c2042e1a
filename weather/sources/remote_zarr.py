"""A remote store as zarr and xarray read it: by requests that are retried, and by way of the node's cache."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any, NoReturn

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype

from utils.errors import UsageError
from weather.sources.answer_check import AnswerCheck
from weather.sources.chunk_sources import Place
from weather.sources.file_formats import ZARR_METADATA
from weather.sources.remote_store import UNLISTED, RemoteObjects

# Chunks of what has time, latitude and longitude: three numbers or more. A coordinate's chunk may be its fill value.
FIELD_CHUNK = re.compile(r"(.*?)/(?:c/)?(\d+(?:[./]\d+){2,})")


class RemoteZarrStore(Store):
    """A store of zarr over RemoteObjects; nothing can be written.

    zarr takes a chunk that is missing for one of fill values: here it is refused, by its name. denied: what the server
    refused to give of the metadata, '' for nothing: some answer so for what does not exist.
    """

    supports_writes = False
    supports_deletes = False

    def __init__(self, objects: RemoteObjects):
        super().__init__(read_only=True)
        self.objects = objects
        self.denied = ""
        self.check = AnswerCheck()

    @property
    def supports_listing(self) -> bool:
        """Whether the names in the store can be had."""
        return not self.objects.address.startswith(UNLISTED)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """The bytes of an object, None where there is none. Raises UsageError for a chunk of fields that is missing."""
        loop = asyncio.get_running_loop()
        # A request waits in a thread of its own, so that zarr's loop can begin the next ones.
        try:
            data = await loop.run_in_executor(self.objects.pool, self._fetch, _place(key, byte_range))
        except FileNotFoundError:
            # zarr looks for metadata of both of its formats: that some are not there says nothing.
            chunk = FIELD_CHUNK.fullmatch(key)
            if chunk is None:
                return None
            what = f"chunk {chunk[2]} of '{chunk[1]}' was never written: the store was not finished"
            raise UsageError(f"{self.objects.address}: {what}") from None
        except UsageError as error:
            is_metadata = key.rpartition("/")[2] in ZARR_METADATA
            if not is_metadata:
                raise
            # Whoever opens the store tells, if nothing else is found.
            self.denied = self.denied or str(error)
            return None
        return (prototype or default_buffer_prototype()).buffer.from_bytes(bytes(data))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """The bytes of several objects, requested at once."""
        requests = [self.get(key, prototype, byte_range) for key, byte_range in key_ranges]
        return list(await asyncio.gather(*requests))

    async def exists(self, key: str) -> bool:
        """Tell whether there is an object."""
        try:
            await asyncio.to_thread(self._fetch, _place(key, None))
        except FileNotFoundError:
            return False
        return True

    def _fetch(self, place: Place) -> memoryview:
        return self.objects.fetch(place, check=partial(self.check, place))

    async def list(self) -> AsyncIterator[str]:
        """The names of all objects."""
        async for name in self.list_prefix(""):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The names of all objects below a folder."""
        # zarr asks for names only where supports_listing is true.
        for name in sorted(await asyncio.to_thread(self.objects.names, prefix) or ()):
            yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names in a folder, without those in its folders."""
        for name in await asyncio.to_thread(self.objects.children, prefix):
            yield name

    async def set(self, key: str, value: Buffer) -> None:
        """Nothing can be written."""
        self._refuse()

    async def delete(self, key: str) -> None:
        """Nothing can be removed."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError("remote stores are only read")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteZarrStore) and other.objects is self.objects

    def __hash__(self) -> int:
        return hash(self.objects.address)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a remote store is opened anew in another process")


def _place(key: str, byte_range: ByteRequest | None) -> Place:
    """The place of some bytes of an object, as zarr asks for them."""
    if isinstance(byte_range, RangeByteRequest):
        return Place(key, byte_range.start, byte_range.end - byte_range.start)
    if isinstance(byte_range, OffsetByteRequest):
        return Place(key, byte_range.offset)
    # The last bytes, whatever the length: where a shard has its index.
    if isinstance(byte_range, SuffixByteRequest):
        return Place(key, -byte_range.suffix, byte_range.suffix)
    return Place(key)
