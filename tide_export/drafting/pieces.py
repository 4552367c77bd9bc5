"""Builds the two graphs of a trained drafter; `routers.drafter_weights` has the formula.

The first ends with attention. The second runs only over rows that draft: all other rows end in the K/V cache.
"""

import numpy as np
import onnx_ir as ir

from tide_export.compose.drafter_networks import DrafterPieces
from tide_export.graph.builder import GraphBuilder, Weights
from tide_export.graph.rewriting import FLOAT, INT64, dims, last_dim, required, typed_value
from tide_export.names.operators import DOMAIN, OP_ATTENTION, OP_QUANTIZED_MATMUL
from tide_export.routers.drafter_weights import EPSILON, HEAD_DIM, LIMIT, ROTARY_BASE, Drafter

BATCH, ROWS = "batch", "rows"


def pieces_of(drafter: Drafter, max_tokens: int) -> DrafterPieces:
    """Returns the pieces of `drafter`, for sequences of at most `max_tokens` rows."""
    return DrafterPieces(
        attend=_Attend(drafter, max_tokens).graph(),
        propose=_Propose(drafter).graph(),
        kv_shape=(drafter.shape.kv_heads, HEAD_DIM),
        tokens=drafter.tokens,
        acceptance=drafter.acceptance,
        matrices=drafter.matrices,
        max_tokens=max_tokens,
    )


class _Piece:
    """A graph of the drafter's layer, whose values are float32 [B, S, width]."""

    def __init__(self, name: str, drafter: Drafter):
        self.drafter, self.shape = drafter, drafter.shape
        self.matrices = drafter.matrices
        self.builder = GraphBuilder(name, Weights())

    def of(self, inputs: list[ir.Value], outputs: list[ir.Value]) -> ir.Graph:
        builder = self.builder
        weights = list(builder.weights.values.values())
        return ir.Graph(inputs, outputs, nodes=builder.nodes, initializers=weights, name=builder.prefix)

    def op(self, op_type: str, inputs: list[ir.Value], width: int, **attributes: float | int) -> ir.Value:
        return self.builder.op(op_type, inputs, attributes, dtype=FLOAT, shape=[BATCH, ROWS, width])

    def array(self, name: str) -> ir.Value:
        return self.builder.weights.float32(name, self.drafter.arrays[name])

    def matmul(self, x: ir.Value, name: str) -> ir.Value:
        shape = [BATCH, ROWS, len(self.matrices[name])]
        attributes = {"weights": [name]}
        return self.builder.op(OP_QUANTIZED_MATMUL, [x], attributes, domain=DOMAIN, dtype=FLOAT, shape=shape)

    def norm(self, x: ir.Value, name: str) -> ir.Value:
        attributes = {"axis": -1, "epsilon": EPSILON}
        return self.builder.op("RMSNormalization", [x, self.array(name)], attributes, dtype=FLOAT, shape=dims(x))

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.op("Add", [a, b], dtype=FLOAT, shape=a.shape)


class _Attend(_Piece):
    """The first graph: fuses embeddings and hidden states, and attends.

    embeddings [B, S, E], hidden [B, S, D], positions [B, S] -> fused [B, S, D], attended [B, S, heads * HEAD_DIM].
    """

    def __init__(self, drafter: Drafter, max_tokens: int):
        super().__init__("attend", drafter)
        self.max_tokens = max_tokens

    def graph(self) -> ir.Graph:
        embeddings = typed_value("embeddings", FLOAT, [BATCH, ROWS, self.shape.embedding])
        hidden = typed_value("states", FLOAT, [BATCH, ROWS, self.shape.hidden])
        self.positions = typed_value("positions", INT64, [BATCH, ROWS])
        fused = self._fuse(embeddings, hidden)
        return self.of([embeddings, hidden, self.positions], [fused, self._attention(fused)])

    def _fuse(self, embeddings: ir.Value, hidden: ir.Value) -> ir.Value:
        width = self.shape.hidden
        centered = self.op("Sub", [hidden, self.array("center")], width)
        scaled = self.op("Div", [centered, self.array("scale")], width)
        low, high = (self.builder.weights.float32(f"limit_{n}", np.array(n)) for n in (-LIMIT, LIMIT))
        clipped = self.op("Clip", [scaled, low, high], width)
        both = [self.norm(embeddings, "embedding_norm"), self.norm(clipped, "state_norm")]
        return self.matmul(self.op("Concat", both, self.shape.embedding + width, axis=-1), "fuse")

    def _attention(self, z: ir.Value) -> ir.Value:
        heads, kv_heads, builder = self.shape.heads, self.shape.kv_heads, self.builder
        h = self.norm(z, "attention_norm")
        query, key, value = (self._heads(self.matmul(h, name)) for name in "qkv")
        inputs = [self._rotated(query, heads), self._rotated(key, kv_heads), value]
        attributes = {
            "layer": 0,
            "num_heads": heads,
            "kv_num_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "scale": HEAD_DIM**-0.5,
        }
        shape = [BATCH, ROWS, heads, HEAD_DIM]
        attended = builder.op(OP_ATTENTION, inputs, attributes, domain=DOMAIN, dtype=FLOAT, shape=shape)
        merge = builder.weights.integers("merge_heads", [0, 0, -1])
        return self.op("Reshape", [attended, merge], heads * HEAD_DIM)

    def _heads(self, value: ir.Value) -> ir.Value:
        """Splits [B, S, heads * HEAD_DIM] into [B, heads, S, HEAD_DIM]."""
        heads = required(last_dim(value)) // HEAD_DIM
        split = self.builder.weights.integers(f"split_{heads}", [0, 0, heads, HEAD_DIM])
        value = self.builder.op("Reshape", [value, split], dtype=FLOAT, shape=[BATCH, ROWS, heads, HEAD_DIM])
        shape = [BATCH, heads, ROWS, HEAD_DIM]
        return self.builder.op("Transpose", [value], {"perm": [0, 2, 1, 3]}, dtype=FLOAT, shape=shape)

    def _rotated(self, value: ir.Value, heads: int) -> ir.Value:
        frequencies = ROTARY_BASE ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = np.outer(np.arange(self.max_tokens), frequencies)
        tables = [
            self.builder.weights.float32(f"rotary_{name}", function(angles))
            for name, function in (("cos", np.cos), ("sin", np.sin))
        ]
        inputs = [value, *tables, self.positions]
        return self.builder.op("RotaryEmbedding", inputs, dtype=FLOAT, shape=[BATCH, heads, ROWS, HEAD_DIM])


class _Propose(_Piece):
    """The second graph: the outputs of `_Attend` -> logits [B, S, n] and next hidden states [B, S, D]."""

    def __init__(self, drafter: Drafter):
        super().__init__("propose", drafter)

    def graph(self) -> ir.Graph:
        shape = self.shape
        fused = typed_value("fused", FLOAT, [BATCH, ROWS, shape.hidden])
        attended = typed_value("attended", FLOAT, [BATCH, ROWS, shape.heads * HEAD_DIM])
        z = self.add(fused, self.matmul(attended, "out"))
        z = self.add(z, self.matmul(self._gated(self.norm(z, "mlp_norm")), "down"))
        logits = self.matmul(self.norm(z, "final_norm"), "head")
        if self.drafter.bias is not None:
            logits = self.add(logits, self.builder.weights.float32("bias", self.drafter.bias))
        scaled = self.op("Mul", [z, self.array("scale")], shape.hidden)
        return self.of([fused, attended], [logits, self.add(scaled, self.array("center"))])

    def _gated(self, h: ir.Value) -> ir.Value:
        gate, up = (self.matmul(h, name) for name in ("gate", "up"))
        sigmoid = self.op("Sigmoid", [gate], self.shape.mlp)
        return self.op("Mul", [self.op("Mul", [gate, sigmoid], self.shape.mlp), up], self.shape.mlp)
