"""The file in which TensorRT's builder keeps how fast it found each tactic, so that a second build measures less.

TensorRT proper only: TensorRT-RTX measures nothing while it builds.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from lowering.files import replace_file

__all__ = ["keep_timings", "use_timings"]

_log = logging.getLogger("lowering.tensorrt")


def use_timings(config: Any, path: str | os.PathLike[str]) -> None:
    """Give the builder the timings in `path`, or an empty cache if there are none that it takes.

    Args:
        config: the `IBuilderConfig`.
        path: the file; it need not exist.
    """
    path = Path(path).expanduser()
    known = _read(path)
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, False):
        _log.warning("the timing cache %s is of another TensorRT or GPU: it is begun anew", path.name)
        config.set_timing_cache(config.create_timing_cache(b""), False)


def keep_timings(config: Any, path: str | os.PathLike[str]) -> None:
    """Write the builder's timings to `path`, together with what other processes have written there meanwhile.

    A file that cannot be written is reported through `logging`: the engine is built all the same.
    """
    cache = config.get_timing_cache()
    if cache is None:
        return
    path = Path(path).expanduser()
    meanwhile = _read(path)
    if meanwhile and (other := config.create_timing_cache(meanwhile)) is not None:
        cache.combine(other, False)
    try:
        replace_file(path, bytes(cache.serialize()))
    except OSError as error:
        _log.warning("the timing cache %s cannot be written: %s", path.name, error.strerror or error)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        _log.warning("the timing cache %s cannot be read: %s", path.name, error.strerror or error)
        return b""
