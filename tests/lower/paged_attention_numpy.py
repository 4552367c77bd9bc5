"""Paged attention in NumPy, a token after the other, and models of one node that computes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from tide_export.bundle.manifest import INT8_KV
from tide_export.graph.rewriting import FLOAT, INT32, INT64, typed_value
from tide_export.lower.onnxruntime.paged_attention import (
    INPUTS,
    OUTPUTS,
    Form,
    form_of,
    options_of,
    overload,
    paged_attention_function,
)
from tide_export.names.operators import DOMAIN, OP_PAGED_ATTENTION

TYPES = {"page_table": INT32, "lengths": INT64, "starts": INT64}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A node and its inputs, the optional ones among them only if it has them."""

    inputs: Arrays
    num_heads: int
    kv_num_heads: int
    kv_cache: str = "float32"
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def form(self) -> Form:
        if "key" in self.inputs:
            return Form.APART
        alone = self.inputs["query"].shape[-1] == self.num_heads * self.head_dim
        return Form.READING if alone else Form.PACKED

    @property
    def head_dim(self) -> int:
        return self.inputs["key_pages"].shape[-1] - (4 if self.kv_cache == INT8_KV else 0)


def one_node(case: Case, with_function: bool = True) -> onnx.ModelProto:
    """A model of the case's node, with the function that defines it."""
    pages = ir.DataType.INT8 if case.kv_cache == INT8_KV else FLOAT
    types = {"key_pages": pages, "value_pages": pages, **TYPES}
    given = {
        name: typed_value(name, types.get(name, FLOAT), [f"{name}_{axis}" for axis in range(array.ndim)])
        for name, array in case.inputs.items()
    }
    outputs = [
        typed_value(name, types.get(name.removeprefix("new_"), FLOAT), [None] * rank)
        for name, rank in zip(OUTPUTS, (3, 4, 4), strict=True)
    ]
    outputs = outputs[: 1 if case.form == Form.READING else 3]
    heads = {"num_heads": case.num_heads, "kv_num_heads": case.kv_num_heads}
    attributes = [ir.Attr(name, _kind(value), value) for name, value in {**heads, **case.attributes}.items()]
    inputs = [given.get(name) for name in INPUTS]
    name = OP_PAGED_ATTENTION[case.kv_cache]
    node = ir.Node(DOMAIN, name, inputs, attributes, outputs=outputs, name="attention")
    assert form_of(node) == case.form
    options = options_of(node)
    functions = []
    if with_function:
        node.overload = overload(case.form, options)
        functions.append(paged_attention_function(case.kv_cache, case.form, options))
    imports = {"": 23, DOMAIN: 1}
    graph = ir.Graph(list(given.values()), outputs, nodes=[node], opset_imports=imports, name="one_node")
    return ir.serde.serialize_model(ir.Model(graph, ir_version=10, functions=functions))


def _kind(value: object) -> ir.AttributeType:
    return ir.AttributeType.FLOAT if isinstance(value, float) else ir.AttributeType.INT


def expected(case: Case) -> list[np.ndarray]:
    """The node's outputs, attention computed in float64."""
    given = case.inputs
    key_pages, value_pages = given["key_pages"].copy(), given["value_pages"].copy()
    query, key, value = _apart(case)
    tokens, table, lengths = query.shape[1], given["page_table"], given["lengths"]
    starts = given.get("starts", np.array([0, tokens]))
    where = [
        (r, int(lengths[r] - (starts[r + 1] - starts[r]) + i))
        for r in range(len(lengths))
        for i in range(starts[r + 1] - starts[r])
    ]
    size = key_pages.shape[2]
    for token, (r, position) in enumerate(where):
        page, row = table[r, position // size], position % size
        for pages, new, turns in ((key_pages, key, True), (value_pages, value, False)):
            if new is not None:
                rows = new[0, token].reshape(case.kv_num_heads, -1)
                rows = _rotated(case, rows, position) if turns else rows
                pages[page, :, row] = int8_rows(rows) if case.kv_cache == INT8_KV else rows
    stored = [] if case.form == Form.READING else [key_pages, value_pages]
    bias = given.get("distance_bias")
    distances = [None] * tokens if bias is None else bias[0]
    output = [
        _attend(case, query[0, n].reshape(case.num_heads, -1), distances[n], key_pages, value_pages, table[r], position)
        for n, (r, position) in enumerate(where)
    ]
    return [np.array(output, np.float32).reshape(1, tokens, case.num_heads * case.head_dim), *stored]


def _apart(case: Case) -> list[np.ndarray | None]:
    parts = [case.inputs.get(name) for name in ("query", "key", "value")]
    if case.form != Form.PACKED:
        return parts
    width = case.num_heads * case.head_dim
    return list(np.split(parts[0], [width, width + case.kv_num_heads * case.head_dim], axis=-1))


def _attend(
    case: Case,
    queries: np.ndarray,
    distances: np.ndarray | None,
    key_pages: np.ndarray,
    value_pages: np.ndarray,
    table: np.ndarray,
    position: int,
) -> np.ndarray:
    queries = _rotated(case, queries, position).astype(np.float64)
    size, window = key_pages.shape[2], case.attributes.get("local_window_size", -1)
    seen = range(max(0, position + 1 - window) if window > 0 else 0, position + 1)
    outputs = []
    for head, query in enumerate(queries):
        group = head // (case.num_heads // case.kv_num_heads)
        rows = [
            np.array([_floats(case, pages[table[p // size], group, p % size]) for p in seen])
            for pages in (key_pages, value_pages)
        ]
        scores = rows[0] @ query * (case.attributes.get("scale") or case.head_dim**-0.5)
        if cap := case.attributes.get("softcap"):
            scores = np.tanh(scores / cap) * cap
        if (bias := case.inputs.get("bias")) is not None:
            scores += bias[head, list(seen)] - bias[head, position]
        if distances is not None:
            by_distance = distances.reshape(case.num_heads, -1)[head][: len(seen)]
            scores[len(seen) - len(by_distance) :] += by_distance[::-1]
        sink = np.exp(case.inputs["sinks"][head] - scores.max()) if "sinks" in case.inputs else 0
        weights = np.exp(scores - scores.max())
        outputs.append(weights / (weights.sum() + sink) @ rows[1])
    return np.concatenate(outputs)


def _rotated(case: Case, rows: np.ndarray, position: int) -> np.ndarray:
    if "cos" not in case.inputs:
        return rows
    cos, sin = case.inputs["cos"][position], case.inputs["sin"][position]
    rest, rows = rows[:, 2 * len(cos) :], rows[:, : 2 * len(cos)]
    if case.attributes.get("rotary_interleaved"):
        a, b = rows[:, ::2], rows[:, 1::2]
        return np.concatenate([np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(rows.shape), rest], -1)
    a, b = np.split(rows, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], -1)


def int8_rows(rows: np.ndarray) -> np.ndarray:
    """Rows of floats [.., D] as int8 rows [.., D + 4]."""
    largest = np.abs(rows).max(-1, keepdims=True)
    scale = (largest / np.float32(127)).astype("<f4")
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), 0).astype(np.float32)
    return np.concatenate([np.rint(rows * inverse).astype(np.int8), scale.view(np.int8)], -1)


def _floats(case: Case, row: np.ndarray) -> np.ndarray:
    if case.kv_cache != INT8_KV:
        return row.astype(np.float64)
    scale = np.ascontiguousarray(row[-4:]).view("<f4")
    return row[:-4].astype(np.float64) * scale
