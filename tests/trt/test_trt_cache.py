"""The engine cache: the second build is a read; damage, concurrent writers, bounds; the timing cache and its file."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from trt_checks import aten_program, lower

from lowering import lower_to_trt
from lowering.files import TEMPORARY, replace_file
from lowering.trt.builder import build, timing_cache
from lowering.trt.builder.build import BuildOptions, build_engine
from lowering.trt.builder.cache import EngineCache, engine_key, network_digest
from lowering.trt.define.network import build_network
from lowering.trt.reference import read_network

IMAGE = torch.randn(2, 3, 12, 12)
RECORD = {"kernels": 3}


def net(seed: int = 0, channels: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU())


@pytest.fixture
def options(tmp_path) -> BuildOptions:
    return BuildOptions(engine_cache=tmp_path / "engines")


@pytest.fixture
def builds(monkeypatch) -> list[str]:
    """Names of the networks that were really built."""
    seen: list[str] = []
    real = build._build

    def counted(network, *arguments):
        seen.append(network.name)
        return real(network, *arguments)

    monkeypatch.setattr(build, "_build", counted)
    return seen


# -- what is kept under what ----------------------------------------------------------------------------------------


def test_a_second_build_is_a_read_of_the_same_engine_and_report(options, builds) -> None:
    first = build_engine(lower(net(), IMAGE), settings=options)
    second = build_engine(lower(net(), IMAGE), settings=options)
    assert (first.cached, second.cached) == (False, True)
    assert builds == ["test"]
    assert second.data == first.data
    assert second.report == first.report
    assert second.target == first.target


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch, builds) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        build_engine(lower(net(), IMAGE))
    assert len(builds) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "other",
    [
        lambda options: build_engine(lower(net(seed=1), IMAGE), settings=options),
        lambda options: build_engine(lower(net(channels=5), IMAGE), settings=options),
        lambda options: build_engine(lower(net(), IMAGE), settings=replace(options, version_compatible=True)),
        lambda options: build_engine(lower(net(), IMAGE), settings=replace(options, workspace_bytes=1 << 30)),
        lambda options: build_engine(lower(net(), IMAGE), settings=options, compute_capabilities="8.9"),
        lambda options: build_engine(lower(net(), IMAGE), settings=options, report=False),
        lambda options: build_engine(build_network(aten_program(net(), IMAGE), name="other"), settings=options),
        lambda options: build_engine(lower(net(), IMAGE, dynamic={0: (1, 8)}), settings=options),
    ],
    ids=["weights", "layers", "option", "workspace", "capability", "report", "name", "profile"],
)
def test_anything_the_engine_depends_on_makes_another_entry(options, other) -> None:
    build_engine(lower(net(), IMAGE), settings=options)
    assert not other(options).cached
    assert len(list(Path(options.engine_cache).iterdir())) == 2


def test_another_tensorrt_version_makes_another_entry(options, monkeypatch) -> None:
    build_engine(lower(net(), IMAGE), settings=options)
    monkeypatch.setattr(build, "version", lambda: "1.8.0.1")
    assert not build_engine(lower(net(), IMAGE), settings=options).cached


def test_what_does_not_change_the_engine_does_not_change_the_key(options) -> None:
    build_engine(lower(net(), IMAGE), settings=options)
    changed = replace(options, progress=False, timing_cache="timings", engine_cache_bytes=None)
    assert build_engine(lower(net(), IMAGE), settings=changed).cached


def test_the_digest_is_of_the_content(tmp_path) -> None:
    first, second = (read_network(lower(net(), IMAGE).definition).record for _ in range(2))
    assert network_digest(first) == network_digest(second)
    changed = {key: value.clone() for key, value in second.weights.items()}
    next(iter(changed.values()))[0] += 1
    assert network_digest(replace(second, weights=changed)) != network_digest(first)
    assert engine_key(first, option=1) != engine_key(first, option=2)


def test_lowering_twice_builds_once_and_gives_the_same_artifact(tmp_path, builds) -> None:
    settings = {"engine_cache": tmp_path / "engines"}
    times, lowered = [], []
    for _ in range(2):
        start = time.perf_counter()
        lowered.append(lower_to_trt(net(), IMAGE, calibration=[IMAGE], settings=settings))
        times.append(time.perf_counter() - start)
    assert builds == ["segment_0"]
    assert lowered[0].report() == lowered[1].report()  # builds the float engine to compare with: once, too
    assert builds == ["segment_0"] * 2
    assert torch.equal(lowered[0].simulate(IMAGE), lowered[1].simulate(IMAGE))
    assert lowered[0].report()["settings"]["engine_cache"] is True  # no path in what is written
    print(f"first {times[0]:.2f} s, second {times[1]:.2f} s")


# -- damage ---------------------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage",
    [_cut, _flip, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"fxtrt engine cache 0\n" * 9)],
    ids=["truncated", "flipped", "empty", "other-format"],
)
def test_a_damaged_entry_is_built_again_and_said(options, damage, caplog) -> None:
    first = build_engine(lower(net(), IMAGE), settings=options)
    (entry,) = Path(options.engine_cache).iterdir()
    damage(entry)
    with caplog.at_level(logging.WARNING, logger="lowering.tensorrt"):
        again = build_engine(lower(net(), IMAGE), settings=options)
    assert not again.cached
    assert again.data == first.data
    assert "is damaged; it is built again" in caplog.text
    assert build_engine(lower(net(), IMAGE), settings=options).cached


def test_a_folder_that_cannot_be_used_is_said_and_the_engine_is_built(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    engine = build_engine(lower(net(), IMAGE), settings=BuildOptions(engine_cache=tmp_path / "file"))
    assert engine.data
    assert "cannot be" in caplog.text


# -- several writers ------------------------------------------------------------------------------------------------


def _write(folder: Path) -> None:
    cache = EngineCache(folder, 400_000)
    for i in range(150):
        key, data = str(i % 5), bytes([i % 5]) * 50_000
        found = cache.get(key)
        assert found is None or found == (data, {"i": i % 5}), key
        cache.put(key, data, {"i": i % 5})


def _watched(folder: Path) -> None:
    """A damaged entry is only logged: here it fails the process."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("lowering.tensorrt").addHandler(Handler())
    _write(folder)
    assert not said, said


def test_two_processes_at_once_see_whole_entries_only(tmp_path) -> None:
    processes = multiprocessing.get_context("fork")  # everything is imported already
    writers = [processes.Process(target=_watched, args=(tmp_path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    cache = EngineCache(tmp_path, None)
    assert [cache.get(str(i)) == (bytes([i]) * 50_000, {"i": i}) for i in range(5)] == [True] * 5
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(TEMPORARY)]


def test_a_write_that_fails_leaves_nothing(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_file(tmp_path / "folder", b"x")  # a folder stands where the file should be
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# -- bounds ---------------------------------------------------------------------------------------------------------


def _aged(cache: EngineCache, key: str, age: float) -> None:
    path = cache._path(key)
    os.utime(path, (time.time() - age,) * 2)


def test_the_engines_not_used_for_longest_go_first(tmp_path) -> None:
    cache = EngineCache(tmp_path, 3500)
    for age, key in enumerate("cba"):
        cache.put(key, bytes(1000), RECORD)
        _aged(cache, key, 100 * (age + 1))
    assert cache.get("a") == (bytes(1000), RECORD)  # used now: "b" is the oldest
    cache.put("d", bytes(1000), RECORD)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "c", "d"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3500


def test_an_engine_above_the_bound_is_not_kept_and_drives_nothing_out(tmp_path) -> None:
    cache = EngineCache(tmp_path, 2000)
    cache.put("small", bytes(100), RECORD)
    cache.put("large", bytes(5000), RECORD)
    assert cache.get("large") is None
    assert cache.get("small") is not None


def test_no_bound_and_foreign_files_stay(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    stale, fresh = tmp_path / f"{TEMPORARY}1", tmp_path / f"{TEMPORARY}2"
    for path in (stale, fresh):
        path.write_bytes(bytes(10))
    os.utime(stale, (time.time() - 7200,) * 2)
    cache = EngineCache(tmp_path, None)
    for key in "abc":
        cache.put(key, bytes(10_000), RECORD)
    assert {path.name for path in tmp_path.iterdir()} >= {"notes.txt", fresh.name}
    assert not stale.exists()  # left by a writer that died
    assert all(cache.get(key) for key in "abc")


# -- timing cache ---------------------------------------------------------------------------------------------------


class FakeTimings:
    """An `ITimingCache`: a set of names as bytes, "bad" being of another GPU."""

    def __init__(self, data: bytes):
        self.data = data

    def combine(self, other: FakeTimings, ignore_mismatch: bool) -> bool:
        assert ignore_mismatch is False
        self.data = b" ".join(sorted({*self.data.split(), *other.data.split()}))
        return True

    def serialize(self) -> bytes:
        return self.data


class FakeConfig:
    def __init__(self) -> None:
        self.timings: FakeTimings | None = None

    def create_timing_cache(self, data: bytes) -> FakeTimings | None:
        return FakeTimings(data)

    def set_timing_cache(self, cache: FakeTimings, ignore_mismatch: bool) -> bool:
        assert ignore_mismatch is False
        if cache.data == b"bad":
            return False
        self.timings = cache
        return True

    def get_timing_cache(self) -> FakeTimings | None:
        return self.timings


def test_timings_are_read_added_to_and_written(tmp_path) -> None:
    path, config = tmp_path / "sub" / "timings", FakeConfig()
    timing_cache.use_timings(config, path)
    assert config.timings is not None
    config.timings.data = b"conv"
    timing_cache.keep_timings(config, path)
    again = FakeConfig()
    timing_cache.use_timings(again, path)
    assert again.timings is not None and again.timings.data == b"conv"
    again.timings.data = b"conv gemm"
    path.write_bytes(b"pool")  # another process has written meanwhile
    timing_cache.keep_timings(again, path)
    assert path.read_bytes() == b"conv gemm pool"


def test_timings_of_another_gpu_are_begun_anew_and_said(tmp_path, caplog) -> None:
    path, config = tmp_path / "timings", FakeConfig()
    path.write_bytes(b"bad")
    timing_cache.use_timings(config, path)
    assert config.timings is not None and config.timings.data == b""
    assert "begun anew" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # RTX calls its timing cache deprecated: it does nothing
def test_the_way_of_tensorrt_proper_on_real_bindings(tmp_path, monkeypatch, capfd, caplog) -> None:
    """TensorRT-RTX has the same calls, so that everything but the measuring itself runs here."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    path, network = tmp_path / "timings", lower(net(), IMAGE)
    network.flavour = "tensorrt"
    options = BuildOptions(timing_cache=path, hardware_compatible=True)
    engine = build_engine(network, settings=options, report=False)
    assert (engine.target.compute_capabilities, engine.target.gpu) == (("8.0",), "NVIDIA A100")
    assert engine.target.hardware_compatible
    assert path.stat().st_size > 0
    path.write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING, logger="lowering.tensorrt"):
        assert build_engine(network, settings=options, report=False).data == engine.data
    assert "timings is begun anew" in caplog.text
    assert path.read_bytes() != b"damaged"
    assert capfd.readouterr().err == ""


def test_rtx_says_that_it_uses_no_timing_cache(tmp_path, caplog) -> None:
    path = tmp_path / "timings"
    assert build_engine(lower(net(), IMAGE), settings=BuildOptions(timing_cache=path), report=False).data
    assert "timing_cache is not used" in caplog.text
    assert not path.exists()
