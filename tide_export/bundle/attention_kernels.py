"""Says which attention kernel ONNX Runtime's CUDA provider takes for the networks of a bundle.

The rules are those of GroupQueryAttention in onnxruntime 1.31, on GPUs of compute capability 8.0 or newer: one token a
sequence is decoded by XQA where that has the size of heads and groups and there is no softcap
(github.com/microsoft/onnxruntime, pull requests 29046, 29162 and 29177); all else by Flash up to its size of heads.
"""

import struct
from collections.abc import Mapping

from tide_export.bundle.file_names import network_file
from tide_export.bundle.network_weights import (
    ATTRIBUTE_FLOAT,
    ATTRIBUTE_INTEGER,
    ATTRIBUTE_NAME,
    GRAPH_NODE,
    MODEL_GRAPH,
    NODE_ATTRIBUTE,
    NODE_INPUT,
    NODE_OP_TYPE,
    fields,
    messages,
    text,
)
from tide_export.bundle.opened import Bundle
from tide_export.names.networks import segment_name

XQA_HEADS, XQA_GROUPS = (64, 128, 256), (1, 2, 4, 5, 8, 16, 32)
FLASH_HEADS, EFFICIENT_HEADS = 256, 1024  # largest
PAST_KEY = 3  # the input


def attention_kernel(head_dim: int, group: int, softcap: bool = False) -> str:
    """Returns the kernel that attends with one new token a sequence.

    Args:
        head_dim: numbers of a head.
        group: query heads that read one K/V head.
        softcap: whether scores are capped.
    """
    if head_dim in XQA_HEADS and group in XQA_GROUPS and not softcap:
        return "XQA"
    if head_dim <= FLASH_HEADS:
        return "Flash"
    return "Efficient" if head_dim <= EFFICIENT_HEADS else "unfused"


def attention_kernels(bundle: Bundle) -> list[dict[str, int | str | bool]]:
    """Returns the kinds of attention in a bundle's networks for CUDA, with layers and kernel of each."""
    found: dict[tuple[int, int, bool], int] = {}
    for k in range(len(bundle.manifest.segment_sizes)):
        content = bundle.file(network_file(segment_name(k))).read_bytes()
        nodes = [node for graph in messages(content, MODEL_GRAPH) for node in messages(graph, GRAPH_NODE)]
        for node in (node for node in nodes if text(node, NODE_OP_TYPE) == "GroupQueryAttention"):
            layer = int(messages(node, NODE_INPUT)[PAST_KEY].decode().split(".")[1])
            attributes = _attributes(node)
            group = int(attributes["num_heads"]) // int(attributes["kv_num_heads"])
            kind = bundle.manifest.model.kv_shapes[layer][1], group, bool(attributes.get("softcap"))
            found[kind] = found.get(kind, 0) + 1
    return [
        {"head_dim": one[0], "group": one[1], "softcap": one[2], "layers": layers, "kernel": attention_kernel(*one)}
        for one, layers in found.items()
    ]


def _attributes(node: bytes) -> Mapping[str, float]:
    """Returns the numbers among a node's attributes."""
    numbers: dict[str, float] = {}
    for attribute in messages(node, NODE_ATTRIBUTE):
        for number, value in fields(attribute):
            if number == ATTRIBUTE_INTEGER and isinstance(value, int):
                numbers[text(attribute, ATTRIBUTE_NAME)] = value
            elif number == ATTRIBUTE_FLOAT and isinstance(value, bytes):
                numbers[text(attribute, ATTRIBUTE_NAME)] = struct.unpack("<f", value)[0]
    return numbers
