"""Engines kept in a folder, so that the same network is built once: keyed by content, checked when read, bounded.

An entry is one file: a digest of all that follows, the length of a JSON record, the record (the layer report), the
engine. It is written under a temporary name and renamed, so there are no locks: of two writers of one entry the last
one stays, and a reader sees a whole file or none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lowering.files import TEMPORARY, replace_file
from lowering.trt.reference.records import NetworkRecord

__all__ = ["EngineCache", "engine_key", "network_digest"]

_log = logging.getLogger("lowering.tensorrt")
_FORMAT = b"fxtrt engine cache 1\n"
_DIGEST, _LENGTH = 32, 8
_SUFFIX = ".engine-cache"
_LONGEST_RECORD = 1 << 30
_ABANDONED_S = 3600  # a temporary file older than this was left by a writer that died


class EngineCache:
    """Engines in a folder.

    Args:
        folder: made when the first engine is kept.
        limit: bytes that the folder may hold; None: no limit. The engines that were not used for longest go first.

    What goes wrong with the folder (unreadable, full, damaged) is reported through `logging`, never raised: the engine
    is then built as if there were no cache.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | None):
        self.folder, self.limit = Path(folder).expanduser(), limit

    def get(self, key: str) -> tuple[bytes, dict[str, Any]] | None:
        """The engine kept under `key` and its record, or None; an entry that is damaged is removed."""
        path = self._path(key)
        try:
            with path.open("rb") as file:
                found = _unpack(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("the engine cache cannot be read: %s", error.strerror or error)
            return None
        if found is None:
            _log.warning("the cached engine %s is damaged; it is built again", path.name)
            _remove(path)
            return None
        try:
            os.utime(path)  # used now: the last to go
        except OSError as error:
            _log.info("the age of the cached engine %s cannot be set: %s", path.name, error.strerror or error)
        return found

    def put(self, key: str, data: bytes, record: Mapping[str, Any]) -> None:
        """Keep an engine and a JSON record under `key`, and make room for it."""
        text = json.dumps(record).encode()
        if self.limit is not None and len(data) + len(text) + _overhead() > self.limit:
            _log.info("an engine of %d bytes is larger than the whole engine cache may be", len(data))
            return
        length = len(text).to_bytes(_LENGTH, "little")
        digest = hashlib.sha256()
        for part in (length, text, data):
            digest.update(part)
        try:
            replace_file(self._path(key), _FORMAT, digest.digest(), length, text, data)
            self._make_room()
        except OSError as error:
            _log.warning("the engine cache cannot be written: %s", error.strerror or error)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _make_room(self) -> None:
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:  # another process has just removed it
                continue
            if path.name.endswith(_SUFFIX):
                entries.append((status.st_mtime, status.st_size, path))
            elif path.name.startswith(TEMPORARY) and time.time() - status.st_mtime > _ABANDONED_S:
                _remove(path)
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if self.limit is None or total <= self.limit:
                break
            _remove(path)
            total -= size


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s cannot be removed from the engine cache: %s", path.name, error.strerror or error)


def _overhead() -> int:
    return len(_FORMAT) + _DIGEST + _LENGTH


def _unpack(file: BinaryIO) -> tuple[bytes, dict[str, Any]] | None:
    """Engine and record of an entry, or None if it is not what was written; the engine is read once, not copied."""
    head = file.read(_overhead())
    start = len(_FORMAT)
    if head[:start] != _FORMAT or len(head) < _overhead():
        return None
    stated, length = head[start : start + _DIGEST], head[start + _DIGEST :]
    text = file.read(min(int.from_bytes(length, "little"), _LONGEST_RECORD))
    data = file.read()
    digest = hashlib.sha256()
    for part in (length, text, data):
        digest.update(part)
    return (data, json.loads(text)) if digest.digest() == stated else None


def engine_key(network: NetworkRecord, **build: Any) -> str:
    """A name for the engine that a build gives: equal for equal networks and builds.

    Args:
        network: the network as it is read back from its finished definition.
        build: what else the engine depends on: TensorRT flavour and version, GPU, capabilities, options, profiles.
    """
    text = json.dumps({"network": network_digest(network), **build}, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def network_digest(network: NetworkRecord) -> str:
    """SHA-256 of a network: its layers, attributes, names, metadata, and the values of its weights."""
    digest = hashlib.sha256()
    structure = {
        "name": network.name,
        "inputs": network.inputs,
        "outputs": network.outputs,
        "tensors": [vars(tensor) for tensor in network.tensors.values()],
        "layers": [vars(layer) for layer in network.layers],
    }
    digest.update(json.dumps(structure, sort_keys=True).encode())
    for name, value in network.weights.items():
        digest.update(f"{name} {value.dtype} {value.numel()}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
