"""Attention nodes over pages, and random runs of them: pages in any order, and NaN in all that no token has filled."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from ort_sessions import opened
from paged_attention_numpy import Arrays, Case, int8_rows, one_node

from tide_export.bundle.manifest import FLOAT32_KV, INT8_KV
from tide_export.graph.rewriting import FLOAT, INT32, INT64, typed_value
from tide_export.lower.onnxruntime.paged_attention import INPUTS, OUTPUTS, Form
from tide_export.names.operators import DOMAIN, OP_PAGED_ATTENTION
from tide_export.runtime.native import LIBRARY

LONGEST = 1100  # rows of the tables
TYPES = {"page_table": INT32, "lengths": INT64, "starts": INT64}
BY_TOKEN = ("query", "key", "value", "distance_bias")
NEW = {Form.READING: ("query",)}  # inputs; else all three


@dataclass(frozen=True)
class Node:
    """One attention node."""

    int8: bool = False
    form: Form = Form.APART
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotation: str = ""  # or "halves", "pairs"
    rotated: float = 1.0  # share of a head
    starts: bool = True
    bias: bool = False
    sinks: bool = False
    extent: int = 0  # distances that have a bias
    window: int = -1
    softcap: float = 0.0
    scale: float = 0.0
    library: Path = field(default=LIBRARY, repr=False)  # with the operator

    @property
    def kv_cache(self) -> str:
        return INT8_KV if self.int8 else FLOAT32_KV

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """Rows of floats as pages have them."""
        return int8_rows(rows) if self.int8 else rows

    def attributes(self) -> dict[str, int | float]:
        pairs = int(self.rotation == "pairs")
        given = {"softcap": self.softcap, "local_window_size": self.window, "rotary_interleaved": pairs}
        if self.rotated < 1:
            given["rotary_embedding_dim"] = int(self.head_dim * self.rotated)
        return {"scale": self.scale, **given}

    def tables(self) -> Arrays:
        """The inputs that do not depend on sequences."""
        rng, half = np.random.default_rng(5), int(self.head_dim * self.rotated) // 2
        angles = np.outer(np.arange(LONGEST), 100.0 ** (-np.arange(half) / half))
        tables = {"cos": np.cos(angles), "sin": np.sin(angles)} if self.rotation else {}
        if self.bias:
            tables["bias"] = np.outer(0.5 ** np.arange(self.heads), np.arange(LONGEST)) / 16
        if self.sinks:
            tables["sinks"] = rng.normal(size=self.heads)
        return {name: np.ascontiguousarray(table, np.float32) for name, table in tables.items()}


@lru_cache(maxsize=8)
def session(node: Node, names: tuple[str, ...], threads: int = 1) -> ort.InferenceSession:
    """The operator, with inputs of these names, which need not fit each other."""
    page = ir.DataType.INT8 if node.int8 else FLOAT
    ranks = dict.fromkeys((*BY_TOKEN, "output"), 3) | dict.fromkeys(("lengths", "starts", "sinks"), 1)

    def value(name: str) -> ir.Value:
        pages = name.endswith("pages")
        return typed_value(
            name, page if pages else TYPES.get(name, FLOAT), [None] * (4 if pages else ranks.get(name, 2))
        )

    values = {name: value(name) for name in INPUTS if name in names}
    outputs = [value(name) for name in OUTPUTS[: 1 if node.form == Form.READING else 3]]
    attributes = {"num_heads": node.heads, "kv_num_heads": node.kv_heads, **node.attributes()}
    inputs, op_type = [values.get(name) for name in INPUTS], OP_PAGED_ATTENTION[node.kv_cache]
    nodes = [ir.node(op_type, inputs, attributes=attributes, domain=DOMAIN, outputs=outputs)]
    graph = ir.Graph(list(values.values()), outputs, nodes=nodes, opset_imports={"": 23, DOMAIN: 1}, name="one")
    return opened(ir.Model(graph, ir_version=11), threads=threads, library=node.library)


def run(node: Node, inputs: Arrays, threads: int = 1) -> list[np.ndarray]:
    """The outputs of the operator."""
    return session(node, tuple(name for name in INPUTS if name in inputs), threads).run(None, inputs)


@lru_cache(maxsize=8)
def _function(node: Node, inputs: "_Inputs") -> ort.InferenceSession:
    case = Case(inputs.arrays, node.heads, node.kv_heads, node.kv_cache, node.attributes())
    return opened(one_node(case), threads=1, operators=False)


class _Inputs:
    """Inputs that are as good as others of the same names."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays, self.names = arrays, tuple(arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inputs) and self.names == other.names

    def __hash__(self) -> int:
        return hash(self.names)


def defined(node: Node, inputs: Arrays) -> list[np.ndarray]:
    """The outputs as the function defines them, which ONNX Runtime computes without the operator."""
    return _function(node, _Inputs(inputs)).run(None, inputs)


@dataclass(frozen=True)
class Text:
    """One sequence: heads of all its tokens, [tokens, heads, head_dim]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    distance_bias: np.ndarray  # [tokens, heads, extent]
    past_key: np.ndarray  # as they would have been stored before: rotated
    past_value: np.ndarray


def texts(node: Node, lengths: list[int], seed: int) -> list[Text]:
    """Random sequences."""
    rng = np.random.default_rng(seed)

    def text(length: int) -> Text:
        sizes = [(node.heads, node.head_dim), *[(node.kv_heads, node.head_dim)] * 4, (node.heads, node.extent)]
        query, key, value, *past, bias = (rng.standard_normal((length, *size), dtype=np.float32) for size in sizes)
        return Text(query, key, value, bias, *past)

    return [text(length) for length in lengths]


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
        pools[kind] = int8_rows(np.nan_to_num(pool)) if node.int8 else pool
        if node.int8:
            pools[kind][...] = -1  # its scales are NaN
    taken = 0
    for row, (text, count, needed) in enumerate(zip(sequences, counts, pages, strict=True)):
        table[row, :needed] = ids[taken : taken + needed]
        taken += needed
        known = len(text.query) - (0 if node.form == Form.READING else count)
        positions = np.arange(known)
        at = table[row, positions // page_tokens], slice(None), positions % page_tokens
        pools["key"][at] = node.stored(text.past_key[:known])
        pools["value"][at] = node.stored(text.past_value[:known])

    def new(kind: str) -> np.ndarray:
        rows = [getattr(text, kind)[len(text.query) - count :] for text, count in zip(sequences, counts, strict=True)]
        return np.concatenate(rows).reshape(1, sum(counts), np.prod(rows[0].shape[1:]))

    inputs = {name: new(name) for name in NEW.get(node.form, INPUTS[:3])}
    if node.form == Form.PACKED:
        inputs = {"query": np.concatenate(list(inputs.values()), -1)}
    if node.extent:
        inputs["distance_bias"] = new("distance_bias")
    inputs |= {"key_pages": pools["key"], "value_pages": pools["value"], "page_table": table}
    inputs["lengths"] = np.array(lengths, np.int64)
    if node.starts:
        inputs["starts"] = np.cumsum([0, *counts], dtype=np.int64)
    return inputs | node.tables()


def one_by_one(node: Node, text: Text, count: int, page_tokens: int) -> np.ndarray:
    """The output of a sequence's last `count` tokens, each computed in a run of its own."""
    inputs = inputs_of(node, [text], [count], page_tokens)
    rows = []
    for token in range(count):
        step = {name: inputs[name][:, token : token + 1] for name in BY_TOKEN if name in inputs}
        step["lengths"] = np.array([len(text.query) - count + token + 1], np.int64)
        if node.starts:
            step["starts"] = np.array([0, 1], np.int64)
        output, *pages = run(node, inputs | step)
        rows.append(output)
        inputs |= dict(zip(("key_pages", "value_pages"), pages, strict=False))
    return np.concatenate(rows, 1)
