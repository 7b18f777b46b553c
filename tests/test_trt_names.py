"""Every TensorRT name that the code uses exists: in the installed RTX and in TensorRT 10.13 (its stubs)."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

import lowering.trt
from lowering.trt.bindings import trt

FOLDER = Path(lowering.trt.__file__).parent
# Primitives of `Net` whose first argument names a member of an enumeration.
MEMBERS = {
    "binary": "ElementWiseOperation",
    "logical": "ElementWiseOperation",
    "scalar_op": "ElementWiseOperation",
    "compare_scalars": "ElementWiseOperation",
    "unary": "UnaryOperation",
    "activation": "ActivationType",
    "reduce": "ReduceOperation",
    "pool": "PoolingType",
}


def sources() -> list[Path]:
    return sorted(p for p in FOLDER.rglob("*.py") if "reference" not in p.relative_to(FOLDER).parts)


def dotted(node: ast.AST) -> list[str] | None:
    """["trt", "LayerType", "QUANTIZE"] of an attribute chain on a plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def used_names() -> tuple[set[str], set[str]]:
    """Dotted TensorRT names in use, and those that are only used where `has(...)` has been asked."""
    used: set[str] = set()
    guarded: set[str] = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                chain = dotted(node)
                if chain and chain[0] == "trt" and len(chain) > 1 and chain[1] != "bindings":
                    used.add(".".join(chain[1:]))
                if (
                    node.attr.startswith("add_")
                    and isinstance(node.value, ast.Attribute)
                    and node.value.attr == "definition"
                ):
                    used.add(f"INetworkDefinition.{node.attr}")
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                first = node.args[0] if node.args else None
                text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
                if name in MEMBERS and text:
                    used.add(f"{MEMBERS[name]}.{text}")
                if name == "has" and text:
                    guarded.add(text)
    return used, guarded


@cache
def stub_members() -> dict[str, set[str]]:
    """Class name -> its members, and "" -> the module's own names, from the TensorRT 10.13 stubs."""
    spec = importlib.util.find_spec("tensorrt_bindings")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("tensorrt-stubs is not installed")
    # the file is no valid Python (a default before a plain argument), so names are taken by their indentation
    members: dict[str, set[str]] = {"": set()}
    owners: list[tuple[int, str]] = []
    for line in (Path(spec.submodule_search_locations[0]) / "tensorrt.pyi").read_text(encoding="utf-8").splitlines():
        match = re.match(r"( *)(?:(class|def) )?([A-Za-z_]\w*)(?= *[(:=])", line)
        if match is None:
            continue
        indent, kind, name = len(match[1]), match[2], match[3]
        while owners and owners[-1][0] >= indent:
            owners.pop()
        owner = owners[-1][1] if owners else ""
        members.setdefault(owner, set()).add(name)
        if kind == "class":
            owners.append((indent, f"{owner}.{name}".lstrip(".")))
    return members


def in_stubs(path: str) -> bool:
    owner, _, name = path.rpartition(".")
    head = path.split(".")[0]
    if head in ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool") or path.endswith(
        "__members__"
    ):
        return True
    return name in stub_members().get(owner, set())


def test_the_scan_sees_what_is_used() -> None:
    used, guarded = used_names()
    assert {"INetworkDefinition.add_convolution_nd", "ElementWiseOperation.SUM", "LayerType.QUANTIZE"} <= used
    assert "INetworkDefinition.add_normalization_v2" in guarded
    assert not in_stubs("INetworkDefinition.add_normalization_v2"), "the stubs are too new for this test to mean much"


def test_names_exist_in_the_installed_flavour() -> None:
    def exists(path: str) -> bool:
        found = trt
        for part in path.split("."):
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True

    assert [name for name in sorted(used_names()[0]) if not exists(name)] == []


def test_names_exist_in_tensorrt_10_13() -> None:
    used, guarded = used_names()
    # only RTX is told what to build for; on TensorRT the code path is not reached
    rtx_only = {"ComputeCapability"}
    missing = [n for n in sorted(used - guarded) if not in_stubs(n) and n.split(".")[0] not in rtx_only]
    assert missing == []
