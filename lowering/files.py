"""Files that a reader, in this process or another, finds whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["TEMPORARY", "replace_file"]

TEMPORARY = ".writing-"


def replace_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write `parts`, one after the other, under a temporary name beside `path`, then rename; the folder is made.

    Several processes may write the same path at once: each file is whole, and the last one stays.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
