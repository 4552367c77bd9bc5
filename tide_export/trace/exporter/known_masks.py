"""Reads and writes without a mask what a mask of one known value chooses: every row, or none.

X-MOD runs the adapter of each of its languages for the sequences of that language, `y[mask] = adapter(x[mask])`, and
without `lang_ids` all sequences are of the config's default language. The exporter would write NonZero for each mask.
"""

import torch
from torch.fx import Graph, Node

from tide_export.trace.exporter.functionalize import functional, make_functional

aten = torch.ops.aten
ELEMENTWISE = (aten.mul.Tensor, aten.eq.Scalar)


def fold_known_masks(graph: Graph) -> None:
    """Replaces `x[mask]` and `y[mask] = rows` where every element of the mask is known to be the same.

    What is computed of no rows remains, unread.
    """
    known: dict[object, torch.Tensor] = {}  # node -> what each of its elements is
    for node in list(graph.nodes):
        if node.target is aten.ones.default:
            known[node] = torch.ones(())
        elif node.target in ELEMENTWISE and node.args[0] in known and not isinstance(node.args[1], Node):
            known[node] = node.target(known[node.args[0]], node.args[1])
        elif node.target in (aten.index.Tensor, aten.index_put_.default):
            tensor, (mask, *others), *written = node.args
            if others or mask not in known or known[mask].dtype != torch.bool or mask.meta["val"].dim() != 1:
                continue
            if not written:
                if known[mask]:
                    node.replace_all_uses_with(tensor)
            elif not known[mask]:
                node.replace_all_uses_with(tensor)
                graph.erase_node(node)
            elif functional(node) is not None and written[0].meta["val"].dim() == tensor.meta["val"].dim():
                make_functional(node, aten.clone.default)
                node.args = (written[0],)
                node.meta["val"] = aten.clone.default(written[0].meta["val"])
