"""Attention nodes over pages, and random runs of them: pages in any order, and NaN in all that no token has filled."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from ort_sessions import register_operators

from tide_export.bundle.manifest import SCALE_BYTES
from tide_export.names import DOMAIN

OPERATORS = {False: "TidePagedAttention", True: "TideInt8PagedAttention"}
ORDER = [
    *("query", "key", "value", "key_pages", "value_pages", "page_table", "lengths", "starts"),
    *("cos", "sin", "bias", "sinks"),
]
LONGEST = 1100  # rows of the tables
DTYPES = {"page_table": ir.DataType.INT32, "lengths": ir.DataType.INT64, "starts": ir.DataType.INT64}
Arrays = dict[str, np.ndarray]


def packed(rows: np.ndarray) -> np.ndarray:
    """Rows [.., D] as int8 [.., D + 4]: numbers and their scale."""
    largest = np.abs(rows).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.concatenate([np.rint(rows * inverse).astype(np.int8), (largest / np.float32(127)).view(np.int8)], -1)


def unpacked(rows: np.ndarray) -> np.ndarray:
    """What `packed` rows stand for."""
    return rows[..., :-SCALE_BYTES] * np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)


@dataclass(frozen=True)
class Node:
    """One attention node. Forms: "apart", "packed", "query" (writes nothing) and "keys" (does not attend)."""

    int8: bool = False
    form: str = "apart"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotation: str = ""  # or "halves", "pairs"
    starts: bool = True
    bias: bool = False
    sinks: bool = False
    window: int = -1
    softcap: float = 0.0
    scale: float = 0.0

    @property
    def row(self) -> int:
        """Numbers of a row of pages."""
        return self.head_dim + SCALE_BYTES * self.int8

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """Rows of floats as pages have them."""
        return packed(rows) if self.int8 else rows

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Rows of pages as floats."""
        return unpacked(rows) if self.int8 else rows

    def tables(self) -> Arrays:
        """The inputs that do not depend on sequences."""
        rng, half = np.random.default_rng(5), self.head_dim // 2
        angles = np.outer(np.arange(LONGEST), 100.0 ** (-np.arange(half) / half))
        tables = {"cos": np.cos(angles), "sin": np.sin(angles)} if self.rotation else {}
        if self.bias:
            tables["bias"] = np.outer(0.5 ** np.arange(self.heads), np.arange(LONGEST)) / 16
        if self.sinks:
            tables["sinks"] = rng.normal(size=self.heads)
        return {name: np.ascontiguousarray(table, np.float32) for name, table in tables.items()}


@cache
def session(node: Node, names: tuple[str, ...], threads: int = 1) -> ort.InferenceSession:
    """The node alone, with inputs of these names."""
    page = ir.DataType.INT8 if node.int8 else ir.DataType.FLOAT

    def value(name: str) -> ir.Value:
        dtype = page if name.endswith("pages") else DTYPES.get(name, ir.DataType.FLOAT)
        rank = 4 if name.endswith("pages") else 1 if name in ("lengths", "starts", "sinks") else 2
        return ir.Value(
            name=name,
            type=ir.TensorType(dtype),
            shape=ir.Shape([None] * (3 if name in ("query", "key", "value", "output") else rank)),
        )

    values = {name: value(name) for name in ORDER if name in names}
    attributes: dict[str, Any] = {"num_heads": node.heads, "kv_num_heads": node.kv_heads, "scale": node.scale}
    attributes |= {"softcap": node.softcap, "local_window_size": node.window}
    attributes["rotary_interleaved"] = int(node.rotation == "pairs")
    outputs = ["output"] if node.form == "query" else ["output", "new_key_pages", "new_value_pages"]
    inner = ir.node(
        OPERATORS[node.int8],
        [values.get(name) for name in ORDER],
        attributes=attributes,
        domain=DOMAIN,
        outputs=[value(name) for name in outputs],
    )
    graph = ir.Graph(list(values.values()), inner.outputs, nodes=[inner], opset_imports={"": 23, DOMAIN: 1}, name="one")
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, threads
    register_operators(options)
    return ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString(), options)


def run(node: Node, inputs: Arrays, threads: int = 1) -> list[np.ndarray]:
    """The outputs of the operator."""
    return session(node, tuple(name for name in ORDER if name in inputs), threads).run(None, inputs)


@dataclass(frozen=True)
class Text:
    """One sequence: heads of all its tokens, [tokens, heads, head_dim]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    past_key: np.ndarray  # as they would have been stored before: rotated
    past_value: np.ndarray

    def cut(self, length: int) -> "Text":
        """The first tokens."""
        return Text(*(array[:length] for array in vars(self).values()))


def texts(node: Node, lengths: list[int], seed: int) -> list[Text]:
    """Random sequences."""
    rng = np.random.default_rng(seed)

    def heads(length: int, count: int) -> np.ndarray:
        return rng.standard_normal((length, count, node.head_dim), dtype=np.float32)

    return [Text(heads(length, node.heads), *(heads(length, node.kv_heads) for _ in range(4))) for length in lengths]


def inputs_of(node: Node, sequences: list[Text], counts: list[int], page_tokens: int, seed: int = 0) -> Arrays:
    """A run of the sequences' last `counts` tokens; pages are in random order, with more than are needed."""
    rng = np.random.default_rng(seed)
    lengths = [len(text.query) for text in sequences]
    pages = [-(-length // page_tokens) for length in lengths]
    ids = rng.permutation(sum(pages) + 3).astype(np.int32)
    table = np.full((len(lengths), max([*pages, 1]) + 1), -7, np.int32)
    pools = {}
    for kind in ("key", "value"):
        pool = np.full((len(ids), node.kv_heads, page_tokens, node.head_dim), np.nan, np.float32)
        pools[kind] = packed(np.nan_to_num(pool)) if node.int8 else pool
        if node.int8:
            pools[kind][...] = -1  # its scales are NaN
    taken = 0
    for row, (text, count, needed) in enumerate(zip(sequences, counts, pages, strict=True)):
        table[row, :needed] = ids[taken : taken + needed]
        taken += needed
        known = len(text.query) - (0 if node.form == "query" else count)
        for position in range(known):
            at = table[row, position // page_tokens], slice(None), position % page_tokens
            pools["key"][at] = node.stored(text.past_key[position])
            pools["value"][at] = node.stored(text.past_value[position])

    def new(kind: str) -> np.ndarray:
        rows = [getattr(text, kind)[len(text.query) - count :] for text, count in zip(sequences, counts, strict=True)]
        heads = node.heads if kind == "query" else node.kv_heads
        return np.concatenate(rows).reshape(1, sum(counts), heads * node.head_dim)

    names = {"query": ["query"], "keys": ["key", "value"]}.get(node.form, ["query", "key", "value"])
    inputs = {name: new(name) for name in names}
    if node.form == "packed":
        inputs = {"query": np.concatenate(list(inputs.values()), -1)}
    inputs |= {"key_pages": pools["key"], "value_pages": pools["value"], "page_table": table}
    inputs["lengths"] = np.array(lengths, np.int64)
    if node.starts:
        inputs["starts"] = np.cumsum([0, *counts], dtype=np.int64)
    return inputs | node.tables()


def rotated(node: Node, heads: np.ndarray, positions: np.ndarray, tables: Arrays) -> np.ndarray:
    """Heads [N, .., head_dim] rotated by their positions."""
    if not node.rotation:
        return heads
    cos, sin = (tables[name][positions][:, None] for name in ("cos", "sin"))
    result, half = np.empty_like(heads), node.head_dim // 2
    first, second = (
        (slice(half), slice(half, None)) if node.rotation == "halves" else (slice(0, None, 2), slice(1, None, 2))
    )
    result[..., first] = heads[..., first] * cos - heads[..., second] * sin
    result[..., second] = heads[..., second] * cos + heads[..., first] * sin
    return result


def expected(node: Node, inputs: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The outputs as numpy computes them: attention in float64."""
    pages = {kind: inputs[f"{kind}_pages"].copy() for kind in ("key", "value")}
    page_tokens, group = pages["key"].shape[2], node.heads // node.kv_heads
    sizes = [node.heads] * ("query" in inputs) + [node.kv_heads] * (2 * (node.form != "query"))
    joined = np.concatenate([inputs[name] for name in ("query", "key", "value") if name in inputs], -1)[0]
    heads = np.split(joined.reshape(len(joined), sum(sizes), node.head_dim), np.cumsum(sizes)[:-1], 1)
    output = np.zeros((len(joined), node.heads if "query" in inputs else 0, node.head_dim))
    starts = inputs.get("starts", np.array([0, len(joined)]))
    for table, length, begin, end in zip(inputs["page_table"], inputs["lengths"], starts[:-1], starts[1:], strict=True):
        positions = np.arange(length - (end - begin), length)
        if node.form != "query":
            key, value = rotated(node, heads[-2][begin:end], positions, inputs), heads[-1][begin:end]
            for kind, rows in (("key", key), ("value", value)):
                pages[kind][table[positions // page_tokens], :, positions % page_tokens] = node.stored(rows)
        if "query" not in inputs or begin == end:
            continue
        every = np.arange(length)
        keys, values = (
            np.repeat(node.read(pages[kind][table[every // page_tokens], :, every % page_tokens]), group, 1)
            for kind in ("key", "value")
        )
        query = rotated(node, heads[0][begin:end], positions, inputs).astype(np.float64)
        scores = np.einsum("nhd,khd->hnk", query, keys) * (node.scale or node.head_dim**-0.5)
        if node.softcap:
            scores = node.softcap * np.tanh(scores / node.softcap)
        if "bias" in inputs:
            scores += inputs["bias"][:, None, :length] - inputs["bias"][:, positions, None]
        distance = positions[:, None] - every
        scores[:, (distance < 0) | (distance >= (node.window if node.window > 0 else length))] = -np.inf
        sinks = inputs["sinks"][:, None, None] if "sinks" in inputs else np.full((node.heads, 1, 1), -np.inf)
        largest = np.maximum(scores.max(-1, keepdims=True), sinks)
        weights = np.exp(scores - largest)
        weights /= weights.sum(-1, keepdims=True) + np.exp(sinks - largest)
        output[begin:end] = np.einsum("hnk,khd->nhd", weights, values)
    return output.reshape(1, len(joined), output.shape[1] * node.head_dim), pages["key"], pages["value"]


def one_by_one(node: Node, text: Text, count: int, page_tokens: int) -> np.ndarray:
    """The output of a sequence's last `count` tokens, each computed in a run of its own."""
    inputs = inputs_of(node, [text], [count], page_tokens)
    rows = []
    for token in range(count):
        step = {name: inputs[name][:, token : token + 1] for name in ("query", "key", "value") if name in inputs}
        step["lengths"] = np.array([len(text.query) - count + token + 1], np.int64)
        if node.starts:
            step["starts"] = np.array([0, 1], np.int64)
        output, *pages = run(node, inputs | step)
        rows.append(output)
        inputs |= dict(zip(("key_pages", "value_pages"), pages, strict=False))
    return np.concatenate(rows, 1)
