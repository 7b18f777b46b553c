"""Writing an artifact: a reader sees the old one, the new one, or none, however the writing ends.

Everything is written under temporary names first, in a folder `.saving-*` beside the files. Then the old files move
there, the manifest first, which leaves no artifact; the new ones take their places, the manifest last. What fails in
between puts the old ones back. A process that is killed in between leaves files without a manifest, which the next save
replaces.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fx_passes.errors import ArtifactError
from lowering.artifact.files import MANIFEST, file_entry, manifest_text, names_of

__all__ = ["Writer", "writing"]

_SCRATCH = ".saving-"
_OLD = ".old"  # in the scratch folder: the files that are replaced; no file of an artifact begins with a dot


class Writer:
    """Writes files under temporary names; `finish` puts all of them in place, the manifest last."""

    def __init__(self, folder: Path, scratch: Path, before: set[str]):
        self._folder, self._scratch, self._before = folder, scratch, before
        self._files: dict[str, dict[str, Any]] = {}
        self._written: list[str] = []

    def __call__(self, name: str, writer: Callable[[Path], Any]) -> None:
        """Let `writer` write the file `name`."""
        path = self._scratch / name
        writer(path)
        self._files[name] = file_entry(path)
        self._written.append(name)

    def keep(self, files: dict[str, dict[str, Any]]) -> None:
        """Let files stay that are in the folder already, with what the manifest says of them."""
        self._files.update(files)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Put everything in place; files of an artifact that was there before, and that this one lacks, go."""
        (self._scratch / MANIFEST).write_bytes(manifest_text({**manifest, "files": self._files}))
        (self._scratch / _OLD).mkdir()
        stay = set(self._files) - set(self._written)
        try:
            for name in (MANIFEST, *sorted({*self._before, *self._written} - stay)):
                self._put_away(name)
            for name in (*self._written, MANIFEST):
                os.replace(self._scratch / name, self._folder / name)
        except BaseException:
            self._put_back()
            raise

    def _put_away(self, name: str) -> None:
        path = self._folder / name
        if path.is_dir() and not path.is_symlink():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if os.path.lexists(path):
            os.replace(path, self._scratch / _OLD / name)

    def _put_back(self) -> None:
        for name in (MANIFEST, *self._written):
            if not (self._scratch / name).exists():
                (self._folder / name).unlink(missing_ok=True)
        old = self._scratch / _OLD
        for path in sorted(old.iterdir(), key=lambda path: path.name == MANIFEST):
            os.replace(path, self._folder / path.name)


@contextmanager
def writing(folder: Path) -> Iterator[Writer]:
    """A `Writer` into `folder`, which is made if it is missing.

    Raises:
        ArtifactError: the folder cannot be written, or holds files and no manifest of this project.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = _replaceable(folder)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch, _claimed(scratch):
            for left in _left_behind(folder, Path(scratch)):
                shutil.rmtree(left, ignore_errors=True)
            yield Writer(folder, Path(scratch), before)
    except (OSError, SafetensorError) as error:
        what = error.strerror or error if isinstance(error, OSError) else error
        raise ArtifactError(
            f"cannot write to {folder}: {what}", hint="choose another folder, or free some space"
        ) from error


def _replaceable(folder: Path) -> set[str]:
    """The files of the artifact that is in `folder`, also of one whose replacement was broken off.

    Hidden files and folders do not count as files: no file of an artifact can be in their place.
    """
    if all(path.name.startswith(".") or path.is_dir() for path in folder.iterdir()):
        return set()
    manifests = [folder / MANIFEST]
    if not manifests[0].exists():
        manifests = [
            *folder.glob(f"{_SCRATCH}*/{_OLD}/{MANIFEST}"),
            *folder.glob(f"{_SCRATCH}*/{MANIFEST}"),
        ] or manifests
    try:
        return set().union(*map(names_of, manifests))
    except ArtifactError as error:
        raise ArtifactError(
            f"{folder} holds files and is no artifact that could be replaced: {error.what}",
            hint="choose an empty or a new folder",
        ) from error


@contextmanager
def _claimed(scratch: str) -> Iterator[None]:
    """Hold a lock on the folder, which ends with the process: so that others see whether its writer lives."""
    if os.name != "posix":
        yield
        return
    import fcntl

    descriptor = os.open(scratch, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: then others take the writer for alive
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _left_behind(folder: Path, own: Path) -> list[Path]:
    """Scratch folders of writers that were killed."""
    if os.name != "posix":
        return []
    import fcntl

    found = []
    for path in folder.glob(f"{_SCRATCH}*"):
        if path == own or not path.is_dir() or path.is_symlink():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(path)
        except OSError:  # its writer is at work
            continue
        finally:
            os.close(descriptor)
    return found
