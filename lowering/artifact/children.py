"""Lowered children in a manifest. The model around them is Python, which a file never holds: the caller hands it in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from fx_passes.errors import ArtifactError
from lowering.artifact.glue import glue_from_plain, glue_to_plain
from lowering.artifact.glue_checks import check_nodes
from lowering.artifact.plain import checked, shape_from_plain
from lowering.artifact.schema import dtype_from_plain
from lowering.children.lowered import Accepts, LoweredChild, TensorRange, WithChildren, own_copy
from lowering.segment.segment import Segment

__all__ = ["checked_children", "children_from_plain", "children_to_plain", "supplied_model"]

_MODEL = "model:"  # before the names of tensors of the caller's model


def children_to_plain(glue: WithChildren) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain data, and the tensors of the Python part: all of the model's, as any call may have to run in PyTorch.

    Raises:
        ArtifactError: the glue of a child holds what cannot be saved.
    """
    state: dict[str, Tensor] = {}
    children = []
    for child in glue.lowered:
        assert isinstance(child, LoweredChild) and isinstance(child.glue, GraphModule)
        nodes, tensors = glue_to_plain(child.glue)
        state |= {f"{child.path}:{name}": tensor for name, tensor in tensors.items()}
        children.append(
            {
                "path": child.path,
                "signature": child.accepts.signature,
                "places": [[where, _place_to_plain(known)] for where, known in child.accepts.places],
                "glue": nodes,
                "segments": {n: m.name for n, m in child.glue.named_children() if isinstance(m, Segment)},
            }
        )
    model = glue.model
    state |= {f"{_MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    return {"model": type(model).__qualname__, "lowered": children}, state


def checked_children(plain: Any) -> list[dict[str, Any]]:
    """The children of a manifest, each held to its form.

    Raises:
        ArtifactError: a part is missing or of another type.
    """
    checked(plain, dict, "the description of the children")
    checked(plain.get("model"), str, "the class of the model")
    for child in checked(plain.get("lowered"), list, "the list of children"):
        path = checked(checked(child, dict, "a child").get("path"), str, "the path of a child")
        checked(child.get("signature"), str, f"the signature of '{path}'")
        for place in checked(child.get("places"), list, f"the arguments of '{path}'"):
            if len(checked(place, list, f"an argument of '{path}'")) != 2:
                raise ArtifactError(f"an argument of '{path}' is not a place and what it takes")
            checked(place[0], str, f"an argument of '{path}'")
            checked(place[1], dict, f"an argument of '{path}'")
        for name, label in checked(child.get("segments"), dict, f"the segments of '{path}'").items():
            checked(name, str, f"a segment of '{path}'")
            checked(label, str, f"a segment of '{path}'")
        check_nodes(child.get("glue"))
    return plain["lowered"]


def supplied_model(plain: dict[str, Any], model: nn.Module | None, state: dict[str, Tensor]) -> nn.Module:
    """A copy of the caller's model that holds the tensors of the one that was lowered.

    Raises:
        ArtifactError: there is none, or it is of another class, or has other parameters and buffers.
    """
    name = plain["model"]
    if model is None:
        raise ArtifactError(
            f"{name} itself stays in Python, and no model is passed", hint=f"load(folder, model={name}(...))"
        )
    if type(model).__qualname__ != name:
        raise ArtifactError(
            f"the model that was passed is a {type(model).__qualname__}; the lowered one was a {name}",
            hint="pass a model made in the same way as the one that was lowered",
        )
    copy = own_copy(model)
    tensors = {key.removeprefix(_MODEL): value for key, value in state.items() if key.startswith(_MODEL)}
    try:
        copy.load_state_dict(tensors, assign=True)  # the caller's tensors stay as they are
    except RuntimeError as error:
        raise ArtifactError(
            f"the {name} that was passed has other parameters than the lowered one: {str(error).splitlines()[-1]}",
            hint="pass a model made in the same way as the one that was lowered",
        ) from error
    return copy


def children_from_plain(
    plain: dict[str, Any],
    segments: dict[str, Segment],
    state: dict[str, Tensor],
    model: nn.Module,
    fallbacks: dict[str, Callable[..., Any]],
) -> list[LoweredChild]:
    """The children that `children_to_plain` wrote, in their places in `model`.

    Raises:
        ArtifactError: `model` lacks one of them or it has another signature; or as `glue_from_plain`.
    """
    found = []
    for child in plain["lowered"]:
        path = child["path"]
        places = tuple((where, _place_from_plain(where, known)) for where, known in child["places"])
        own = {name: segments[label] for name, label in child["segments"].items()}
        tensors = {k.removeprefix(f"{path}:"): v for k, v in state.items() if k.startswith(f"{path}:")}
        lowered = LoweredChild(path, Accepts(child["signature"], places), nn.Identity())
        original = lowered.attach(model)
        lowered.glue = glue_from_plain(child["glue"], own, tensors, original, fallbacks)
        found.append(lowered)
    return found


def _place_to_plain(known: Any) -> dict[str, Any]:
    if not isinstance(known, TensorRange):
        return {"value": {"float": str(known)} if isinstance(known, float) else known}
    return {"dtype": str(known.dtype).removeprefix("torch."), "min": list(known.min), "max": list(known.max)}


def _place_from_plain(where: str, plain: dict[str, Any]) -> Any:
    if "value" in plain:
        value = plain["value"]
        return float(value["float"]) if isinstance(value, dict) else value
    low, high = shape_from_plain(plain.get("min"), where), shape_from_plain(plain.get("max"), where)
    if len(low) != len(high):
        raise ArtifactError(f"'{where}' has smallest and largest sizes of different ranks")
    return TensorRange(dtype_from_plain(plain.get("dtype"), where), low, high)
