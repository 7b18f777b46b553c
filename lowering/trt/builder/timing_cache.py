"""The file in which TensorRT's builder keeps how fast it found each tactic, so that a second build measures less.

TensorRT proper only: TensorRT-RTX measures nothing while it builds.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from lowering.files import replace_file
from lowering.trt.bindings import collect_log

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
    with collect_log() as log:
        cache = config.create_timing_cache(known)  # an empty one, and a message, if it cannot read them
        taken = cache is not None and config.set_timing_cache(cache, False)
    said = [*log.errors, *log.warnings]
    if known and (said or not taken):
        reason = said[0].strip() if said else "it is of another TensorRT or GPU"
        _log.warning("the timing cache %s is begun anew: %s", path.name, reason)
    if not taken:
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
    with collect_log():
        if meanwhile and (other := config.create_timing_cache(meanwhile)) is not None:
            cache.combine(other, False)
        timings = bytes(cache.serialize())
    try:
        replace_file(path, timings)
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
