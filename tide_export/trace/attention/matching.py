"""Replaces attention that a model computes itself by the symbolic attention op.

`interface` serves models that use `transformers`' attention interface; GPT-Neo, GPT-J, CodeGen, Falcon, BLOOM, MPT and
XGLM do not. Their attention is spelled out in the trace: matmul, scaling, mask, softmax, matmul (or a call of PyTorch's
`scaled_dot_product_attention`, which is kept whole while tracing). No architecture is known by name: a softmax that
weighs values is attention, `scores` reads how its scores are computed, and if that is causal attention with at most a
window and a bias by key position or token, `tide::TideAttention` replaces it. Otherwise the model is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
import sympy
from onnx_ir.passes import common as common_passes
from torch.nn import functional

from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import (
    SWAP_HEADS,
    constant,
    dims,
    ensure_none_left,
    graph_of,
    op_before,
    rank,
    required,
    static_dim,
)
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_MASKED_ATTENTION
from tide_export.trace.attention.key_bias import first_channels, with_key_bias
from tide_export.trace.attention.repeated_kv import ungrouped
from tide_export.trace.attention.scores import (
    FROM_TOKENS,
    MAX_LENGTH,
    ScoreReader,
    ScoreRule,
    first_unknown_step,
    refusal,
    score_matmuls,
)
from tide_export.trace.symbolic import symbolic

_LAYOUT = ("Cast", "Identity", "Reshape")  # operators between a softmax and the matmul with the values


@contextmanager
def symbolic_sdpa() -> Iterator[None]:
    """While open, `torch.nn.functional.scaled_dot_product_attention` emits one node instead of computing."""
    original = functional.scaled_dot_product_attention

    def emit(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.ndim != 4 or key.ndim != 4:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        inputs = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
        scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
        attributes = {"scale": scale, "is_causal": int(is_causal)}
        return symbolic(OP_MASKED_ATTENTION, inputs, attributes, (*query.shape[:3], value.shape[-1]))

    functional.scaled_dot_product_attention = emit
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


class ExplicitAttentionPass(ir.passes.InPlacePass):
    """Replaces attention that is spelled out in a trace by `TideAttention`.

    The nodes are numbered in order of appearance.

    An op with a bias has five inputs: query, key, value, none, and the bias by head and key position, float32 [H, N];
    ops with equal biases share one table.
    """

    def __init__(self, max_length: int, kind: str):
        """Takes the longest sequence and the architecture.

        `max_length`: in tokens; `kind`: for messages.
        """
        super().__init__()
        self.max_length = max_length
        self.kind = kind

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        if not _attention_nodes(graph):
            softmax = next((n for n in graph if n.op_type == "Softmax" and n.outputs[0].uses()), None)
            raise refusal(
                self.kind,
                "attends neither through transformers' attention interface nor by a softmax over keys"
                if softmax is None
                else f"weighs its values by a {_reader_of(softmax)} that is not understood",
            )
        if self.max_length > MAX_LENGTH:
            raise UnsupportedModelError(
                f"{self.kind} makes its attention masks itself, which can be looked at for {MAX_LENGTH} tokens only, "
                f"not {self.max_length}: give a max length of at most {MAX_LENGTH}"
            )
        common_passes.CommonSubexpressionEliminationPass()(model)  # so that a mask all layers share is evaluated once
        # A rule read at one length could be one that changes with the length.
        shorter = max(2, self.max_length // 3)
        readers = [ScoreReader(graph, length, self.kind) for length in (self.max_length, shorter)]
        tables: dict[bytes, ir.Value] = {}  # biases as initializers, by their content
        for layer, node in enumerate(_attention_nodes(graph)):
            attention = (_masked if _is_masked(node) else _spelled_out)(node, self.kind)
            rules = [attention.rule(reader) for reader in readers]
            if not rules[0].agrees_with(rules[1], shorter):
                raise UnsupportedModelError(
                    f"{self.kind} attends by a rule that changes with the length of the sequence, so its attention "
                    "cannot be exported"
                )
            attention.replace(layer, rules[0], tables)
        common_passes.RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        ensure_none_left(_attention_nodes(model.graph))


class _Attention:
    """One attention of the trace.

    Args:
        query, key, value: [B, H, S, Dh], the number of heads may differ between query and the others.
        node: its first output is the weighted sum of the values, [B, H, S, Dh] or [B * H, S, Dh].
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
            raise refusal(kind, f"has {self.heads} query heads that do not share its keys and values evenly")
        if {_static(item, 3, kind) for item in (self.key, self.value)} != {self.head_dim}:
            raise refusal(kind, "has keys and values of another width than its queries")

    def rule(self, reader: ScoreReader) -> ScoreRule:
        raise NotImplementedError

    def replace(self, layer: int, rule: ScoreRule, tables: dict[bytes, ir.Value]) -> None:
        """Replaces it by a TideAttention."""
        graph = graph_of(self.node)
        qkv = self.query, self.key, self.value
        if rule.by_token is not None:
            if dims(rule.by_token)[1] != self.kv_heads:
                raise refusal(self.kind, FROM_TOKENS)
            qkv = with_key_bias(self.node, *qkv, rule.by_token, rule.by_token_factor)
        attributes: dict[str, int | float] = {
            "layer": layer,
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "head_dim": static_dim(qkv[0], 3),
            "scale": rule.scale,
        }
        if rule.window is not None:
            attributes["window"] = rule.window
        inputs: list[ir.Value | None] = [*qkv]
        if rule.bias is not None:
            table = np.ascontiguousarray(rule.bias, dtype=np.float32)
            if table.tobytes() not in tables:
                tables[table.tobytes()] = constant(graph, f"attention_bias.{len(tables)}", table)
            inputs += [None, tables[table.tobytes()]]
        batch, _, tokens, _ = dims(self.query)
        shape = [batch, tokens, self.heads, attributes["head_dim"]]
        output = op_before(
            self.node, OP_ATTENTION, inputs, attributes, domain=DOMAIN, dtype=self.query.dtype, shape=shape
        )
        if rule.by_token is not None:
            output = first_channels(self.node, output, self.head_dim)
        for old in self._by_token():
            _same_dimensions(graph, old, output)
            old.replace_all_uses_with(output, replace_graph_outputs=True)

    def _by_token(self) -> list[ir.Value]:
        """The values [B, S, H, Dh] that all readers transpose the context [B, H, S, Dh] or [B * H, S, Dh] to."""
        values, todo = [], [self.context]
        while todo:
            for reader, _ in todo.pop().uses():
                value = reader.outputs[0]
                if reader.op_type == "Transpose" and list(reader.attributes.get_ints("perm", [])) == SWAP_HEADS:
                    values.append(value)
                elif reader.op_type == "Reshape" and rank(value) == 4 and _static(value, 1, self.kind) == self.heads:
                    todo.append(value)
                else:
                    raise refusal(self.kind, f"merges its heads by a {reader.op_type} that is not understood")
        return values


class _Masked(_Attention):
    """A call of scaled_dot_product_attention."""

    def rule(self, reader: ScoreReader) -> ScoreRule:
        mask = self.node.inputs[3] if len(self.node.inputs) > 3 else None
        scale, causal = self.node.attributes["scale"].as_float(), self.node.attributes["is_causal"].as_int()
        return reader.read_mask(mask, scale, bool(causal), self.heads)


class _SpelledOut(_Attention):
    """Matmul, softmax, matmul."""

    def __init__(self, kind: str, node: ir.Node, softmax: ir.Node, scores: ir.Value, *parts: ir.Value):
        super().__init__(kind, node, *parts)
        self.softmax, self.scores = softmax, scores

    def rule(self, reader: ScoreReader) -> ScoreRule:
        return reader.read_chain(required(self.softmax.inputs[0]), self.scores, self.heads)


def _attention_nodes(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if _weighs_values(node) or _is_masked(node)]


def _is_masked(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, OP_MASKED_ATTENTION)


def _masked(node: ir.Node, kind: str) -> _Attention:
    query, key, value = map(required, node.inputs[:3])
    return _Masked(kind, node, query, key, value)


def _weighs_values(node: ir.Node) -> bool:
    """Whether `node` multiplies a softmax by something that was computed."""
    if (node.domain, node.op_type) != ("", "MatMul"):
        return False
    weights, values = node.inputs
    return values is not None and values.const_value is None and _softmax(weights) is not None


def _softmax(value: ir.Value | None) -> ir.Node | None:
    """The softmax that computes `value`, apart from casts and reshapes after it."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in _LAYOUT:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node if node is not None and node.op_type == "Softmax" else None


def _reader_of(softmax: ir.Node) -> str:
    """The operator that reads a softmax, apart from casts and reshapes; for messages."""
    readers = [node for node, _ in softmax.outputs[0].uses()]
    while readers[0].op_type in _LAYOUT and readers[0].outputs[0].uses():
        readers = [node for node, _ in readers[0].outputs[0].uses()]
    return readers[0].op_type


def _spelled_out(node: ir.Node, kind: str) -> _Attention:
    softmax = required(_softmax(node.inputs[0]))
    end = required(softmax.inputs[0])
    if softmax.attributes.get_int("axis", -1) not in (-1, (rank(end) or 0) - 1):
        raise refusal(kind, "takes its softmax over something else than the keys")
    scores = score_matmuls(end)
    if len(scores) != 1:
        how = "from two matmuls" if scores else f"by a {first_unknown_step(end)} that is not understood"
        raise refusal(kind, f"computes its attention scores {how}")
    matmul = required(scores[0].producer())
    query, transposed = matmul.inputs
    return _SpelledOut(
        kind,
        node,
        softmax,
        scores[0],
        _split_heads(query, kind),
        _split_heads(_untransposed(required(transposed), matmul), kind),
        _split_heads(node.inputs[1], kind),
    )


def _untransposed(value: ir.Value, reader: ir.Node) -> ir.Value:
    """The keys [.., S, Dh] of `value` [.., Dh, S], which `reader` multiplies by."""
    axes = list(range(len(dims(value))))
    node, perm = value.producer(), axes
    if node is not None and node.op_type == "Transpose":
        perm = list(node.attributes.get_ints("perm", axes[::-1]))
        value = required(node.inputs[0])
    perm = [*perm[:-2], perm[-1], perm[-2]]
    if perm == axes:
        return value
    shape = [dims(value)[axis] for axis in perm]
    return op_before(reader, "Transpose", [value], {"perm": perm}, dtype=value.dtype, shape=shape, suffix="_keys")


def _split_heads(value: ir.Value | None, kind: str) -> ir.Value:
    """`value`, or the value before its heads became part of the batch: [B, H, S, Dh]."""
    if value is not None and rank(value) == 3:
        node, merged = value.producer(), dims(value)
        value = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
        if value is not None and value.shape is not None and dims(value)[2:] != merged[1:]:
            value = None
    if value is None or rank(value) != 4:
        raise refusal(kind, "lays out the heads of its attention in a way that is not understood")
    return value


def _same_dimensions(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Replaces the symbolic dimensions of `old` by those of `new` in all shapes of `graph`.

    They are equal.

    A mask stored for N positions makes a trace call the tokens after it "at most N"; to later passes that would be
    another number of tokens.
    """
    pairs = [
        (str(a.value), str(b.value))
        for a, b in zip(dims(old), dims(new), strict=True)
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
    """An expression over positive integers in its shortest form: (a*b)//b is a."""
    symbols = {str(symbol) for symbol in sympy.sympify(dimension).free_symbols}
    return str(sympy.sympify(dimension, {name: sympy.Symbol(name, integer=True, positive=True) for name in symbols}))


def _static(value: ir.Value, axis: int, kind: str) -> int:
    dim = value.shape[axis] if value.shape is not None else None
    if not isinstance(dim, int):
        raise refusal(kind, "has attention heads whose number or width is not fixed")
    return dim
