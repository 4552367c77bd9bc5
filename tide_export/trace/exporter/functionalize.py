"""Which in-place operators of a captured model may become ordinary ones, and makes them so.

`decompositions` asks; torch's own functionalization is what it spares. `x.add_(y)` is `add(x, y)` from then on wherever
`x` was read afterwards, as long as nothing else that shares the memory of `x` is read from there on: neither what `x`
is a view of nor a view of it. Who shares memory was seen when the model was captured: the stand-ins for its tensors
that the nodes carry share it too.
"""

import operator

import torch
from torch._ops import OpOverload
from torch.fx import Node


def functional(node: Node) -> OpOverload | None:
    """The operator that gives what `node` writes into its first argument; None where `node` must stay as it is."""
    target = node.target
    if not isinstance(target, OpOverload) or not target._schema.is_mutable or node.kwargs:
        return None
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or overload not in packet.overloads():
        return None
    written, *others = node.args
    if not isinstance(written, Node) or _is_shared(written, node):
        return None
    read = (other.meta.get("val") for other in others if isinstance(other, Node))
    kept = all(_keeps_dtype(written.meta["val"].dtype, tensor) for tensor in read)
    return getattr(packet, overload) if kept else None


def make_functional(node: Node, target: OpOverload) -> Node:
    """Lets `node` compute by `target`, as `functional` gave it, and who reads what it wrote into read its result.

    Returns what it wrote into, which nothing behind it reads any more.
    """
    written = node.args[0]
    assert isinstance(written, Node)
    node.target = target
    written.replace_all_uses_with(node, delete_user_cb=lambda user: node < user)
    return written


def _is_shared(written: Node, node: Node) -> bool:
    """Whether the memory of `written` is another's, or read at `node` or behind it under another name."""
    names = _names(written)
    (memory,) = _memory(written)
    made_by = names[-1].args[0] if names[-1].target is operator.getitem else names[-1]
    assert isinstance(made_by, Node)
    first, *sharing = (other for other in node.graph.nodes if memory in _memory(other))
    if first is not made_by or made_by.op != "call_function" or _memory(made_by).count(memory) > 1:
        return True
    views = [other for other in sharing if other < node and other not in names]
    return any(not reader < node for view in views for reader in view.users)


def _names(node: Node) -> list[Node]:
    """The nodes that stand for one tensor: what was written in place is what it was written into."""
    names = [node]
    while isinstance(node.target, OpOverload) and node.target._schema.is_mutable and isinstance(node.args[0], Node):
        node = node.args[0]
        names.append(node)
    return names


def _memory(node: Node) -> list[int]:
    """The blocks of memory that its results lie in."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else [value]
    return [tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _keeps_dtype(written: torch.dtype, other: object) -> bool:
    """Whether the result has the dtype of what is written into, as it has in place, whatever the other argument is."""
    if not isinstance(other, torch.Tensor) or other.dtype == written:
        return True
    return written.is_floating_point and not other.dtype.is_floating_point
