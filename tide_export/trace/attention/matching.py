"""Finds attention in the trace of a model that computes it by itself, and makes it the one symbolic attention op.

`attention` serves models that ask `transformers`' attention interface; GPT-Neo, GPT-J, CodeGen, Falcon, BLOOM, MPT and
XGLM do not. Their attention is in the trace in the open, as product, scaling, mask, softmax, product (or as a call of
PyTorch's own `scaled_dot_product_attention`, which is kept whole while tracing). Nothing here knows an architecture: a
softmax that weighs values is attention, `scores` reads off what happens to the scores, and if that is causal attention
with at most a window and a bias by key position, `tide::TideAttention` takes its place. Else the model is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import onnx_ir as ir
import sympy
import torch
from onnx_ir.passes import common as common_passes
from torch.nn import functional
from transformers import PreTrainedModel

from tide_export.errors import UnsupportedModelError
from tide_export.names import DOMAIN, OP_ATTENTION, OP_MASKED_ATTENTION
from tide_export.trace.attention.repeated_kv import SWAP_HEADS, ungrouped
from tide_export.trace.attention.scores import LONGEST, ScoreReader, ScoreRule, first_other_step, score_products

_LAYOUT = ("Cast", "Identity", "Reshape")  # what stands between a softmax and the product with the values


def attends_by_itself(model: PreTrainedModel) -> bool:
    """Whether the architecture has attention of its own instead of asking the attention interface."""
    return not model._can_set_attn_implementation()


@contextmanager
def symbolic_sdpa() -> Iterator[None]:
    """While open, `torch.nn.functional.scaled_dot_product_attention` emits one node instead of computing."""
    own = functional.scaled_dot_product_attention

    def emit(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.ndim != 4 or key.ndim != 4:
            return own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{OP_MASKED_ATTENTION}",
            (query, key, value) if attn_mask is None else (query, key, value, attn_mask),
            attrs={"scale": float(query.shape[-1] ** -0.5 if scale is None else scale), "is_causal": int(is_causal)},
            dtype=query.dtype,
            shape=(*query.shape[:3], value.shape[-1]),
            version=1,
        )

    functional.scaled_dot_product_attention = emit
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = own


class ExplicitAttentionPass(ir.passes.InPlacePass):
    """Attention written out in a trace becomes `TideAttention`, numbered in order of appearance.

    Postcondition: every softmax that weighs computed values is gone. An op with a bias has five inputs: query, key,
    value, none, and the bias by head and key position, float32 [H, N]; its own table, or one it shares.
    """

    def __init__(self, max_length: int, kind: str):
        """`max_length`: tokens of the longest sequence the graph will see; `kind`: the architecture, for messages."""
        super().__init__()
        self.max_length = max_length
        self.kind = kind

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        found = [node for node in graph if _weighs_values(node) or _is_masked(node)]
        if not found:
            raise _refusal(
                self.kind, "attends neither through transformers' attention interface nor by a softmax over keys"
            )
        if self.max_length > LONGEST:
            raise UnsupportedModelError(
                f"{self.kind} makes its attention masks itself, which can be looked at for {LONGEST} tokens only, not "
                f"{self.max_length}: give a max length of at most {LONGEST}"
            )
        common_passes.CommonSubexpressionEliminationPass()(model)  # so that a mask all layers share is looked at once
        found = [node for node in graph if _weighs_values(node) or _is_masked(node)]
        # A rule read at one length could be one that changes with the length.
        shorter = max(2, self.max_length // 3)
        readers = [ScoreReader(graph, length, self.kind) for length in (self.max_length, shorter)]
        tables = _Tables(graph)
        for layer, node in enumerate(found):
            attention = (_masked if _is_masked(node) else _written_out)(node, self.kind)
            rules = [attention.rule(reader) for reader in readers]
            if not rules[0].agrees_with(rules[1], shorter):
                raise UnsupportedModelError(
                    f"{self.kind} attends by a rule that changes with the length of the sequence, so its attention "
                    "cannot be exported"
                )
            attention.replace(layer, rules[0], tables)
        common_passes.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)


class _Attention:
    """One attention of the trace: what goes in, where its rule is to be read, and what comes out.

    Args:
        query, key, value: [B, H, S, Dh], key and value with their own number of heads.
        context: what the values were weighed to, [B, H, S, Dh] or [B * H, S, Dh].
    """

    def __init__(self, kind: str, node: ir.Node, query: ir.Value, key: ir.Value, value: ir.Value):
        self.kind = kind
        self.node = node
        self.context = node.outputs[0]
        self.query, self.key, self.value = query, key, value
        self.heads, self.head_dim = _static(query, 1, kind), _static(query, 3, kind)
        single = ungrouped(key), ungrouped(value)
        if _static(single[0], 1, kind) == _static(single[1], 1, kind):
            self.key, self.value = single
        self.kv_heads = _static(self.key, 1, kind)
        if _static(self.value, 1, kind) != self.kv_heads or self.heads % self.kv_heads:
            raise _refusal(kind, f"has {self.heads} query heads that do not share its keys and values evenly")
        if {_static(item, 3, kind) for item in (self.key, self.value)} != {self.head_dim}:
            raise _refusal(kind, "has keys and values of another width than its queries")

    def rule(self, reader: ScoreReader) -> ScoreRule:
        raise NotImplementedError

    def replace(self, layer: int, rule: ScoreRule, tables: "_Tables") -> None:
        """Puts a TideAttention in the place of what was found."""
        attributes: dict[str, int | float] = {
            "layer": layer,
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "scale": rule.scale,
        }
        if rule.window is not None:
            attributes["window"] = rule.window
        inputs: list[ir.Value | None] = [self.query, self.key, self.value]
        if rule.bias is not None:
            inputs += [None, tables.of(rule.bias)]
        new = ir.node(OP_ATTENTION, inputs, attributes=attributes, domain=DOMAIN, name=f"attention_{layer}")
        (output,) = new.outputs
        assert self.query.shape is not None
        batch, _, tokens, _ = self.query.shape
        output.name, output.type = f"attention_{layer}", self.query.type
        output.shape = ir.Shape([batch, tokens, self.heads, self.head_dim])
        self._graph().insert_before(self.node, new)
        for old in self._by_token():
            _same_dimensions(self._graph(), old, output)
            old.replace_all_uses_with(output, replace_graph_outputs=True)

    def _by_token(self) -> list[ir.Value]:
        """The values [B, S, H, Dh] that the context [B, H, S, Dh] or [B * H, S, Dh] is turned to by all its readers."""
        found, todo = [], [self.context]
        while todo:
            for reader, _ in todo.pop().uses():
                value = reader.outputs[0]
                rank = len(value.shape) if value.shape is not None else 0
                if reader.op_type == "Transpose" and tuple(reader.attributes.get_ints("perm", [])) == SWAP_HEADS:
                    found.append(value)
                elif reader.op_type == "Reshape" and rank == 4 and _static(value, 1, self.kind) == self.heads:
                    todo.append(value)
                else:
                    raise _refusal(self.kind, f"puts its heads together by a {reader.op_type} that is not understood")
        return found

    def _graph(self) -> ir.Graph:
        assert isinstance(self.node.graph, ir.Graph)
        return self.node.graph


class _Masked(_Attention):
    """A call of scaled_dot_product_attention."""

    def rule(self, reader: ScoreReader) -> ScoreRule:
        mask = self.node.inputs[3] if len(self.node.inputs) > 3 else None
        attributes = self.node.attributes
        return reader.read_mask(
            mask, attributes["scale"].as_float(), bool(attributes["is_causal"].as_int()), self.heads
        )


class _WrittenOut(_Attention):
    """Product, softmax, product."""

    def __init__(self, kind: str, node: ir.Node, softmax: ir.Node, scores: ir.Value, *parts: ir.Value):
        super().__init__(kind, node, *parts)
        self.softmax, self.scores = softmax, scores

    def rule(self, reader: ScoreReader) -> ScoreRule:
        end = self.softmax.inputs[0]
        assert end is not None
        return reader.read_chain(end, self.scores, self.heads)


def _is_masked(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, OP_MASKED_ATTENTION)


def _masked(node: ir.Node, kind: str) -> _Attention:
    query, key, value = node.inputs[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    return _Masked(kind, node, query, key, value)


def _weighs_values(node: ir.Node) -> bool:
    """Whether `node` multiplies a softmax by something that was computed."""
    if (node.domain, node.op_type) != ("", "MatMul"):
        return False
    weights, values = node.inputs
    return values is not None and values.const_value is None and _softmax(weights) is not None


def _softmax(value: ir.Value | None) -> ir.Node | None:
    """The softmax behind `value`, casts and reshapes apart."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in _LAYOUT:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node if node is not None and node.op_type == "Softmax" else None


def _written_out(node: ir.Node, kind: str) -> _Attention:
    softmax = _softmax(node.inputs[0])
    assert softmax is not None
    end = softmax.inputs[0]
    assert end is not None
    rank = len(end.shape) if end.shape is not None else 0
    if softmax.attributes.get_int("axis", -1) not in (-1, rank - 1):
        raise _refusal(kind, "takes its softmax over something else than the keys")
    products = score_products(end)
    if len(products) != 1:
        how = "from two products" if products else f"by a {first_other_step(end)} that is not understood"
        raise _refusal(kind, f"computes its attention scores {how}")
    product = products[0].producer()
    assert product is not None
    query, turned = product.inputs
    return _WrittenOut(
        kind,
        node,
        softmax,
        products[0],
        _split_heads(query, kind),
        _split_heads(_turned_back(turned, product), kind),
        _split_heads(node.inputs[1], kind),
    )


def _turned_back(value: ir.Value | None, reader: ir.Node) -> ir.Value:
    """The keys [.., S, Dh] behind `value` [.., Dh, S], which `reader` multiplies by."""
    assert value is not None
    assert value.shape is not None
    rank = len(value.shape)
    node = value.producer()
    perm = list(range(rank))
    if node is not None and node.op_type == "Transpose":
        perm = list(node.attributes.get_ints("perm", perm[::-1]))
        assert node.inputs[0] is not None
        value = node.inputs[0]
    perm[-2:] = perm[:-3:-1]
    if perm == list(range(rank)):
        return value
    new = ir.node("Transpose", [value], attributes={"perm": perm}, name=f"{reader.name}/keys")
    assert value.shape is not None
    (output,) = new.outputs
    output.name, output.type = f"{reader.name}.keys", value.type
    output.shape = ir.Shape([value.shape[axis] for axis in perm])
    assert reader.graph is not None
    reader.graph.insert_before(reader, new)
    return output


def _split_heads(value: ir.Value | None, kind: str) -> ir.Value:
    """`value`, or what it was before its heads became part of the batch: [B, H, S, Dh]."""
    if value is not None and value.shape is not None and len(value.shape) == 3:
        node = value.producer()
        merged = list(value.shape)
        value = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
        if value is not None and value.shape is not None and list(value.shape)[2:] != merged[1:]:
            value = None
    if value is None or value.shape is None or len(value.shape) != 4:
        raise _refusal(kind, "lays out the heads of its attention in a way that is not understood")
    return value


class _Tables:
    """The biases of a graph as initializers, equal ones once."""

    def __init__(self, graph: ir.Graph):
        self.graph = graph
        self.known: dict[bytes, ir.Value] = {}
        self.names = (f"attention_bias.{number}" for number in count())

    def of(self, bias: np.ndarray) -> ir.Value:
        array = np.ascontiguousarray(bias, dtype=np.float32)
        key = array.tobytes()
        if key not in self.known:
            self.known[key] = _register(self.graph, ir.tensor(array, name=next(self.names)))
        return self.known[key]


def _register(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(
        name=tensor.name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _same_dimensions(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Writes the dimensions of `new` for those of `old`, which are equal, wherever they occur.

    A mask kept for so many positions makes a trace call the tokens behind it "at most so many"; to later passes that
    would be another number of tokens.
    """
    assert old.shape is not None
    assert new.shape is not None
    pairs = [
        (str(a.value), str(b.value))
        for a, b in zip(old.shape, new.shape, strict=True)
        if isinstance(a, ir.SymbolicDim) and isinstance(b, ir.SymbolicDim) and a.value and b.value and a != b
    ]
    if not pairs:
        return
    renamed: dict[str, str] = {}

    def rename(dim: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(dim, int) or dim.value is None:
            return dim if isinstance(dim, int) else None
        text = str(dim.value)
        if text not in renamed:
            changed = text
            for a, b in pairs:
                changed = changed.replace(a, b)
            renamed[text] = _simplified(changed) if changed != text else text
        return renamed[text]

    for node in graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([rename(dim) for dim in value.shape])


def _simplified(dimension: str) -> str:
    """An expression over positive whole numbers in its shortest form: (a*b)//b is a."""
    symbols = {str(symbol) for symbol in sympy.sympify(dimension).free_symbols}
    return str(sympy.sympify(dimension, {name: sympy.Symbol(name, integer=True, positive=True) for name in symbols}))


def _static(value: ir.Value, axis: int, kind: str) -> int:
    dim = value.shape[axis] if value.shape is not None else None
    if not isinstance(dim, int):
        raise _refusal(kind, "has attention heads whose number or width is not fixed")
    return dim


def _refusal(kind: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{kind} {what}, so its attention cannot be exported")
