"""Runs the networks of a bundle by ONNX Runtime's own operators, one after the other as the runtime does: attention and
all else that `cpp/ops` has is computed by the functions that define it. `verify.step_graph` does so with model.onnx."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from ort_sessions import session_options

from tide_export.bundle.file_names import batch_file
from tide_export.bundle.opened import Bundle
from tide_export.names import batch_networks as names
from tide_export.names import paged
from tide_export.names.networks import HEAD, segment_name

Arrays = dict[str, np.ndarray]


class Pool:
    """K/V pages of every layer that all sequences share, and each sequence's table; pages are taken as they are needed,
    from the last to the first, so that no sequence's are in order."""

    def __init__(self, bundle: Bundle, pages: int = 64, page_tokens: int = 4) -> None:
        manifest = bundle.manifest
        self.page_tokens, self.free = page_tokens, list(range(pages))
        self.arrays: Arrays = {}
        for layer in manifest.model.kv_read(range(manifest.model.num_layers)):
            heads, width = manifest.kv_shape(layer)
            for kind in ("key", "value"):
                shape = (pages, heads, page_tokens, width)
                self.arrays[paged.pages(layer, kind)] = np.zeros(shape, manifest.kv_dtype)

    def extend(self, table: list[int], length: int) -> None:
        """Gives a sequence of `length` tokens the pages that it lacks."""
        while len(table) * self.page_tokens < length:
            table.append(self.free.pop())

    def update(self, outputs: Mapping[str, np.ndarray]) -> None:
        for name, array in outputs.items():
            if name.startswith("new_pages."):
                self.arrays[name.removeprefix("new_")] = array


class Network:
    """A graph, which is fed by name what it asks for."""

    def __init__(self, bundle: Bundle, file: str) -> None:
        options = session_options(1)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
        self.session = ort.InferenceSession(Path(bundle.path / file).read_bytes(), options)
        self.inputs = {entry.name: entry for entry in self.session.get_inputs()}
        self.outputs = [entry.name for entry in self.session.get_outputs()]

    def __call__(self, pool: Pool, feeds: Mapping[str, np.ndarray]) -> Arrays:
        given = {name: feeds.get(name, pool.arrays.get(name)) for name in self.inputs}
        assert all(array is not None for array in given.values()), [name for name in given if given[name] is None]
        outputs = dict(zip(self.outputs, self.session.run(None, given), strict=True))
        pool.update(outputs)
        return outputs


class Batch:
    """Several sequences through the networks of a batch; any of them may have no new tokens in a run."""

    def __init__(self, bundle: Bundle, sequences: int) -> None:
        self.manifest, self.pool = bundle.manifest, Pool(bundle)
        self.tables, self.lengths = [list[int]() for _ in range(sequences)], [0] * sequences
        count = len(self.manifest.checkpoints) + 1
        self.segments = [Network(bundle, batch_file(segment_name(k))) for k in range(count)]
        self.head = Network(bundle, batch_file(HEAD))

    def full(self, ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Logits of all new tokens of each sequence, at full depth."""
        states = self.through(ids, range(len(self.segments)))[names.EXIT_STATES]
        logits = self.head(self.pool, {names.HEAD_STATES: states[None]})[names.LOGITS][0]
        return np.split(logits, np.cumsum([len(new) for new in ids])[:-1])

    def through(self, ids: Sequence[Sequence[int]], segments: range) -> Arrays:
        """What the last of the first `segments` gives for all new tokens; every token asked for its score."""
        feeds = self.places(ids)
        feeds[names.INPUT_IDS] = np.array([[token for new in ids for token in new]])
        tokens = feeds[names.POSITION_IDS].shape[1]
        feeds[names.LAST_TOKENS] = np.arange(tokens)
        feeds[names.SLOT_THRESHOLDS] = np.zeros((tokens, 1), np.float32)
        outputs: Arrays = {}
        for k in segments:
            outputs = self.segments[k](self.pool, feeds)
            feeds[names.HIDDEN_STATES] = outputs.get(names.NEW_HIDDEN_STATES, feeds[names.INPUT_IDS])
        return outputs

    def places(self, ids: Sequence[Sequence[int]]) -> Arrays:
        """Where the new tokens of each sequence are; counts them as its tokens."""
        counts = [len(new) for new in ids]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        for table, length in zip(self.tables, self.lengths, strict=True):
            self.pool.extend(table, length)
        width = max(map(len, self.tables)) + 1
        table = [[*row, *[-1] * (width - len(row))] for row in self.tables]
        positions = [n for length, new in zip(self.lengths, counts, strict=True) for n in range(length - new, length)]
        return {
            names.SEQUENCE_LENGTHS: np.array(self.lengths),
            names.SEQUENCE_STARTS: np.array([0, *np.cumsum(counts)]),
            names.PAGE_TABLE: np.array(table, np.int32),
            names.POSITION_IDS: np.array([positions]),
        }
