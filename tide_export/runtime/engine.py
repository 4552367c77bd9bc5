"""The runtime's front door: `load` a bundle, then `generate` or `stream` tokens from it.

An `Engine` holds what all sequences share (manifest, ONNX Runtime session); all that belongs to one sequence lives in
its `TokenStream`, so any number of threads may generate on one engine at once. `validate` and `bench` use `start` and
drive a `SequenceState` step by step.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tide_export.bundle import Bundle, Manifest, open_bundle
from tide_export.errors import GenerationError
from tide_export.runtime.options import whole_number
from tide_export.runtime.sampling import Sampler
from tide_export.runtime.session import open_session
from tide_export.runtime.state import ROOM, SequenceState
from tide_export.runtime.stats import ExitStats
from tide_export.thresholds import resolve_thresholds

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        tokens: the new token ids; the stop token, if one came, is the last.
        stats: exits, layers run, seconds.
        finish_reason: "stop" (a stop token), "length" (max_new_tokens), "context" (the model's context is full).
    """

    tokens: list[int]
    stats: ExitStats
    finish_reason: FinishReason


def load(
    bundle: str | os.PathLike[str], provider: str = "auto", threads: int | None = None, verify: bool = True
) -> "Engine":
    """Opens a bundle for generation.

    Args:
        bundle: the folder that `tide-export export` wrote.
        provider: "auto" or "cpu".
        threads: threads one step may use; None: one per physical core.
        verify: check the sha256 of every file first (sizes are always checked).

    Raises:
        BundleError: the bundle is missing, damaged or of another release.
        ProviderError: the provider is not to be had.
        ConfigError: threads below 1.
    """
    opened = open_bundle(bundle, verify=verify)
    return Engine(opened, open_session(opened, provider, threads))


class Engine:
    """A loaded bundle. Safe to use from several threads."""

    def __init__(self, bundle: Bundle, session: Any) -> None:
        self.bundle = bundle
        self._session = session

    @property
    def manifest(self) -> Manifest:
        """What the bundle says about itself."""
        return self.bundle.manifest

    def generate(
        self,
        ids: Sequence[int] | np.ndarray,
        max_new_tokens: int = 64,
        *,
        mode: str = "exit",
        threshold: float | Sequence[float] | None = None,
        min_layers: int | None = None,
        max_pending: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Generation:
        """`stream` run to its end: same arguments, same errors."""
        stream = self.stream(
            ids,
            max_new_tokens,
            mode=mode,
            threshold=threshold,
            min_layers=min_layers,
            max_pending=max_pending,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_token_ids=stop_token_ids,
        )
        tokens = list(stream)
        assert stream.finish_reason is not None
        return Generation(tokens, stream.stats, stream.finish_reason)

    def stream(
        self,
        ids: Sequence[int] | np.ndarray,
        max_new_tokens: int = 64,
        *,
        mode: str = "exit",
        threshold: float | Sequence[float] | None = None,
        min_layers: int | None = None,
        max_pending: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> "TokenStream":
        """Checks the request and returns an iterator of new token ids; the model runs as it is read.

        Args:
            ids: the prompt, a flat list of token ids or an integer array [S].
            max_new_tokens: 1 or more.
            mode: "exit" (tokens may leave at a checkpoint) or "full" (the source model, layer for layer).
            threshold: a router score above it exits; one in [0, 1], or one per checkpoint. None: the bundle's.
            min_layers: checkpoints with fewer layers behind them never exit. None: the bundle's.
            max_pending: tokens that may wait before a segment is forced to run; changes speed, never tokens. None: the
                bundle's.
            temperature, top_k, top_p, seed: see `Sampler`; the defaults are greedy.
            stop_token_ids: None: the model's own end-of-sequence ids; an empty list never stops.

        Raises:
            GenerationError: the prompt is empty, holds something that is no token id or is longer than the model's
                context; or an option is out of range.
        """
        manifest = self.manifest
        prompt = _prompt(manifest, ids)
        limit = whole_number("max_new_tokens", max_new_tokens, least=1)
        thresholds = _thresholds(manifest, mode, threshold, min_layers)
        waiting = manifest.max_pending if max_pending is None else whole_number("max_pending", max_pending, least=0)
        sampler = Sampler(temperature, top_k, top_p, seed)
        stop = manifest.model.eos_token_ids if stop_token_ids is None else _token_ids("stop_token_ids", stop_token_ids)
        state = self.start(thresholds, waiting)
        return TokenStream(state, manifest, prompt, limit, sampler, frozenset(int(token) for token in stop))

    def start(self, thresholds: Sequence[float], max_pending: int | None = None, room: int = ROOM) -> SequenceState:
        """An empty sequence to `step` by hand.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` gives them; 2.0 turns one off.
            max_pending: None: the bundle's.
            room: tokens of K/V buffer to have beyond the first step's.
        """
        if len(thresholds) != len(self.manifest.checkpoints):
            raise GenerationError(f"{len(thresholds)} thresholds for {len(self.manifest.checkpoints)} checkpoints")
        limit = self.manifest.max_pending if max_pending is None else max_pending
        return SequenceState(self._session, self.manifest, thresholds, limit, room)


class TokenStream(Iterator[int]):
    """Yields the tokens of one generation as they are made.

    Attributes:
        stats: of the tokens so far.
        finish_reason: None until the stream has ended.
    """

    def __init__(
        self,
        state: SequenceState,
        manifest: Manifest,
        prompt: np.ndarray,
        max_new_tokens: int,
        sampler: Sampler,
        stop: frozenset[int],
    ) -> None:
        self.stats = ExitStats(manifest.checkpoints, manifest.model.num_layers, prompt_tokens=len(prompt))
        self.finish_reason: FinishReason | None = None
        self._state = state
        self._segment_sizes = manifest.segment_sizes
        self._context = manifest.model.context_length
        self._max_new_tokens = max_new_tokens
        self._sampler = sampler
        self._stop = stop
        self._next_ids: Sequence[int] | np.ndarray = prompt

    def __next__(self) -> int:
        if self.finish_reason is not None:
            raise StopIteration
        stats, started = self.stats, time.perf_counter()
        result = self._state.step(self._next_ids)
        token = self._sampler(result.logits)
        self._next_ids = (token,)
        stats.record(result.exit_layer, sum(self._segment_sizes[: result.segments_run]))
        lengths = self._state.lengths
        stats.layer_tokens_run = sum(n * size for n, size in zip(lengths, self._segment_sizes, strict=True))
        stats.layer_tokens_total = stats.num_layers * lengths[0]
        if token in self._stop:
            self.finish_reason = "stop"
        elif stats.total_tokens == self._max_new_tokens:
            self.finish_reason = "length"
        elif lengths[0] == self._context:
            self.finish_reason = "context"  # this token has no place left to be read from
        seconds = time.perf_counter() - started
        if stats.total_tokens == 1:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds
        return token


def _thresholds(
    manifest: Manifest, mode: str, threshold: float | Sequence[float] | None, min_layers: int | None
) -> list[float]:
    given: float | Sequence[float] = manifest.thresholds if threshold is None else threshold
    if isinstance(given, np.generic | np.ndarray):
        given = given.tolist()
    if not isinstance(given, int | float | list | tuple):
        raise GenerationError(f"threshold must be a number or a list of numbers, not {given!r}")
    least = manifest.min_layers if min_layers is None else whole_number("min_layers", min_layers, least=0)
    return resolve_thresholds(manifest.checkpoints, given, least, mode)


def _prompt(manifest: Manifest, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The prompt as int64 [S], every id inside the vocabulary."""
    prompt = _token_ids("the prompt", ids)
    if len(prompt) == 0:
        raise GenerationError("the prompt is empty: give at least one token")
    vocabulary, context = manifest.model.vocab_size, manifest.model.context_length
    outside = prompt[(prompt < 0) | (prompt >= vocabulary)]
    if len(outside):
        raise GenerationError(f"the prompt holds token id {outside[0]}, outside the vocabulary 0..{vocabulary - 1}")
    if context is not None and len(prompt) > context:
        raise GenerationError(f"the prompt has {len(prompt)} tokens but the model's context holds {context}")
    return prompt.astype(np.int64)


def _token_ids(what: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError):
        array = None
    if array is not None and array.shape == (0,):
        return np.zeros(0, np.int64)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        raise GenerationError(f"{what} must be a flat list of whole numbers (token ids)")
    return array
