"""An ONNX model on its way from the exporter to a runtime and an artifact: bytes, or above 2 GB two files.

Protobuf holds at most 2 GB. Above that the weights lie in a second file beside the model, which names it. A model that
names any other file is refused: a runtime would open it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fx_passes.errors import ArtifactError

if TYPE_CHECKING:
    import onnx

    from lowering.segment.program import AtenProgram

__all__ = ["OnnxFile", "exported_file"]

_SURELY_FITS = 2**31 - 2**26  # into one message of protobuf, with the graph and what the exporter adds to it


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX model.

    Attributes:
        content: the model, without the weights if they lie in a file of their own.
        path: where the model lies, with its weights in `<path>.data`; None if `content` has them.
        folder: a temporary folder with both, which goes with the last user of it.
    """

    content: bytes
    path: Path | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def of(cls, model: onnx.ModelProto | bytes | OnnxFile) -> OnnxFile:
        """From a proto or bytes that hold their weights."""
        if isinstance(model, OnnxFile):
            return model
        return cls(model if isinstance(model, bytes) else model.SerializeToString(deterministic=True))

    @classmethod
    def read(cls, path: Path, external: bool) -> OnnxFile:
        """A model that was written by the functions of `writers`.

        Args:
            path: the model.
            external: whether its weights lie in `<path>.data`.

        Raises:
            ArtifactError: the model names another file than that.
        """
        file = cls(path.read_bytes(), path if external else None)
        allowed = {_data_name(path.name)} if external else set()
        if names := file._locations() - allowed:
            raise ArtifactError(
                f"{path.name} takes weights from {', '.join(sorted(names))}", hint="save the lowered module again"
            )
        return file

    @property
    def source(self) -> bytes | str:
        """What a runtime opens."""
        return self.content if self.path is None else str(self.path)

    def writers(self, name: str) -> dict[str, Callable[[Path], Any]]:
        """File name -> function that writes it, for a model that is to be called `name`."""
        if self.path is None:
            return {name: partial(Path.write_bytes, data=self.content)}
        data = self.path.with_name(_data_name(self.path.name))
        return {
            name: lambda path: path.write_bytes(self._with_data_in(_data_name(name))),
            _data_name(name): partial(shutil.copyfile, data),
        }

    def _with_data_in(self, name: str) -> bytes:
        model = _parsed(self.content)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = name
        return model.SerializeToString(deterministic=True)

    def _locations(self) -> set[str]:
        """Files that the model names."""
        if b"location" not in self.content:  # the key under which a tensor names its file
            return set()
        model = _parsed(self.content)
        return {entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location"}


def exported_file(program: AtenProgram, name: str) -> OnnxFile:
    """Export a program, to memory if that can hold it.

    Args:
        program: what `export_onnx` takes.
        name: of the segment.

    Raises:
        ExportError: as `export_onnx`.
        ArtifactError: there is no room for the temporary files.
    """
    from lowering.onnx.export import export_onnx

    if sum(value.nbytes for _, value in program.constants.values()) < _SURELY_FITS:
        return OnnxFile.of(export_onnx(program))
    folder = tempfile.TemporaryDirectory(prefix="fxtrt-")
    path = Path(folder.name) / f"{name}.onnx"
    export_onnx(program, path)
    external = path.with_name(_data_name(path.name)).exists()
    return OnnxFile(path.read_bytes(), path, folder) if external else OnnxFile(path.read_bytes())


def _data_name(name: str) -> str:
    return f"{name}.data"


def _parsed(content: bytes) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load_model_from_string(content)
    except DecodeError as error:
        raise ArtifactError(f"the ONNX file is damaged: {error}") from error


def _tensors(message: Any) -> Any:
    """Every tensor of a model, also in attributes, subgraphs and functions."""
    from google.protobuf.message import Message

    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in [value] if isinstance(value, Message) else value:
                yield from _tensors(item)
