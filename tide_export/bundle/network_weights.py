"""Reads the stored weights of each segment network from its ONNX file, without the package onnx.

A network's file refers to its weights of 1 kB and more by their offset in one file that all networks share. Equal
weights of two networks have the same offset, and plans built from them both hold a copy. The embedding that they
take as an input is in no plan and on the GPU once.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tide_export.bundle.file_names import EMBEDDING_FILE, network_file
from tide_export.bundle.opened import ADVICE, Bundle
from tide_export.errors import BundleError
from tide_export.names.networks import AFTER_SEGMENTS, HEAD, segment_name

# Numbers of the fields in onnx.proto (github.com/onnx/onnx).
MODEL_GRAPH = 7
GRAPH_NODE, GRAPH_INITIALIZER = 1, 5
NODE_INPUT, NODE_OP_TYPE, NODE_ATTRIBUTE = 1, 4, 5
ATTRIBUTE_NAME, ATTRIBUTE_FLOAT, ATTRIBUTE_INTEGER = 1, 2, 3
TENSOR_DIMS, TENSOR_NAME, TENSOR_EXTERNAL_DATA = 1, 8, 13
ENTRY_KEY, ENTRY_VALUE = 1, 2
# Inputs of operators that read a few rows of a table, and not all of it.
ROWS_OF = {("Gather", 0), ("RotaryEmbedding", 1), ("RotaryEmbedding", 2), ("GatherBlockQuantized", 0)}
ROWS_OF |= {("GatherBlockQuantized", 2), ("GroupQueryAttention", 7), ("GroupQueryAttention", 8)}


SHARED = -1  # offset of the input EMBEDDING


@dataclass(frozen=True)
class StoredWeight:
    """A weight in the file that the networks share."""

    offset: int  # in bytes, in that file; SHARED: it is the input EMBEDDING
    size: int  # in bytes
    is_table: bool  # a run reads a row of it per token: an embedding, rotary tables
    is_gathered: bool  # a table of matrices, of which a run reads those of the token's experts


@dataclass(frozen=True)
class NetworkWeights:
    """The weights of one network."""

    weights: tuple[StoredWeight, ...]
    attentions: int  # attention operators; layers with softcaps, sinks or biases have none, but matmuls

    @property
    def size(self) -> int:
        """The bytes of all weights."""
        return sum(weight.size for weight in self.weights)

    @property
    def shared_size(self) -> int:
        """The bytes of the embedding that its plan takes as an input."""
        return sum(weight.size for weight in self.weights if weight.offset == SHARED)

    @property
    def table_size(self) -> int:
        """The bytes of tables."""
        return sum(weight.size for weight in self.weights if weight.is_table)


def network_weights(bundle: Bundle) -> dict[str, NetworkWeights]:
    """Returns network name -> weights, of every segment and AFTER_SEGMENTS.

    Empty without segment networks.

    Raises:
        BundleError: a network's file is no ONNX file, or cannot be read.
    """
    if bundle.manifest.networks is None:
        return {}
    found = {}
    for name in (*(segment_name(k) for k in range(len(bundle.manifest.segment_sizes))), *AFTER_SEGMENTS):
        file = bundle.file(network_file(name))
        try:
            found[name] = parse_network(file.read_bytes())
        except (ValueError, LookupError):
            raise BundleError(f"bundle file '{file.path}' is no ONNX network; {ADVICE}") from None
    shared = bundle.manifest.networks.embedding
    if shared is not None:
        size = bundle.manifest.files[EMBEDDING_FILE].size
        for name in (segment_name(0), HEAD) if shared.tied else (segment_name(0),):
            weight = StoredWeight(SHARED, size, is_table=name != HEAD, is_gathered=False)
            found[name] = replace(found[name], weights=(*found[name].weights, weight))
    return found


def held_size(networks: dict[str, NetworkWeights]) -> int:
    """Returns the bytes of weights on the GPU: all networks' weights, and the shared embedding once."""
    shared = max((network.shared_size for network in networks.values()), default=0)
    return shared + sum(network.size - network.shared_size for network in networks.values())


def repeated_size(networks: dict[str, NetworkWeights]) -> int:
    """Returns the bytes of weights that are copies of another plan's: plans share no constants."""
    held = (weight for network in networks.values() for weight in network.weights if weight.offset != SHARED)
    places = Counter((weight.offset, weight.size) for weight in held)
    return sum(size * (count - 1) for (_, size), count in places.items())


def parse_network(content: bytes) -> NetworkWeights:
    """Reads one network.

    Raises:
        ValueError, LookupError: it is not an ONNX file.
    """
    stored: dict[str, tuple[int, int, int]] = {}  # offset, size and rank
    readers = defaultdict[str, set[tuple[str, int]]](set)
    attentions = 0
    for graph in messages(content, MODEL_GRAPH):
        for tensor in messages(graph, GRAPH_INITIALIZER):
            entries = {
                text(entry, ENTRY_KEY): text(entry, ENTRY_VALUE) for entry in messages(tensor, TENSOR_EXTERNAL_DATA)
            }
            if entries:
                rank = sum(number == TENSOR_DIMS for number, _ in fields(tensor))
                stored[text(tensor, TENSOR_NAME)] = (int(entries.get("offset", 0)), int(entries["length"]), rank)
        for node in messages(graph, GRAPH_NODE):
            op_type = text(node, NODE_OP_TYPE)
            attentions += op_type in ("Attention", "GroupQueryAttention")
            for index, read in enumerate(messages(node, NODE_INPUT)):
                readers[read.decode()].add((op_type, index))
    weights = []
    for name, (offset, size, rank) in stored.items():
        by_rows = readers[name] <= ROWS_OF
        weights.append(StoredWeight(offset, size, by_rows and rank <= 2, by_rows and rank > 2))
    return NetworkWeights(tuple(weights), attentions)


def messages(content: bytes, number: int) -> list[bytes]:
    """Returns the values of one field of a protobuf message that are messages or texts."""
    return [value for field, value in fields(content) if field == number and isinstance(value, bytes)]


def text(content: bytes, number: int) -> str:
    """Returns the last value of a text field; empty if there is none."""
    return (messages(content, number) or [b""])[-1].decode()


def fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields number and value of each field of a message (protobuf.dev/programming-guides/encoding)."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(content, at)
        else:
            size, at = _varint(content, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value, at = content[at : at + size], at + size
        if at > len(content):
            raise ValueError("a field ends after its message")
        yield key >> 3, value


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Returns the number at an offset, and the offset after it."""
    value = shift = 0
    while content[at] & 0x80:
        value |= (content[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | content[at] << shift, at + 1
