"""Every TensorRT name that the code uses exists: in the installed RTX, and in TensorRT 10.13 and 11.4.

The names of the latter two are in tests/data/tensorrt_names.json, which scripts/tensorrt_names writes from the bindings
themselves; where tensorrt-stubs is installed, it has to agree.
"""

from __future__ import annotations

import ast
import importlib.util
import json
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
# Where build, runtime and parser code calls methods of TensorRT's objects: variable -> class.
RECEIVERS = {
    "config": "IBuilderConfig",
    "configuration": "IRuntimeConfig",
    "builder": "Builder",
    "profile": "IOptimizationProfile",
    "context": "IExecutionContext",
    "_engine": "ICudaEngine",
    "_runtime": "Runtime",
    "parser": "OnnxParser",
    "cache": "ITimingCache",
    "definition": "INetworkDefinition",
}
CALLERS = (
    "trt/builder/build.py",
    "trt/run/runtime.py",
    "trt/run/graphs.py",
    "trt/builder/timing_cache.py",
    "trt/define/network.py",
    "tensorrt_file.py",
)
DATA = json.loads((Path(__file__).parents[1] / "data" / "tensorrt_names.json").read_text(encoding="utf-8"))
# only RTX is told what to build for; on TensorRT the code path is not reached
RTX_ONLY = ("ComputeCapability", "IBuilderConfig.num_compute_capabilities", "IBuilderConfig.set_compute_capability")


def sources() -> list[Path]:
    own = sorted(p for p in FOLDER.rglob("*.py") if "reference" not in p.relative_to(FOLDER).parts)
    return [*own, FOLDER.parent / "onnx" / "tensorrt_file.py"]


def dotted(node: ast.AST) -> list[str] | None:
    """["trt", "LayerType", "QUANTIZE"] of an attribute chain on a plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def calls(path: Path) -> set[str]:
    """`Class.member` for what is read of, set on or called on TensorRT's objects in one file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            value = node.value
            owner = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", None)
            if owner in RECEIVERS:
                found.add(f"{RECEIVERS[owner]}.{node.attr}")
    return found


def used_names() -> tuple[set[str], set[str]]:
    """Dotted TensorRT names in use, and those that are only used where `has(...)` has been asked."""
    used: set[str] = set()
    guarded: set[str] = set()
    for path in sources():
        if path.as_posix().endswith(CALLERS):
            used |= calls(path)
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
    return name in stub_members().get(owner, set())


def in_version(path: str, version: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name.startswith("__") or name in DATA[version].get(owner, "").split()


def missing(version: str) -> list[str]:
    used, guarded = used_names()
    # `has("A.B")` asks for A too, and is asked before a class is used whose existence it implies
    asked = {name for full in guarded for name in (full, full.split(".")[0])} | {"IRuntimeConfig"}
    return [n for n in sorted(used) if not in_version(n, version) and not n.startswith((*RTX_ONLY, *asked))]


def test_the_scan_sees_what_is_used() -> None:
    used, guarded = used_names()
    assert {"INetworkDefinition.add_convolution_nd", "ElementWiseOperation.SUM", "LayerType.QUANTIZE"} <= used
    assert {"IExecutionContext.set_output_allocator", "IBuilderConfig.set_timing_cache", "Runtime"} <= used
    assert {"ICudaEngine.get_tensor_profile_shape", "Builder.build_serialized_network"} <= used
    assert "INetworkDefinition.add_normalization_v2" in guarded


def test_the_data_can_tell_versions_apart() -> None:
    old, new = DATA
    assert in_version("BuilderFlag.FP16", old)
    assert not in_version("BuilderFlag.FP16", new)
    assert in_version("INetworkDefinition.add_normalization_v2", new)
    assert not in_version("INetworkDefinition.add_normalization_v2", old)


def test_names_exist_in_the_installed_flavour() -> None:
    def exists(path: str) -> bool:
        found = trt
        for part in path.split("."):
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True

    assert [name for name in sorted(used_names()[0]) if not exists(name)] == []


@pytest.mark.parametrize("version", list(DATA))
def test_names_exist_in_tensorrt(version: str) -> None:
    assert missing(version) == []


def test_the_data_agrees_with_the_stubs() -> None:
    """Two sources for 10.13: what the bindings say of themselves, and the stubs that others wrote for them."""
    (version,) = (v for v in DATA if v.startswith("10.13"))
    used = [name for name in used_names()[0] if not name.split(".")[-1].startswith("__")]
    used = [name for name in used if name.count(".") == 1 and in_version(name, version)]
    assert len(used) > 100
    assert [name for name in sorted(used) if not in_stubs(name)] == []
