"""What a file or a store is that is not what was asked for: an archive, a page of a server, a list of points."""

from collections.abc import Mapping, Sequence
from pathlib import Path

ZARR_METADATA = ("zarr.json", ".zgroup", ".zarray", ".zmetadata", ".zattrs")  # names of documents in a store
ARCHIVE = "unpack it and give the files inside"
SIGNATURES = {
    b"PK\x03\x04": f"it is a zip archive: {ARCHIVE}",
    b"\x1f\x8b": f"it is compressed with gzip: {ARCHIVE}",
    b"BZh": f"it is compressed with bzip2: {ARCHIVE}",
    b"\xfd7zXZ": f"it is compressed with xz: {ARCHIVE}",
    b"\x28\xb5\x2f\xfd": f"it is compressed with zstd: {ARCHIVE}",
    b"7z\xbc\xaf": f"it is a 7z archive: {ARCHIVE}",
    b"Rar!": f"it is a rar archive: {ARCHIVE}",
    b"\x0e\x03\x13\x01": "it is HDF4: convert it to NetCDF 4",
    b"CDF\x05": "it is NetCDF 3 with 64-bit data (CDF-5): convert it (nccopy -k nc4 IN OUT)",
    b"PAR1": "it is Parquet: give Zarr, NetCDF or GRIB",
    b"%PDF": "it is a PDF",
    b"\x00\x05\x16\x07": "it is a file that macOS left beside another one: leave it out",
}
TAR_PLACE = 257  # of the word "ustar" in a tar archive
BEGINNING_BYTES = 512  # that tell a file of every kind named here
ANSWERS = ("{", "[", "<")  # JSON, HTML, XML: what a server sends in place of a file
SHOWN = 60  # bytes of a file in a message


def has_zarr_metadata(folder: Path) -> bool:
    """Tell whether a folder is a Zarr store, or a group or an array in one."""
    return any((folder / name).is_file() for name in ZARR_METADATA)


def describe_point_list(shapes: Mapping[str, Sequence[int]]) -> str:
    """What a store is that anemoi-datasets has made, as the end of a message; "" for any other.

    shapes: {name of an array: its shape}. Such a store has one array of fields, [time, variable, ensemble, cell].
    """
    fields = shapes.get("data", ())
    points = [tuple(shapes.get(name, ())) for name in ("latitudes", "longitudes")]
    if len(fields) != 4 or any(shape != (fields[-1],) for shape in points):
        return ""
    return (
        f"it is a store of anemoi-datasets: one array, data {list(fields)}, in which variables are a dimension, on a "
        f"list of {fields[-1]} points, not on a grid: give the data that it was made of, or regrid them "
        "(earthkit-regrid) to latitudes and longitudes, a variable each"
    )


def describe_file(beginning: bytes) -> str:
    """What a file is, as the end of a message. beginning: its first BEGINNING_BYTES, or all of it if it has fewer."""
    if not beginning:
        return "it is empty: it was not written, or not downloaded to the end"
    # A signature says it best, then what looks like text.
    for start, what in SIGNATURES.items():
        if beginning.startswith(start):
            return what
    if beginning[TAR_PLACE:].startswith(b"ustar"):
        return f"it is a tar archive: {ARCHIVE}"
    has_bytes = any(beginning)
    if not has_bytes:
        return "it begins with zeros: it was not written, or not downloaded to the end"
    text = beginning[:SHOWN].decode(errors="replace")
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    shown = " ".join(printable.split())
    if shown.startswith(ANSWERS):
        return f"it is no data but the answer of a server, so look at it and download again; it begins with {shown}"
    return f"it begins with {shown}"
