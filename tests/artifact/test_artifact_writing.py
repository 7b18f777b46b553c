"""Flipped bits and cut files; saving that is killed, interrupted, out of space or not allowed."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.errors import ArtifactError
from lowering import load, lower_to_onnx, lower_to_trt
from lowering.artifact import writing as writing_module
from lowering.artifact.files import MANIFEST, read_manifest
from lowering.artifact.writing import writing

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        return self.head(F.relu(self.conv(x)).mean((2, 3))) + self.calls


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> dict[str, Path]:
    """One of each kind: sessions, engines with their network; both with state."""
    folder = tmp_path_factory.mktemp("artifacts")
    return {
        "onnx": lower_to_onnx(Net(), IMAGES, precision="fp32").save(folder / "onnx"),
        "engine": lower_to_trt(Net(), IMAGES, precision="fp32").save(folder / "engine"),
        "file": lower_to_onnx(Net(), IMAGES, precision="fp32", runtime="tensorrt").save(folder / "file"),
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_or_a_cut_anywhere_is_found(artifacts, tmp_path):
    """1,000 of them over every file of every kind of artifact: all are errors of ours, none is loaded."""
    draw, counts, tried = random.Random(0), {}, 0
    places = []
    for kind, source in artifacts.items():
        shutil.copytree(source, tmp_path / kind)
        places += [(kind, name) for name in sorted(contents(source))]
    while tried < 1000:
        kind, name = places[tried % len(places)]
        path = tmp_path / kind / name
        original = path.read_bytes()
        if tried // len(places) % 4 == 3:
            damaged = original[: draw.randrange(len(original))]
        else:
            at = draw.randrange(len(original) * 8)
            changed = original[at // 8] ^ 1 << at % 8
            damaged = original[: at // 8] + bytes([changed]) + original[at // 8 + 1 :]
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError):
            load(tmp_path / kind)
        path.write_bytes(original)
        tried += 1
        counts[kind, name] = counts.get((kind, name), 0) + 1
    assert {name for _, name in counts} >= {MANIFEST, "segment_0.onnx", "segment_0.engine", "state.safetensors",
                                            "segment_0.network.json", "report.json"}  # fmt: skip
    for kind in artifacts:  # and undamaged they load
        assert load(tmp_path / kind).segments


def test_every_bit_of_a_manifest_counts(artifacts, tmp_path):
    """Read alone, without the files, so that all can be tried."""
    text = (artifacts["onnx"] / MANIFEST).read_bytes()
    assert read_manifest(artifacts["onnx"])
    for at in range(0, len(text) * 8, 31):
        damaged = bytearray(text)
        damaged[at // 8] ^= 1 << at % 8
        (tmp_path / MANIFEST).write_bytes(damaged)
        with pytest.raises(ArtifactError):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(b'"format": 3', b'"format": 2'), r"format 2(?s:.*)save the lowered module again"),
        (lambda text: text.replace(b"\n", b"\r\n"), "SHA-256"),
        (lambda text: text + b"\n", "SHA-256"),
        (lambda text: text.replace(b'"sha256": "', b'"sha512": "'), "SHA-256"),
    ],
    ids=["before-digests", "line-ends", "more", "without"],
)
def test_a_manifest_that_was_rewritten(change, message, artifacts, tmp_path):
    shutil.copytree(artifacts["onnx"], tmp_path / "a")
    path = tmp_path / "a" / MANIFEST
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ArtifactError, match=message):
        load(tmp_path / "a")
    with writing(tmp_path / "a") as write:  # but it may be replaced
        write("x", lambda file: file.write_bytes(b"x"))
        write.finish({"format": 3})
    assert contents(tmp_path / "a").keys() == {"x", MANIFEST}


def test_a_manifest_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / MANIFEST)  # reading it would wait for ever
    with pytest.raises(ArtifactError, match="no plain file"):
        load(tmp_path)


def test_a_manifest_of_terabytes_is_not_read(tmp_path):
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArtifactError, match="too large"):
        load(tmp_path)


# -- saving that does not end -----------------------------------------------------------------------------------------

FILES = {"a": b"new a", "b": b"new b", "c": b"new c"}
MOVES = 7  # three old files away (the manifest, a, old), four new ones into place


def save(folder: Path, files: dict[str, bytes]) -> None:
    with writing(folder) as write:
        for name, data in files.items():
            write(name, lambda path, data=data: path.write_bytes(data))
        write.finish({"format": 3})


def state(folder: Path) -> dict[str, bytes] | None:
    """The files of the artifact in `folder`, or None if there is none."""
    try:
        return {name: (folder / name).read_bytes() for name in read_manifest(folder)["files"]}
    except ArtifactError:
        return None


@contextmanager
def at_move(number: int, then: Callable[[], None]) -> Iterator[list[str]]:
    """Do `then` in place of the move of that number."""
    moved: list[str] = []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        moved.append(Path(target).name)
        if len(moved) == number + 1:
            then()
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing_module.os, "replace", replace)
        yield moved


def _killed(work: Callable[[], None]) -> bool:
    """Run it in a copy of this process; whether that was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("number", [*range(MOVES), None])
def test_saving_that_is_killed_leaves_the_old_artifact_or_none(number, tmp_path):
    old = {"a": b"old a", "old": b"old"}
    save(tmp_path, old)

    def work() -> None:
        with at_move(MOVES if number is None else number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            save(tmp_path, FILES)

    assert _killed(work) == (number is not None)
    assert state(tmp_path) == (old if number == 0 else FILES if number is None else None)
    if number:
        with pytest.raises(ArtifactError, match="broken off: save again"):
            load(tmp_path)
    save(tmp_path, FILES)
    assert state(tmp_path) == FILES
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, MANIFEST}  # nothing of the killed one is left


def test_the_first_saving_that_is_killed_leaves_a_folder_that_can_be_saved_into(tmp_path):
    def work() -> None:
        with at_move(2, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            save(tmp_path, FILES)

    assert _killed(work)
    assert state(tmp_path) is None
    save(tmp_path, {"a": b"again"})
    assert {path.name for path in tmp_path.iterdir()} == {"a", MANIFEST}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("number", range(MOVES))
def test_saving_that_fails_leaves_the_old_artifact(number, kind, tmp_path):
    old = {"a": b"old a", "old": b"old"}
    save(tmp_path, old)

    def fail() -> None:
        raise kind(errno.EIO, "no more")

    with pytest.raises(ArtifactError if kind is OSError else KeyboardInterrupt), at_move(number, fail):
        save(tmp_path, FILES)
    assert state(tmp_path) == old
    assert {path.name for path in tmp_path.iterdir()} == {*old, MANIFEST}


def test_the_moves_are_counted_right(tmp_path):
    save(tmp_path, {"a": b"old a", "old": b"old"})
    with at_move(MOVES, lambda: None) as moved:
        save(tmp_path, FILES)
    assert moved == [MANIFEST, "a", "old", "a", "b", "c", MANIFEST]


def test_a_folder_in_the_place_of_a_file_stays(tmp_path):
    save(tmp_path, {"a": b"old a"})
    (tmp_path / "b").mkdir()
    with pytest.raises(ArtifactError, match="Is a directory"):
        save(tmp_path, FILES)
    assert state(tmp_path) == {"a": b"old a"}
    assert (tmp_path / "b").is_dir()


def test_two_that_save_at_once_do_not_remove_each_others_files(tmp_path):
    with writing(tmp_path) as first:
        first("a", lambda path: path.write_bytes(b"first"))
        save(tmp_path, {"b": b"second"})
        assert state(tmp_path) == {"b": b"second"}
        first.finish({"format": 3})
    assert state(tmp_path) == {"a": b"first"}


# -- no space, no permission ------------------------------------------------------------------------------------------


@contextmanager
def largest_file(count: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: what a full disk says, with another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("count", [0, 1000])
def test_a_full_disk_is_named_and_leaves_the_old_artifact(count, artifacts, tmp_path):
    for kind, lower in (("onnx", lower_to_onnx), ("engine", lower_to_trt)):
        lowered = lower(Net(), IMAGES, precision="fp32")
        shutil.copytree(artifacts["onnx"], tmp_path / kind)
        before = contents(tmp_path / kind)
        for folder in (tmp_path / kind, tmp_path / f"{kind} new"):
            with (
                pytest.raises(ArtifactError, match=r"cannot write to .*File too large(?s:.*)free some space"),
                largest_file(count),
            ):
                lowered.save(folder)
        assert contents(tmp_path / kind) == before
        assert list((tmp_path / f"{kind} new").iterdir()) == []


@contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions say nothing to root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_that_may_not_be_written_is_named(tmp_path):
    lowered = lower_to_onnx(Net(), IMAGES, precision="fp32")
    folder = tmp_path / "a"
    folder.mkdir(mode=0o555)
    for target in (folder, folder / "b"):
        with pytest.raises(ArtifactError, match=r"cannot write to .*Permission denied"), as_nobody():
            lowered.save(target)
    assert list(folder.iterdir()) == []


def test_files_that_may_not_be_read_are_named(artifacts, tmp_path):
    shutil.copytree(artifacts["onnx"], tmp_path / "a")
    for name in (MANIFEST, "segment_0.onnx"):
        path = tmp_path / "a" / name
        path.chmod(0)
        with pytest.raises(ArtifactError, match="Permission denied"), as_nobody():
            load(tmp_path / "a")
        path.chmod(0o644)
