"""Keeps the K/V of texts for requests that begin with the same tokens: exact, bounded, least recently used out first.

Texts are cut into blocks of BLOCK_TOKENS tokens, which form a tree: the path to a block is the text so far. Token ids
are compared, not their hashes. The K/V are those of full depth, whatever the mode of the request that they come from:
positions that a deep segment has not run over are not cached, and where K/V are propagated only prompts are. They
depend on the text alone, so that one cache serves every mode and threshold.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tide_export.bundle.manifest import PROPAGATE, Manifest
from tide_export.errors import GenerationError
from tide_export.runtime.sequence import Batch, KvBatch

BLOCK_TOKENS = 16
ROOT = 0

Key = tuple[int, bytes]  # the number of the block before, and the token ids


class _Block(NamedTuple):
    number: int  # of its own: never used again
    kv: np.ndarray


class PrefixCache:
    """K/V of the texts of a batch's sequences. Serves one thread at a time.

    Attributes:
        bytes: of K/V that it holds.
    """

    def __init__(self, batch: KvBatch, max_bytes: int, propagates: bool) -> None:
        """An empty cache of at most `max_bytes`; `propagates`: whether the K/V of a token depend on its exit."""
        self._batch, self._max_bytes, self._propagates = batch, max_bytes, propagates
        self.bytes = 0
        # Least recently used first, and every block before the one that precedes it in a text: the first block has none
        # after it.
        self._blocks = OrderedDict[Key, _Block]()
        self._numbers = ROOT

    def begin(self, slot: int, prompt: np.ndarray) -> int:
        """Begins the empty sequence in a slot with as much of its prompt (int64 [n]) as is cached, and returns how many
        tokens these are. The last token is left to be run: it gives the first logits. Where K/V are propagated, two
        are: a step over one could exit.

        Raises:
            GenerationError: no memory. The sequence is as it was.
        """
        path = list(self._path(prompt))
        self._use(path)
        length = min(len(path) * BLOCK_TOKENS, len(prompt) - 1 - self._propagates)
        if length <= 0:
            return 0
        blocks = [self._blocks[key].kv for key in path[: -(-length // BLOCK_TOKENS)]]
        self._batch.write_kv(slot, blocks, length)
        return length

    def keep(self, slot: int, prompt: np.ndarray, tokens: Sequence[int] = ()) -> None:
        """Caches a prompt and the tokens after it, as far as the sequence in a slot holds their K/V and there is room.

        Raises:
            GenerationError: no memory. The blocks before stay cached.
        """
        held = self._batch.sequences[slot].lengths[-1]
        text = np.concatenate([prompt, np.asarray(tokens, prompt.dtype)])
        text = text[: min(held, len(prompt)) if self._propagates else held]
        path = list(self._path(text))
        self._use(path)
        try:
            for start in range(len(path) * BLOCK_TOKENS, len(text) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
                kv = self._batch.read_kv(slot, start, start + BLOCK_TOKENS)
                if not self._make_room(kv.nbytes, len(path)):
                    return
                key = self._blocks[path[-1]].number if path else ROOT, _tokens(text, start)
                self._numbers += 1
                self._blocks[key] = _Block(self._numbers, kv)
                self.bytes += kv.nbytes
                path.append(key)
        finally:
            self._use(path)

    def _path(self, ids: np.ndarray) -> Iterator[Key]:
        """The keys of the longest beginning of a text that is cached."""
        number = ROOT
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            key = number, _tokens(ids, start)
            block = self._blocks.get(key)
            if block is None:
                return
            yield key
            number = block.number

    def _use(self, path: Sequence[Key]) -> None:
        for key in reversed(path):
            self._blocks.move_to_end(key)

    def _make_room(self, size: int, kept: int) -> bool:
        """Drops blocks, but none of the `kept` most recently used, until `size` more bytes fit; returns whether they
        do."""
        while self.bytes + size > self._max_bytes:
            if len(self._blocks) == kept:
                return False
            _, dropped = self._blocks.popitem(last=False)
            self.bytes -= dropped.kv.nbytes
        return True


def _tokens(ids: np.ndarray, start: int) -> bytes:
    return ids[start : start + BLOCK_TOKENS].tobytes()


def open_prefix_cache(manifest: Manifest, batch: Batch, max_bytes: int) -> PrefixCache | None:
    """A cache of at most `max_bytes` for a batch; None: of 0.

    Raises:
        GenerationError: the K/V of the batch cannot be copied, or not one block has room.
    """
    if not max_bytes:
        return None
    if not isinstance(batch, KvBatch):
        raise GenerationError(
            "prefix_cache_bytes is for provider 'cpu': the K/V of other providers cannot be copied, so leave it at 0"
        )
    block = BLOCK_TOKENS * manifest.kv_token_bytes
    if max_bytes < block:
        raise GenerationError(f"prefix_cache_bytes is {max_bytes}, and the K/V of {BLOCK_TOKENS} tokens have {block}")
    return PrefixCache(batch, max_bytes, manifest.kv_cache_strategy == PROPAGATE)
