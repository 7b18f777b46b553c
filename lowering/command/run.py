"""`fxtrt run`: an artifact on arrays from files, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fx_passes.errors import ArtifactError, InputError
from lowering.onnx.arrays import load_arrays

__all__ = ["named_arrays", "run_files"]


def run_files(folder: Path, inputs: Sequence[str], out: Path | None, threads: int | None) -> dict[str, np.ndarray]:
    """Run an artifact once.

    Args:
        folder: of the artifact.
        inputs: files of arrays, "x.npy" in the order of the model's arguments, or "name=x.npy".
        out: `.npz` file to write the results into.
        threads: of the call.

    Returns:
        The results by their place in what the model returns: "output", "output.0", "output.scores", ...

    Raises:
        InputError: a file cannot be read, or is no array.
        LoweringError: as `load_arrays` and its model.
    """
    model = load_arrays(folder, threads)
    positional = [_array(text) for text in inputs if "=" not in text]
    named = dict(text.split("=", 1) for text in inputs if "=" in text)
    results = dict(named_arrays(model(*positional, **{name: _array(path) for name, path in named.items()})))
    if out is not None:
        try:
            np.savez(out, **results)  # type: ignore[arg-type]
        except OSError as error:
            raise ArtifactError(f"cannot write {out}: {error.strerror or error}", hint="choose another path") from error
    return results


def named_arrays(result: Any, name: str = "output") -> Iterator[tuple[str, np.ndarray]]:
    """Every array in a nested result, with its place in it."""
    if isinstance(result, dict):
        items: Any = result.items()
    elif isinstance(result, tuple) and hasattr(result, "_fields"):
        items = zip(result._fields, result, strict=True)
    elif isinstance(result, list | tuple):
        items = enumerate(result)
    else:
        yield name, np.asarray(result)
        return
    for key, item in items:
        yield from named_arrays(item, f"{name}.{key}")


def _array(path: str) -> np.ndarray:
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read as an array: {error}", hint="write it with numpy.save") from error
    if not isinstance(loaded, np.ndarray):
        raise InputError(f"{path} holds several arrays", hint="give one .npy file for each input")
    return loaded
