"""Composes the network of a drafter: one decoder layer with K/V pages of its own (`routers.drafter` has the formula).

It runs the rows of several sequences at once, as the networks of a batch do. Rows that only fill the K/V cache end in
it: what follows attention is computed for `last_tokens` alone. Its matrices are symbolic, by name, as those of a
quantized model: a draft costs the bytes that it reads, and what rounding changes are drafts, never tokens.
"""

import numpy as np
import onnx_ir as ir

from tide_export import names
from tide_export.compose.builder import Block, Weights
from tide_export.compose.kv_cache import KINDS, page_inputs
from tide_export.names import DOMAIN, OP_ATTENTION, OP_QUANTIZED_MATMUL
from tide_export.routers.drafter import EPSILON, HEAD_DIM, LIMIT, ROTARY_BASE, Drafter
from tide_export.trace.rewriting import FLOAT, INT32, INT64, dims, last_dim, present, typed_value

EMBEDDINGS = "embeddings"  # input: float32 [1, N, E], for `INPUT_IDS` where the bundle's embedding is put before it
ROWS, LAST = "rows", "last"


def compose_drafter(drafter: Drafter, max_tokens: int) -> ir.Model:
    """The network of `drafter` for sequences of at most `max_tokens` rows, whose input is EMBEDDINGS."""
    composer = _Composer(drafter, max_tokens)
    model = composer.compose()
    model.metadata_props.update(
        {
            names.TOKENS_METADATA: ",".join(map(str, drafter.tokens.tolist())),
            names.ACCEPTANCE_METADATA: ",".join(f"{share:.4f}" for share in drafter.acceptance),
            names.FINGERPRINT_METADATA: drafter.weights_sha256,
            names.MAX_TOKENS_METADATA: str(max_tokens),
        }
    )
    return model


class _Composer:
    def __init__(self, drafter: Drafter, max_tokens: int):
        self.drafter, self.shape = drafter, drafter.shape
        self.max_tokens = max_tokens
        self.matrices = drafter.matrices
        self.block = Block("drafter", Weights())

    def compose(self) -> ir.Model:
        shape = self.shape
        embeddings = typed_value(EMBEDDINGS, FLOAT, [1, ROWS, shape.embedding])
        states = typed_value(names.HIDDEN_STATES, FLOAT, [1, ROWS, shape.state])
        self.positions = typed_value(names.POSITION_IDS, INT64, [1, ROWS])
        last = typed_value(names.LAST_TOKENS, INT64, [LAST])
        places = [
            typed_value(names.PAGE_TABLE, INT32, ["sequences", "table"]),
            typed_value(names.SEQUENCE_LENGTHS, INT64, ["sequences"]),
            typed_value(names.SEQUENCE_STARTS, INT64, ["starts"]),
        ]
        pages = page_inputs([0], [(shape.kv_heads, HEAD_DIM)])

        fused = self._fuse(embeddings, states)
        attended, written = self._attention(fused, list(pages.values()), places)
        z = self._add(self._last(fused, last), self._matmul(self._last(attended, last), "out"))
        h = self._norm(z, "mlp_norm")
        z = self._add(z, self._matmul(self._gated(h), "down"))
        logits = self._head(self._norm(z, "final_norm"))
        outputs = {
            names.LOGITS: self._squeeze(logits, len(self.drafter.tokens)),
            names.NEW_HIDDEN_STATES: self._squeeze(self._next_states(z), shape.state),
            **{names.new_pages(0, kind): value for kind, value in zip(KINDS, written, strict=True)},
        }
        inputs = [embeddings, states, self.positions, last, *places, *pages.values()]
        return self.block.model("tide_drafter", inputs, outputs)

    def _fuse(self, embeddings: ir.Value, states: ir.Value) -> ir.Value:
        width = self.shape.state
        centered = self._op("Sub", [states, self._array("center")], width)
        scaled = self._op("Div", [centered, self._array("scale")], width)
        low, high = (self.block.weights.float32(f"limit_{n}", np.array(n)) for n in (-LIMIT, LIMIT))
        clipped = self._op("Clip", [scaled, low, high], width)
        both = [self._norm(embeddings, "embedding_norm"), self._norm(clipped, "state_norm")]
        joined = self._op("Concat", both, self.shape.embedding + width, axis=-1)
        return self._matmul(joined, "fuse")

    def _attention(self, z: ir.Value, pages: list[ir.Value], places: list[ir.Value]) -> tuple[ir.Value, list[ir.Value]]:
        heads, kv_heads, block = self.shape.heads, self.shape.kv_heads, self.block
        h = self._norm(z, "attention_norm")
        query, key, value = (self._heads(self._matmul(h, name)) for name in "qkv")
        query, key = self._rotated(query, heads), self._rotated(key, kv_heads)
        attributes = {
            "layer": 0,
            "num_heads": heads,
            "kv_num_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "scale": HEAD_DIM**-0.5,
        }
        types = [(FLOAT, [1, ROWS, heads, HEAD_DIM]), *((FLOAT, page.shape) for page in pages)]
        inputs = [query, key, value, *pages, *places, None, None]
        attended, *written = block.ops(OP_ATTENTION, inputs, attributes, domain=DOMAIN, types=types)
        merge = block.weights.integers("merge_heads", [0, 0, -1])
        merged = block.op("Reshape", [attended, merge], dtype=FLOAT, shape=[1, ROWS, heads * HEAD_DIM])
        return merged, written

    def _heads(self, value: ir.Value) -> ir.Value:
        """[1, heads, N, HEAD_DIM] of [1, N, heads * HEAD_DIM]."""
        heads = present(last_dim(value)) // HEAD_DIM
        split = self.block.weights.integers(f"split_{heads}", [0, 0, heads, HEAD_DIM])
        value = self.block.op("Reshape", [value, split], dtype=FLOAT, shape=[1, ROWS, heads, HEAD_DIM])
        shape = [1, heads, ROWS, HEAD_DIM]
        return self.block.op("Transpose", [value], {"perm": [0, 2, 1, 3]}, dtype=FLOAT, shape=shape)

    def _rotated(self, value: ir.Value, heads: int) -> ir.Value:
        frequencies = ROTARY_BASE ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = np.outer(np.arange(self.max_tokens), frequencies)
        tables = [
            self.block.weights.float32(f"rotary_{name}", function(angles))
            for name, function in (("cos", np.cos), ("sin", np.sin))
        ]
        inputs = [value, *tables, self.positions]
        return self.block.op("RotaryEmbedding", inputs, dtype=FLOAT, shape=[1, heads, ROWS, HEAD_DIM])

    def _gated(self, h: ir.Value) -> ir.Value:
        gate, up = (self._matmul(h, name) for name in ("gate", "up"))
        sigmoid = self._op("Sigmoid", [gate], self.shape.mlp, LAST)
        return self._op("Mul", [self._op("Mul", [gate, sigmoid], self.shape.mlp, LAST), up], self.shape.mlp, LAST)

    def _head(self, h: ir.Value) -> ir.Value:
        logits = self._matmul(h, "head")
        if self.drafter.bias is None:
            return logits
        return self._add(logits, self.block.weights.float32("bias", self.drafter.bias))

    def _next_states(self, z: ir.Value) -> ir.Value:
        scaled = self._op("Mul", [z, self._array("scale")], self.shape.state, LAST)
        return self._op("Add", [scaled, self._array("center")], self.shape.state, LAST)

    # --- operators ---------------------------------------------------------------------------------------------------

    def _op(
        self, op_type: str, inputs: list[ir.Value], width: int, tokens: str = ROWS, **attributes: float | int
    ) -> ir.Value:
        return self.block.op(op_type, inputs, attributes, dtype=FLOAT, shape=[1, tokens, width])

    def _array(self, name: str) -> ir.Value:
        return self.block.weights.float32(name, self.drafter.arrays[name])

    def _matmul(self, x: ir.Value, name: str) -> ir.Value:
        attributes = {"weights": [name]}
        shape = [*dims(x)[:2], len(self.matrices[name])]
        return self.block.op(OP_QUANTIZED_MATMUL, [x], attributes, domain=DOMAIN, dtype=FLOAT, shape=shape)

    def _norm(self, x: ir.Value, name: str) -> ir.Value:
        attributes = {"axis": -1, "epsilon": EPSILON}
        return self.block.op("RMSNormalization", [x, self._array(name)], attributes, dtype=FLOAT, shape=dims(x))

    def _add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.block.op("Add", [a, b], dtype=FLOAT, shape=a.shape)

    def _last(self, x: ir.Value, last: ir.Value) -> ir.Value:
        """The rows `last` [m] of x [1, N, W]."""
        shape = [1, LAST, last_dim(x)]
        return self.block.op("Gather", [x, last], {"axis": 1}, dtype=FLOAT, shape=shape)

    def _squeeze(self, x: ir.Value, width: int) -> ir.Value:
        axis = self.block.weights.integers("axis_0", [0])
        return self.block.op("Squeeze", [x, axis], dtype=FLOAT, shape=[LAST, width])
