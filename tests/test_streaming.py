"""Data that lie elsewhere are trained on as files are; what was read stays on the node; a lost line costs no work."""

import json
import logging
import pickle
import shutil
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import h5py
import numpy as np
import pytest

from tests.support import era5_examples, programs
from tests.support.launch import losses, summary
from tests.support.marks import slow_but, slow_rows_but
from tests.support.refusals import refusal
from tests.support.web_server import BAD_ANSWERS, serving
from tests.test_data_loader import CPU, read_all
from tests.test_data_loader_dali import assert_same_batches, needs_dali
from tests.test_zarr_years import FRAME
from training.tasks import build_task
from utils.errors import STOPPED_STATUS, ConnectionLostError
from weather import year_files
from weather.sources import remote_store
from weather.sources.chunk_sources import Place
from weather.sources.remote_store import RemoteOptions
from weather.years.dataset import FieldDataset
from weather.years.year_reader import data_path, year_paths

zarr = pytest.importorskip("zarr", reason="pip install -r requirements/era5.txt")
numcodecs = pytest.importorskip("numcodecs", reason="pip install -r requirements/era5.txt")
fsspec = pytest.importorskip("fsspec", reason="pip install -r requirements/era5.txt")
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
QUICKLY = RemoteOptions(retry_seconds=1)


@pytest.fixture(scope="session")
def stored(sample_folder, tmp_path_factory):
    """The folder of a store that holds the sample data of all years, all.zarr."""
    folder = tmp_path_factory.mktemp("elsewhere")
    paths = [sample_folder / "train/1979.h5", sample_folder / "train/1980.h5", sample_folder / "valid/1981.h5"]
    arrays = {}
    for path in paths:
        with h5py.File(path, locking=False) as file:
            for name, array in file.items():
                values = array.asstr()[:].astype("U8") if array.dtype.kind == "O" else array[:]
                arrays.setdefault(name, []).append(values)
    group = zarr.open_group(folder / "all.zarr", mode="w")
    for name, parts in arrays.items():
        joined = np.concatenate(parts) if name in ("fields", "time") else parts[0]
        group.create_array(name, data=joined, chunks=FRAME if name == "fields" else "auto")
    group["time"].attrs["units"] = "hours since 1970-01-01"
    return folder


@pytest.fixture
def server(stored):
    with serving(stored) as server:
        yield server


@pytest.fixture(params=["memory", "http", "here"])
def address(request, stored):
    """The store in memory, behind a web server, on disk."""
    if request.param == "here":
        yield str(stored / "all.zarr")
    elif request.param == "http":
        with serving(stored) as server:
            yield f"{server.address}/all.zarr"
    else:
        files = fsspec.filesystem("memory")
        files.put(str(stored / "all.zarr"), "/streamed/all.zarr", recursive=True)
        yield "memory://streamed/all.zarr"
        files.rm("/streamed", recursive=True)


@pytest.mark.parametrize("window", [{}, {"rows": slice(1, 7), "columns": slice(5, 30)}])
def test_the_years_of_a_store_are_those_of_year_files(address, sample_folder, window):
    ours = FieldDataset(f"{address}#1979-1980", 18, (16, 32), **window)
    theirs = FieldDataset(sample_folder / "train", 18, (16, 32), **window)
    np.testing.assert_array_equal(read_all(ours), read_all(theirs))
    assert not ours.description.difference(theirs.description)
    for own_dates, their_dates in zip(ours.times, theirs.times, strict=True):
        np.testing.assert_array_equal(own_dates, their_dates)
    orography = [dataset.files[0].constant_field("orography") for dataset in (ours, theirs)]
    np.testing.assert_array_equal(*orography)
    assert list(ours.listing()) == ["all.zarr#1979-1980/all.zarr#1979", "all.zarr#1979-1980/all.zarr#1980"]
    assert len(FieldDataset(address, 18, (16, 32))) == 57  # as one year, whose dates have two gaps
    again = pickle.loads(pickle.dumps(ours))
    again.open()
    np.testing.assert_array_equal(read_all(again), read_all(theirs))


def test_statistics_of_the_years_of_a_store_are_those_of_year_files(address, sample_folder, tmp_path):
    year_files.main([f"{address}#1979,1980", str(tmp_path / "stats"), "--cache_to", str(tmp_path / "cache")])
    for path in (sample_folder / "stats").glob("*.npy"):
        np.testing.assert_array_equal(np.load(tmp_path / "stats" / path.name), np.load(path))


@pytest.mark.parametrize("years", ["", "#1979-1980"])
def test_what_a_store_says_of_missing_values_is_said_of_each_of_its_years(stored, tmp_path, years):
    store = tmp_path / "all.zarr"
    shutil.copytree(stored / "all.zarr", store)
    zarr.open_group(store)["fields"].attrs["valid_max"] = 200_000
    with refusal("z50.* outside -inf to 200000: by the valid range of fields it is missing"):
        year_files.main([f"{store}{years}", str(tmp_path / "stats")])


@pytest.mark.parametrize(("path", "problem"), [
    ("#1990", "all.zarr#1990: no frame of 1990: it has 1979-01-01T00:00:00 to 1981-01-05T18:00:00"),
    ("#all", "all.zarr#all: years 'all': write 1979, 1979-1982 or 1979,1981-1983"),
    ("#", "all.zarr#: years '': write"),
])  # fmt: skip
def test_years_that_a_store_does_not_have_are_refused(address, path, problem):
    with refusal(problem.replace("(", r"\(")):
        FieldDataset(address + path, 20, (16, 32))


def test_an_address_keeps_its_slashes_and_a_folder_its_number_sign(tmp_path):
    (tmp_path / "run#1979").mkdir()
    assert data_path(str(tmp_path / "run#1979")) == tmp_path / "run#1979"
    path = data_path("gs://bucket/era5.zarr/#1979-1981,1990")
    assert str(path) == "gs://bucket/era5.zarr/#1979-1981,1990"
    assert [str(year) for year in year_paths(path)][-1] == "gs://bucket/era5.zarr#1990"


@pytest.mark.parametrize("protocol", ["gs", "s3"])
def test_public_buckets_are_opened_without_an_account_and_others_with_it(protocol, monkeypatch):
    opened = []
    monkeypatch.setattr(fsspec, "url_to_fs", lambda address, **options: (opened.append(options), (None, address))[1])
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    remote_store.RemoteObjects(f"{protocol}://bucket/era5.zarr", QUICKLY)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "key.json")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    remote_store.RemoteObjects(f"{protocol}://bucket/era5.zarr", QUICKLY)
    assert opened == [{"gs": {"token": "anon"}, "s3": {"anon": True}}[protocol], {}]


def test_a_library_that_is_missing_is_named_with_its_remedy():
    with refusal("pip install -r requirements/era5.txt", "oss://bucket/all.zarr"):
        FieldDataset("oss://bucket/all.zarr", 20, (16, 32))
    with refusal("cannot be opened: Protocol not known: nowhere", "nowhere://all.zarr"):
        FieldDataset("nowhere://all.zarr", 20, (16, 32))


def test_a_chunk_is_fetched_once_for_all_processes_of_a_node(server, tmp_path):
    options = RemoteOptions(str(tmp_path / "cache"), 1)
    for _ in range(2):
        dataset = FieldDataset(f"{server.address}/all.zarr#1979-1980", 20, (16, 32), remote=options)
        read_all(dataset)
    assert sorted(server.asked) == sorted(f"/all.zarr/fields/c/{frame}/0/0/0" for frame in range(40))


def test_a_damaged_file_of_the_cache_is_fetched_again(server, sample_folder, tmp_path):
    options = RemoteOptions(str(tmp_path / "cache"), 1)
    theirs = read_all(FieldDataset(sample_folder / "train", 20, (16, 32)))
    for damage in (lambda data: data[:-9], lambda data: data[:-1] + b"?", lambda data: b"", lambda data: data[:9]):
        ours = FieldDataset(f"{server.address}/all.zarr#1979-1980", 20, (16, 32), remote=options)
        np.testing.assert_array_equal(read_all(ours), theirs)
        for path in (tmp_path / "cache").glob("??/*"):
            path.write_bytes(damage(path.read_bytes()))
    assert len(server.asked) == 4 * 40


def test_missing_chunks_are_counted_at_the_start_or_named_when_they_are_read(stored, tmp_path):
    shutil.copytree(stored / "all.zarr", tmp_path / "all.zarr")
    shutil.rmtree(tmp_path / "all.zarr/fields/c/7")
    files = fsspec.filesystem("memory")
    files.put(str(tmp_path / "all.zarr"), "/broken/all.zarr", recursive=True)
    with refusal("memory://broken/all.zarr: 1 chunks of 'fields' were never written"):
        FieldDataset("memory://broken/all.zarr#1979", 20, (16, 32))
    files.rm("/broken", recursive=True)
    with serving(tmp_path) as server:
        dataset = FieldDataset(f"{server.address}/all.zarr#1979", 20, (16, 32))
        with refusal("all.zarr: chunk 7.0.0.0 of 'fields' was never written: the store was not finished"):
            read_all(dataset)


def test_a_server_that_refuses_is_named_at_once(server):
    dataset = FieldDataset(f"{server.address}/all.zarr#1979", 20, (16, 32))
    server.status = {"fields/c/3/": 403}
    with refusal(r"all.zarr: no access to fields/c/3/0/0/0 \(403\): is the address right, and the store public"):
        read_all(dataset)
    server.status = {"zarr.json": 403}
    with refusal(r"all.zarr: no access to zarr.json \(403\)"):
        FieldDataset(f"{server.address}/all.zarr", 20, (16, 32))
    server.status = {}
    with refusal("none.zarr: Zarr cannot be read"):
        FieldDataset(f"{server.address}/none.zarr", 20, (16, 32))


@pytest.mark.parametrize("status", [None, 429, 503])
def test_a_server_that_fails_for_a_moment_is_asked_again(server, sample_folder, caplog, status):
    dataset = FieldDataset(f"{server.address}/all.zarr#1979-1980", 20, (16, 32))
    # More than the client asks again by itself: once for each connection that it had kept.
    server.dead, server.naps, server.last_words = True, 6, status
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(read_all(dataset), read_all(FieldDataset(sample_folder / "train", 20, (16, 32))))
    assert "does not answer" in caplog.messages[0] and "answers again" in caplog.messages[1]
    assert len(caplog.messages) == 2


def test_an_attempt_that_fails_after_the_server_lives_again_is_no_new_outage(monkeypatch, caplog):
    objects = remote_store.RemoteObjects("memory://all.zarr", RemoteOptions(retry_seconds=60))
    attempts = {"late": 0, "early": 0}
    has_begun, lives_again = threading.Event(), threading.Event()

    def fetch_once(place):
        attempts[place.key] += 1
        if attempts[place.key] > 1:
            return b"data"
        # The late attempt begins first, in the outage, and fails when another one was answered already.
        if place.key == "late":
            has_begun.set()
            lives_again.wait()
        raise ConnectionError("no line")

    monkeypatch.setattr(objects, "_fetch_once", fetch_once)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as pool:
        late = pool.submit(objects.fetch, Place("late"))
        has_begun.wait()
        objects.fetch(Place("early"))
        lives_again.set()
        assert late.result() == b"data"
    assert ["does not answer" in message for message in caplog.messages] == [True, False]


def test_a_server_that_fails_for_good_is_lost_by_the_name_of_the_chunk(server):
    dataset = FieldDataset(f"{server.address}/all.zarr#1979-1980", 20, (16, 32), remote=QUICKLY)
    server.status = {"/fields/c/": 503}
    with pytest.raises(ConnectionLostError, match="all.zarr: lost at fields/c/0/0/0/0: no answer for 1 s .*repeat the"):
        read_all(dataset)


def test_an_answer_that_never_comes_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(remote_store, "LONGEST_ANSWER", 0.2)
    dataset = FieldDataset(f"{server.address}/all.zarr#1979-1980", 20, (16, 32), remote=QUICKLY)
    with server.lock, pytest.raises(ConnectionLostError):
        read_all(dataset)


STORED = {
    "as it is": {"compressors": None},
    "blosc": {"compressors": zarr.codecs.BloscCodec()},
    "shards without checksum": {"shards": (8, 20, 16, 32), "compressors": None},
    "by zarr": {"filters": [zarr.codecs.TransposeCodec(order=(0, 1, 3, 2))]},
    "by zarr, format 2": {"zarr_format": 2, "filters": [numcodecs.Delta("f4")], "compressors": None},
    "shards by zarr": {"shards": (8, 20, 16, 32), "filters": [zarr.codecs.TransposeCodec(order=(0, 1, 3, 2))]},
}


@pytest.fixture(scope="session")
def stored_in_all_ways(sample_folder, tmp_path_factory):
    """A folder with a store of a year for each of STORED, and one in the names of others."""
    folder = tmp_path_factory.mktemp("answers")
    with h5py.File(sample_folder / "train/1979.h5", locking=False) as file:
        fields, time, names = file["fields"][:], file["time"][:], file["channel"].asstr()[:].astype("U8")
    for name, options in STORED.items():
        options = dict(options)
        version = options.pop("zarr_format", 3)
        group = zarr.open_group(folder / name, mode="w", zarr_format=version)
        array = group.create_array("fields", shape=fields.shape, dtype="f4", chunks=FRAME, **options)
        array[:] = fields
        group.create_array("channel", data=names)
        group.create_array("time", data=time).attrs["units"] = "hours since 1970-01-01"
    forget_checksum(folder / "shards without checksum/fields")
    era5_examples.save_zarr(era5_examples.build(True, hours=3), folder / "others")
    return folder


def forget_checksum(array):
    """Write the shards of an array anew, with an index that has no checksum."""
    document = json.loads((array / "zarr.json").read_text())
    document["codecs"][0]["configuration"]["index_codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    values = zarr.open_array(array)[:]
    (array / "zarr.json").write_text(json.dumps(document))
    zarr.open_array(array, mode="r+")[:] = values


@pytest.mark.parametrize("way", [*STORED, "others"])
def test_a_bad_answer_is_asked_for_again_and_never_kept(stored_in_all_ways, tmp_path, monkeypatch, way):
    """Of metadata, coordinates and fields, whoever decodes them."""
    monkeypatch.setattr(remote_store, "FIRST_PAUSE", 0.001)
    size = (8, 16) if way == "others" else (16, 32)
    year = "#1979" if way == "others" else ""
    expected = read_all(FieldDataset(f"{stored_in_all_ways / way}{year}", 20, size))
    options = RemoteOptions(str(tmp_path / "cache"), 1)
    with serving(stored_in_all_ways) as server:
        server.bad = list(BAD_ANSWERS)
        address = f"{server.address}/{urllib.parse.quote(way)}{year}"
        np.testing.assert_array_equal(read_all(FieldDataset(address, 20, size, remote=options)), expected)
        assert server.answered_badly
        asked = len(server.asked)
        np.testing.assert_array_equal(read_all(FieldDataset(address, 20, size, remote=options)), expected)
        assert len(server.asked) == asked, "all of it is in the cache"


def test_bad_answers_for_good_are_a_lost_line_that_names_the_chunk_and_both_lengths(stored_in_all_ways, tmp_path):
    options = RemoteOptions(str(tmp_path / "cache"), 1, retry_seconds=1)
    with serving(stored_in_all_ways) as server:
        address = f"{server.address}/as%20it%20is"
        dataset = FieldDataset(address, 20, (16, 32), remote=options)
        server.bad = ["page"] * 1000
        lost, what = r": no good answer for 1 s \(bad answer: ", "has 40 bytes, which are no chunk of 40960: "
        with pytest.raises(ConnectionLostError, match=f"lost at fields/c/0/0/0/0{lost}chunk 0.0.0.0 .*{what}.*sign in"):
            read_all(dataset)
        with pytest.raises(ConnectionLostError, match=f"lost at .*zarr.json{lost}.*sign in.*; repeat the command"):
            FieldDataset(address, 20, (16, 32), remote=options)
        server.bad = ()
        read_all(dataset)


def test_a_page_that_is_in_the_cache_is_fetched_again(server, sample_folder, tmp_path):
    options = RemoteOptions(str(tmp_path / "cache"), 1)
    dataset = FieldDataset(f"{server.address}/all.zarr#1979-1980", 20, (16, 32), remote=options)
    objects = dataset.files[0].chunks.source
    for frame in range(40):
        objects.cache.put(f"{server.address}/all.zarr/fields/c/{frame}/0/0/0 0 None", b"<html>")
    theirs = FieldDataset(sample_folder / "train", 20, (16, 32))
    np.testing.assert_array_equal(read_all(dataset), read_all(theirs))
    assert len(server.asked) == 40


def test_shards_are_read_from_a_server_that_knows_no_ranges(sample_folder, tmp_path):
    with h5py.File(sample_folder / "train/1979.h5", locking=False) as file:
        fields = file["fields"][:]
    group = zarr.open_group(tmp_path / "1979.zarr", mode="w")
    group.create_array("fields", data=fields, chunks=(1, 10, 16, 32), shards=(8, 20, 16, 32))
    with serving(tmp_path) as server:
        ours = FieldDataset(f"{server.address}/1979.zarr", 20, (16, 32))
        theirs = FieldDataset(sample_folder / "train", 20, (16, 32), limit=19)
        np.testing.assert_array_equal(read_all(ours), read_all(theirs))


PLACES = [(wb2, place) for wb2 in (False, True) for place in ("memory", "http", "here")]


@pytest.mark.parametrize(
    ("wb2", "place"), slow_rows_but([0, 2, 4], PLACES, "either kind of store in every place"), ids=str
)
def test_stores_in_the_names_of_others_are_read_as_the_converter_writes_them(tmp_path, place, wb2):
    data = era5_examples.build(wb2, hours=3)
    era5_examples.save_zarr(data, tmp_path / "era5.zarr")
    expected = np.concatenate([era5_examples.TRUTH[1979], era5_examples.TRUTH[1980]])
    files = fsspec.filesystem("memory")
    with serving(tmp_path) as server:
        address = str(tmp_path / "era5.zarr")
        if place == "http":
            address = f"{server.address}/era5.zarr"
        if place == "memory":
            files.put(address, "/others/era5.zarr", recursive=True)
            address = "memory://others/era5.zarr"
        dataset = FieldDataset(f"{address}#1979-1980", 20, (8, 16), remote=RemoteOptions(str(tmp_path / "cache")))
        pairs = read_all(dataset)
        asked = len(server.asked)
        read_all(dataset)
        assert len(server.asked) == asked
        assert dataset.description.names[14] == "z500" and dataset.description.grid.latitude[0] == 90
        frames = np.concatenate([year.frames(0, year.shape[0]) for year in dataset.files])
    if place == "memory":
        files.rm("/others", recursive=True)
    np.testing.assert_allclose(frames, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(pairs[:7, 0], frames[:7, :, :8])
    np.testing.assert_array_equal(pairs[:7, 1], frames[1:8, :, :8])


def test_a_chunk_of_others_that_was_never_written_is_named(tmp_path):
    data = era5_examples.build(True)
    era5_examples.save_zarr(data, tmp_path / "era5.zarr")
    name = "10m_u_component_of_wind"
    (chunk,) = [path for path in (tmp_path / "era5.zarr" / name).iterdir() if path.name == "0.0.0"]
    chunk.unlink()
    with serving(tmp_path) as server:
        dataset = FieldDataset(f"{server.address}/era5.zarr#1979", 20, (8, 16))
        with refusal(f"chunk 0.0.0 of '{name}' was never written: the store was not finished"):
            read_all(dataset)


def streamed(server, **more):
    """The config keys of a run over a store behind a server; the data are not looked at before, which would ask too."""
    keys = {"check_data": "off", "train_data_path": f"{server.address}/all.zarr#1979-1980", "num_data_workers": 2}
    return keys | {"valid_data_path": f"{server.address}/all.zarr#1981", "retry_seconds": 60} | more


SHARD = ["train_shard.py", "--yaml_config=config/ViT.yaml", "--domain_parallel=1x2"]


@pytest.mark.slow("whole runs over a server, without a fault")
def test_runs_over_a_server_have_the_losses_of_year_files_bit_for_bit(server, tiny_options, tmp_path):
    cached = {"cache_to": tmp_path / "cache", "cache_gib": 1}
    runs = {"files": {"num_data_workers": 2}, "plain": streamed(server), "first": streamed(server, **cached)}
    runs["second"] = streamed(server, **cached)
    asked = {}
    for name, keys in runs.items():
        before = len(server.asked)
        assert programs.run(["train.py", *tiny_options(run_num=name, **keys)]).returncode == 0
        asked[name] = len(server.asked) - before
        assert losses(tmp_path, name) == losses(tmp_path, "files"), name
    assert asked["plain"] > asked["first"] == 60 and asked["second"] == asked["files"] == 0
    for name, keys in ("shard files", runs["files"]), ("shard", runs["plain"]), ("shard cached", runs["second"]):
        for status, output in programs.run_ranks([*SHARD, *tiny_options(run_num=name, **keys)]):
            assert status == 0, output
        assert losses(tmp_path, name) == losses(tmp_path, "shard files"), name


LAYOUTS = {
    "one": (["train.py"], 1),
    "data parallel": (["train.py"], 2),
    "domain parallel": (SHARD, 2),
    "tensor parallel": (["train_mp.py", "--yaml_config=config/ViT.yaml", "--tensor_parallel=2"], 2),
}
BY_LAYOUT = slow_but(["one"], LAYOUTS, "ranks that read their own samples, and ranks that get them from another")


def run_all(words, ranks):
    if ranks > 1:
        return programs.run_ranks(words, ranks)
    ended = programs.run(words)
    return [(ended.returncode, ended.stdout + ended.stderr)]


@pytest.mark.parametrize("layout", BY_LAYOUT)
def test_a_lost_line_ends_a_run_as_a_signal_does_and_the_command_resumes_it(server, tiny_options, tmp_path, layout):
    script, ranks = LAYOUTS[layout]
    keys = streamed(server, num_iters=16, checkpoint_every=1000)
    whole = [*script, *tiny_options(run_num="whole", **keys)]
    broken = [*script, *tiny_options(run_num="broken", **keys)]
    impatient = [*broken, "--retry_seconds=2"]
    for status, output in run_all(whole, ranks):
        assert status == 0, output
    server.asked.clear()
    server.dies_after = 60
    ended = run_all(impatient, ranks)
    assert [status for status, _ in ended] == [STOPPED_STATUS] * ranks, ended
    log = (tmp_path / "logs/quick/broken/out.log").read_text()
    assert "all.zarr: lost at fields/c/" in log and "; repeat the command to resume" in log
    assert "Traceback" not in log + "".join(output for _, output in ended)
    (saved,) = (tmp_path / "logs/quick/broken/checkpoints").glob("iter-*")
    assert 0 < int(saved.name[5:]) < 16
    server.dead = False
    for status, output in run_all(broken, ranks):
        assert status == 0, output
    assert losses(tmp_path, "broken") == losses(tmp_path, "whole")


@pytest.mark.slow("forecasts over a server")
def test_forecasts_start_from_a_store_that_is_elsewhere(server, tiny_options, tmp_path):
    assert programs.run(["train.py", *tiny_options(run_num="run", num_iters=2)]).returncode == 0
    scores = []
    for out, more in ("files", []), ("streamed", [f"--inf_data_path={server.address}/all.zarr#1981"]):
        split = "test" if more else "valid"
        words = ["--run_folder", tmp_path / "logs/quick/run", "--split", split, "--skill_only", "--lead_hours=24"]
        ended = programs.run(["forecast.py", *words, "--out", tmp_path / out, *more])
        assert ended.returncode == 0, ended.stderr
        scores.append(json.loads((tmp_path / out / "skill.json").read_text()))
    assert scores[0]["rmse"] == scores[1]["rmse"]
    server.dead = True
    ended = programs.run(["forecast.py", *words, "--out", tmp_path / "lost", *more, "--retry_seconds=1"])
    assert ended.returncode == STOPPED_STATUS and "\nerror: http://127.0.0.1" in ended.stderr, ended.stderr


@pytest.mark.slow("processes of DALI")
@needs_dali
@pytest.mark.timeout(200)
def test_the_processes_of_dali_read_elsewhere_and_say_where_the_line_was_lost(server, tiny_config, tmp_path):
    kinds = {"data_loader_config": "dali", "num_data_workers": 1, "cache_to": str(tmp_path / "cache")}, {}
    configs = [tiny_config(**streamed(server, retry_seconds=1) | kind) for kind in kinds]
    loaders = [build_task(config).build_loaders(CPU)[0] for config in configs]
    with closing(loaders[0]), closing(loaders[1]):
        assert_same_batches(*(loader.train(seed=1, start=2, stop=6) for loader in loaders))
        server.dead = True
        with pytest.raises(ConnectionLostError, match="all.zarr: lost at "):
            list(loaders[0].train(seed=1, start=0, stop=20))


@pytest.mark.slow("a line that is lost in a validation")
def test_a_line_lost_in_validation_costs_no_score(server, tiny_options, tmp_path):
    keys = streamed(server, num_iters=10, num_data_workers=0)
    assert programs.run(["train.py", *tiny_options(run_num="whole", **keys)]).returncode == 0
    server.status = {"/fields/c/45": 503}  # of the validation year
    ended = programs.run(["train.py", *tiny_options(run_num="broken", **keys)])
    assert ended.returncode == STOPPED_STATUS, ended.stderr
    assert not (tmp_path / "logs/quick/broken/summary.json").exists()
    server.status = {}
    assert programs.run(["train.py", *tiny_options(run_num="broken", **keys)]).returncode == 0
    scores = [summary(tmp_path, name)["best_val_loss"] for name in ("whole", "broken")]
    assert scores[0] == scores[1] and losses(tmp_path, "broken") == losses(tmp_path, "whole")


def test_a_server_that_comes_back_is_waited_for(server, tiny_options, tmp_path):
    # More than the client asks again by itself: once for each connection that it had kept.
    server.dies_after, server.naps = 30, 8
    keys = streamed(server, retry_seconds=30)
    ended = programs.run(["train.py", *tiny_options(run_num="napped", **keys)])
    assert ended.returncode == 0, ended.stderr
    log = (tmp_path / "logs/quick/napped/out.log").read_text()
    assert log.count("does not answer") == log.count("answers again") == 1


def test_a_server_that_is_not_there_ends_all_ranks_alike(tiny_options, server):
    keys = streamed(server, retry_seconds=2)
    server.dead = True
    for status, output in programs.run_ranks(["train.py", *tiny_options(**keys)]):
        assert status == STOPPED_STATUS and "Traceback" not in output, output
