"""`functionalize`: in-place ops become out-of-place ones, and later uses of what they wrote read the new value.

An observer or a Q/DQ pair in front of an in-place op changes what the aliases of its argument see, and removing dead
code removes writes whose result is not used. So every pass after capture works on a graph without writes, or with
writes that are marked as not understood (`meta["aliased"]`).
"""

from __future__ import annotations

import copy
import inspect
import operator
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fx_passes.entry.ambient import plain_state
from fx_passes.functional.memory import Memory, Storage, Value
from fx_passes.graph.module import copy_graph_module, set_submodule
from fx_passes.graph.node_meta import inherit_meta
from fx_passes.ops import is_size, module_of, op_of, out_of_place, write_view
from fx_passes.ops.dtypes import infer_dtypes
from fx_passes.ops.effects import effect_of, has_effects, makes_fresh_elements, receiver, returns_container, view_step

__all__ = ["functionalize", "remove_dead_code"]


@plain_state()
def functionalize(gm: GraphModule) -> GraphModule:
    """Rewrite in-place modules, functions, methods, augmented and item assignments and `out=` to out-of-place ops.

    A write is rewritten where the memory belongs to a value made in the graph and all of its aliases are known; views
    that are read later are taken again from the new value. Every other write (to an input or a parameter, to memory
    that a wrapped call may have kept, through a `reshape` that may have copied) stays where it is, in order, and the
    values that may share its memory get `meta["aliased"]`, a reason in words: they must not be observed, quantized,
    fused across or removed.

    Args:
        gm: a traced graph; it is not changed.

    Returns:
        A copy that computes the same, bit for bit, and leaves its inputs as the original does. Dead code is removed.
    """
    new = copy_graph_module(gm)
    _Rewriter(new).run()
    remove_dead_code(new)
    new.graph.lint()
    new.recompile()
    new.meta["stage"] = "functionalized"
    return new


def remove_dead_code(gm: GraphModule) -> bool:
    """Erase, in place, nodes without users that only compute. Returns whether any was erased.

    Unlike `Graph.eliminate_dead_code`, keeps every write, every call that is not understood, every random draw, and
    BatchNorm in train mode.
    """
    erased = False
    for node in reversed(gm.graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr" or not has_effects(node, gm):
            gm.graph.erase_node(node)
            erased = True
    if erased:
        gm.recompile()
    return erased


# Ops whose out-of-place result has their first argument's dtype, whatever the other operands are.
_KEEPS_DTYPE = frozenset(
    {
        *("copy", "fill", "zero", "setitem", "masked_fill", "masked_scatter", "put", "tril", "triu", "lerp", "addmm"),
        *("index_put", "index_add", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce", "baddbmm"),
        *("dropout", "nan_to_num"),
    }
)


class _Rewriter:
    """One forward walk over the nodes of `gm`, which it edits."""

    def __init__(self, gm: GraphModule):
        self.gm = gm
        self.memory = Memory(gm.graph)
        self.dtypes = infer_dtypes(gm)
        self.attributes: dict[str, Value] = {}
        self.elements: dict[tuple[Node, Any], Value] = {}
        self.modules: dict[str, list[tuple[Node, bool]]] = {}  # path of an in-place module -> (call, rewritten?)

    def run(self) -> None:
        for node in list(self.gm.graph.nodes):
            self.memory.now = self.memory.order[node]
            self._read_current_values(node)
            if node.op == "placeholder":
                self.memory.new(node, foreign="an input, which is the caller's memory")
            elif node.op == "get_attr":
                self._visit_attribute(node)
            elif node.op != "output":
                getattr(self, f"_visit_{effect_of(node, self.gm).value}")(node)
        self._replace_modules()

    def _read_current_values(self, node: Node) -> None:
        def current(source: Node) -> Node:
            value = self.memory.get(source)
            return source if value is None else self.memory.current(value, before=node)

        args, kwargs = map_arg(node.args, current), map_arg(node.kwargs, current)
        if args != node.args or kwargs != node.kwargs:
            node.args, node.kwargs = args, kwargs

    # --- calls that write to nothing

    def _visit_attribute(self, node: Node) -> None:
        value: Any = self.gm
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        if not isinstance(value, Tensor):
            return
        if str(node.target) in self.attributes:  # read a second time: the same memory
            self.memory.name(self.attributes[str(node.target)], node)
        else:
            foreign = "a parameter or buffer of the model"
            self.attributes[str(node.target)] = self.memory.new(node, foreign)

    def _visit_size(self, node: Node) -> None:
        # On numbers an augmented assignment writes to nothing; as generated code it would rebind its operand.
        twin = out_of_place(node)
        if twin is not None:
            node.target = twin

    def _visit_fresh(self, node: Node) -> None:
        self.memory.new(node)

    def _visit_same(self, node: Node) -> None:
        value = self.memory.get(receiver(node))
        if value is None:
            self._visit_maybe(node)
        else:
            self.memory.name(value, node)

    def _visit_view(self, node: Node) -> None:
        first = receiver(node)
        source = self.memory.get(first)
        if first is None or source is None:
            self.memory.new(node, foreign="a view of something that is not understood")
        elif makes_fresh_elements(first):
            self._visit_element(node, first)
        else:
            self.memory.view(node, source, first)

    def _visit_element(self, node: Node, container: Node) -> None:
        """An element of a tuple of tensors with memory of their own, such as those of `topk`."""
        index = {"values": 0, "indices": 1}.get(node.args[1], node.args[1])  # type: ignore[arg-type]
        if not isinstance(index, int) or any(u.target not in (operator.getitem, getattr) for u in container.users):
            self.memory.maybe(node, self._storages_of(node), "an element of a tuple that is used as a whole")
        elif (container, index) in self.elements:
            self.memory.name(self.elements[container, index], node)
        else:
            self.elements[container, index] = self.memory.new(node)

    def _visit_maybe(self, node: Node) -> None:
        understood = op_of(node, self.gm) is not None and receiver(node) is not None and not returns_container(node)
        foreign = None if understood else f"the result of '{_callee(node)}', whose memory is not known"
        self.memory.maybe(node, self._storages_of(node), foreign)

    def _visit_opaque(self, node: Node) -> None:
        sources = self._storages_of(node)
        for storage in {s for source in sources for s in (source, *source.neighbours)}:
            storage.escaped = f"'{_callee(node)}'"
            for value in storage.values:
                if self.memory.read_later(value):
                    reason = f"'{_callee(node)}' may write to it or keep it, and it is read again after that call"
                    self.memory.mark_value(value, reason)
        self.memory.maybe(node, sources, f"the result of '{_callee(node)}', which is not understood")

    def _storages_of(self, node: Node) -> list[Storage]:
        found = [value.storage for n in node.all_input_nodes if (value := self.memory.get(n)) is not None]
        return list(dict.fromkeys(found))

    # --- writes

    def _visit_write(self, node: Node) -> None:
        target = node.kwargs.get("out") or receiver(node)
        value = self.memory.get(target)
        if value is None or not isinstance(target, Node):
            self._leave(node, None, "what it writes to is not understood")
            return
        reason = self._why_in_place(node, value)
        if reason is not None:
            self._leave(node, value, reason)
            return
        self._make_functional(node)
        self._hold_result(value, node, self._keep_dtype(node, target))
        if node.target is not operator.setitem:
            self.memory.name(value, node)

    def _visit_retype(self, node: Node) -> None:
        """`squeeze_`, `t_`, `detach_`: another shape for the same tensor object."""
        first = receiver(node)
        value = self.memory.get(first)
        reason = "what it changes is not understood" if value is None else self._why_in_place(node, value)
        if value is None or first is None or reason is not None:
            self._leave(node, value, reason or "what it changes is not understood")
            return
        self._make_functional(node)
        self.memory.retype(value, node, first)

    def _why_in_place(self, node: Node, value: Value) -> str | None:
        """Why a write must stay in place, or None."""
        storage, writer = value.storage, f"written in place by '{node.name}'"
        if storage.foreign is not None:
            return f"{writer}: {storage.foreign}"
        if storage.escaped:
            return f"{writer}: memory that {storage.escaped} may have kept"
        for other in storage.neighbours:
            if other.foreign or other.escaped or any(self.memory.read_later(v) for v in other.values):
                return f"{writer}, and may share memory with '{other.base.name}'"
        if value.steps and self.memory.others_read_later(value):
            if "out" in node.kwargs:
                return f"written by out= of '{node.name}', which may resize it, while its base is read later"
            if any(view_step(view) is None for view, _ in value.steps):
                return f"{writer} through a view that is not understood"
        if not self._has_out_of_place_form(node) or (node.target is operator.setitem and node.users):
            return f"{writer}, which has no out-of-place form in the op table"
        return None

    def _has_out_of_place_form(self, node: Node) -> bool:
        return (
            node.op == "call_module" or "out" in node.kwargs or self._has_flag(node) or out_of_place(node) is not None
        )

    def _has_flag(self, node: Node) -> bool:
        """Whether it is in place because of an argument `inplace=True`."""
        op = op_of(node, self.gm)
        return (
            op is not None and node.op == "call_function" and node.target not in op.inplace and "out" not in node.kwargs
        )

    def _leave(self, node: Node, value: Value | None, reason: str) -> None:
        node.meta["aliased"] = reason
        if node.op == "call_module":
            self.modules.setdefault(str(node.target), []).append((node, False))
        if value is None:
            self._visit_opaque(node)
            return
        for storage in (value.storage, *value.storage.neighbours):
            storage.foreign = storage.foreign or reason
            self.memory.mark(storage, reason)
        if node.target is not operator.setitem:
            self.memory.name(value, node)

    def _make_functional(self, node: Node) -> None:
        """Edit `node` so that it computes anew what it wrote."""
        if node.op == "call_module":
            self.modules.setdefault(str(node.target), []).append((node, True))
        elif "out" in node.kwargs or "inplace" in node.kwargs:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("out", "inplace")}
        elif (twin := out_of_place(node)) is not None:
            node.op = "call_method" if isinstance(twin, str) else "call_function"
            node.target = twin
        else:
            position = list(inspect.signature(node.target).parameters).index("inplace")  # type: ignore[arg-type]
            node.args = (*node.args[:position], False, *node.args[position + 1 :])

    def _keep_dtype(self, node: Node, target: Node) -> Node:
        """An in-place op keeps the dtype of what it writes to; its twin may promote. Returns the node to read."""
        op = op_of(node, self.gm)
        tensors = [i for i in node.all_input_nodes if i is not target and not is_size(i)]
        dtype = self.dtypes.get(target)
        same = dtype is not None and all(self.dtypes.get(t) == dtype for t in tensors)
        alone = not tensors and target in node.all_input_nodes
        if op is None or (op.name not in _KEEPS_DTYPE and (op.inplace_casts or not (same or alone))):
            with self.gm.graph.inserting_after(node):
                return inherit_meta(self.gm.graph.call_method("type_as", (node, target)), node)
        return node

    def _hold_result(self, value: Value, node: Node, result: Node) -> None:
        """`result` is the new content of `value`: renew whatever of its memory is read later."""
        if not value.steps:
            self.memory.write_whole(value, result)
        elif not self.memory.others_read_later(value):
            self.memory.split_off(value, result)
        else:
            storage = value.storage
            steps = [view_step(view) for view, _ in value.steps]
            with self.gm.graph.inserting_after(result):
                args: Any = (storage.base, result, *(step for step in steps if step and step[0]))
                written = inherit_meta(self.gm.graph.call_function(write_view, args), node)
            self.memory.write_base(storage, written)

    def _replace_modules(self) -> None:
        """Give rewritten calls a copy of their module with `inplace=False`; others keep the original."""
        copies: dict[int, nn.Module] = {}
        for path, calls in self.modules.items():
            rewritten = [node for node, done in calls if done]
            if not rewritten:
                continue
            module = module_of(rewritten[0], self.gm)
            assert module is not None
            if id(module) not in copies:
                copies[id(module)] = copy.copy(module)
                copies[id(module)].inplace = False  # type: ignore[assignment]
            new_path = path
            if len(rewritten) != len(calls):
                new_path = f"{path}_out_of_place"
                for node in rewritten:
                    node.target = new_path
            set_submodule(self.gm, new_path, copies[id(module)])


def _callee(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
