"""The runtime's front door: `load` a bundle, then `generate` or `stream` tokens from it.

An `Engine` holds what all sequences share (manifest, ONNX Runtime session); all that belongs to one sequence lives in
its `TokenStream`, so any number of threads may generate on one engine at once. `validate` and `bench` use `start` and
drive a `SequenceState` step by step.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from tide_export.bundle import Bundle, Manifest, open_bundle
from tide_export.errors import GenerationError
from tide_export.manifest import PROPAGATE, Drafting
from tide_export.runtime.batch.generate import empty_batch, generate_batch
from tide_export.runtime.batch.networks import MOST_ROWS, BatchNetworks
from tide_export.runtime.batch.rule import AnyBatch
from tide_export.runtime.generation import FinishReason, Generation, ending
from tide_export.runtime.lossless import LosslessDecoder, Token
from tide_export.runtime.options import real_number, whole_number
from tide_export.runtime.providers import open_provider
from tide_export.runtime.request import (
    check_lookup,
    is_list_of_prompts,
    lookup_of,
    prompt_of,
    seeds_of,
    stops_of,
    thresholds_of,
    waiting_limit,
)
from tide_export.runtime.sampling import Sampler
from tide_export.runtime.segmented.batch import SegmentedBatch
from tide_export.runtime.state import NO_LIMIT, ROOM, SequenceState, State
from tide_export.runtime.stats import ExitStats


def load(
    bundle: str | os.PathLike[str],
    provider: str = "auto",
    threads: int | None = None,
    verify: bool = True,
    plugins: str | os.PathLike[str] | None = None,
) -> "Engine":
    """Opens a bundle for generation.

    Args:
        bundle: the folder that `tide-export export` wrote.
        provider: "cpu", "cuda" (ONNX Runtime), "tensorrt", "tensorrt-rtx"; "auto" takes the fastest that the bundle
            holds and this machine runs.
        threads: threads one step may use on the CPU; None: one per physical core.
        verify: check the sha256 of every file first (sizes are always checked).
        plugins: the library of plugins, for TensorRT engines that hold some; None: that of the environment variable
            TIDE_PLUGINS, or an installed one.

    Raises:
        BundleError: the bundle is missing, damaged or of another release.
        ProviderError: the provider asked for cannot run this bundle here.
        ConfigError: threads below 1.
    """
    opened = open_bundle(bundle, verify=verify)
    return Engine(opened, *open_provider(opened, provider, threads, plugins), threads=threads)


class Engine:
    """A loaded bundle. Safe to use from several threads."""

    def __init__(
        self,
        bundle: Bundle,
        session: Any,
        sequence: Callable[..., Any] = SequenceState,
        threads: int | None = None,
    ) -> None:
        """`sequence` makes a sequence on `session`: SequenceState of a session of the branched graph, SegmentedState of
        a backend of segment networks. `threads` are for the sessions of batches, which open when one is asked for."""
        self.bundle = bundle
        self._session = session
        self._sequence, self._threads = sequence, threads
        self._batch_networks = BatchNetworks(bundle, threads) if sequence is SequenceState else None

    @property
    def manifest(self) -> Manifest:
        """What the bundle says about itself."""
        return self.bundle.manifest

    def drafting_as(self, drafting: Drafting) -> "Engine":
        """The same engine, with another way to draft in lossless mode; the bundle stays as it is."""
        bundle = replace(self.bundle, manifest=replace(self.manifest, drafting=drafting))
        return Engine(bundle, self._session, self._sequence, threads=self._threads)

    @overload
    def generate(
        self,
        ids: Sequence[int] | np.ndarray,
        max_new_tokens: int = 64,
        *,
        mode: str = "exit",
        threshold: float | Sequence[float] | None = None,
        min_layers: int | None = None,
        max_pending: int | None = None,
        prompt_lookup: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        compaction_threshold: float | None = None,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        ids: Sequence[Sequence[int]] | Sequence[np.ndarray],
        max_new_tokens: int = 64,
        *,
        mode: str = "exit",
        threshold: float | Sequence[float] | None = None,
        min_layers: int | None = None,
        max_pending: int | None = None,
        prompt_lookup: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        compaction_threshold: float | None = None,
    ) -> list[Generation]: ...

    def generate(
        self,
        ids: Sequence[int] | np.ndarray | Sequence[Sequence[int]] | Sequence[np.ndarray],
        max_new_tokens: int = 64,
        *,
        mode: str = "exit",
        threshold: float | Sequence[float] | None = None,
        min_layers: int | None = None,
        max_pending: int | None = None,
        prompt_lookup: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | Sequence[int] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        compaction_threshold: float | None = None,
    ) -> Generation | list[Generation]:
        """`stream` run to its end: same arguments, same errors. Of a list of prompts, a generation of each.

        Several prompts, of any lengths, are decoded together, up to 32 at a time (on TensorRT and CUDA as many as the
        bundle's networks take); as one ends the next takes its place.
        Each gets the tokens it would get alone, with the same options, up to rounding (docs/batch.md).

        Args:
            ids: one prompt, or a list of prompts (each a flat list or an integer array [S]).
            seed: of a list of prompts, one for each of them, or one that each of them starts from.
            compaction_threshold: of a list of prompts, in [0, 1]: when a smaller share of the sequences than this needs
                a segment, only those run it; else all that wait before it catch up along. Changes speed, never tokens.
                None: the bundle's. Not where K/V are propagated: nothing waits there.

        Raises:
            GenerationError: as `stream`; for a list of prompts also where mode is "lossless", or the bundle holds no
                networks for batches.
        """
        options = (max_new_tokens, mode, threshold, min_layers, max_pending, prompt_lookup, temperature, top_k, top_p)
        if is_list_of_prompts(ids):
            return self._generate_batch(ids, *options, seed, stop_token_ids, compaction_threshold)
        if compaction_threshold is not None:
            raise GenerationError(
                "compaction_threshold is for a list of prompts: one prompt has nothing to be kept apart from"
            )
        stream = self.stream(
            ids,  # type: ignore[arg-type]
            max_new_tokens,
            mode=mode,
            threshold=threshold,
            min_layers=min_layers,
            max_pending=max_pending,
            prompt_lookup=prompt_lookup,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,  # type: ignore[arg-type]
            stop_token_ids=stop_token_ids,
        )
        tokens = list(stream)
        assert stream.finish_reason is not None
        return Generation(tokens, stream.stats, stream.finish_reason)

    def _generate_batch(
        self,
        prompts: Any,
        max_new_tokens: int,
        mode: str,
        threshold: float | Sequence[float] | None,
        min_layers: int | None,
        max_pending: int | None,
        prompt_lookup: int | None,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: Any,
        stop_token_ids: Sequence[int] | None,
        compaction_threshold: float | None,
    ) -> list[Generation]:
        manifest = self.manifest
        checked = [prompt_of(manifest, ids, f"prompt {number}") for number, ids in enumerate(prompts, 1)]
        limit = whole_number("max_new_tokens", max_new_tokens, least=1)
        thresholds = thresholds_of(manifest, mode, threshold, min_layers)
        if mode == "lossless":
            raise GenerationError("mode 'lossless' takes one prompt at a time: use mode 'exit' or 'full' for a list")
        check_lookup(mode, prompt_lookup)
        waiting = waiting_limit(manifest, mode, max_pending)
        share = manifest.compaction_threshold
        if compaction_threshold is not None:
            if manifest.kv_cache_strategy == PROPAGATE:
                raise GenerationError(
                    f"compaction_threshold is for an exact K/V cache: bundle {self.bundle.path} propagates, so nothing "
                    "waits that could come along"
                )
            share = real_number("compaction_threshold", compaction_threshold)
        if not 0 <= share <= 1:
            raise GenerationError(f"compaction_threshold must lie in [0, 1], not {share!r}")
        samplers = [Sampler(temperature, top_k, top_p, own) for own in seeds_of(seed, len(checked))]
        stops = stops_of(manifest, stop_token_ids)
        batch = self.start_batch(thresholds, waiting, share, len(checked))
        return generate_batch(batch, manifest, checked, samplers, limit, stops)

    def start_batch(
        self, thresholds: Sequence[float], max_pending: int, compaction_threshold: float, places: int
    ) -> AnyBatch:
        """An empty batch to `step` by hand, with as many of `places` as the engine can hold at once.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` gives them; 2.0 turns one off.

        Raises:
            GenerationError: the bundle holds no networks for batches, or there is no memory.
        """
        options = (self.manifest, thresholds, max_pending, compaction_threshold)
        if self._batch_networks is None:
            return SegmentedBatch(self._session, *options, places)
        return empty_batch(self._batch_networks.sessions(min(places, MOST_ROWS)), *options)

    def stream(
        self,
        ids: Sequence[int] | np.ndarray,
        max_new_tokens: int = 64,
        *,
        mode: str = "exit",
        threshold: float | Sequence[float] | None = None,
        min_layers: int | None = None,
        max_pending: int | None = None,
        prompt_lookup: int | None = None,
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
            mode: "exit" (tokens may leave at a checkpoint), "full" (the source model, layer for layer) or "lossless"
                (tokens that leave are drafts, verified by the full model before they are handed out: the tokens of
                "full", when sampling its distribution, and faster where drafts are mostly right).
            threshold: a router score above it exits; one in [0, 1], or one per checkpoint. None: the bundle's.
            min_layers: checkpoints with fewer layers behind them never exit. None: the bundle's, in lossless mode 0.
            max_pending: tokens that may wait before a segment is forced to run, in lossless mode drafts that may wait
                to be verified; changes speed, never tokens. None: the bundle's.
            prompt_lookup: lossless mode: tokens drafted at most from what followed the last few tokens where they stood
                before, 0 for none; changes speed, never tokens. None: the bundle's.
            temperature, top_k, top_p, seed: see `Sampler`; the defaults are greedy.
            stop_token_ids: None: the model's own end-of-sequence ids; an empty list never stops.

        Raises:
            GenerationError: the prompt is empty, holds something that is no token id or is longer than the model's
                context; or an option is out of range.
        """
        manifest = self.manifest
        prompt = prompt_of(manifest, ids)
        limit = whole_number("max_new_tokens", max_new_tokens, least=1)
        thresholds = thresholds_of(manifest, mode, threshold, min_layers)
        waiting = waiting_limit(manifest, mode, max_pending)
        sampler = Sampler(temperature, top_k, top_p, seed)
        stops = stops_of(manifest, stop_token_ids)
        if mode == "lossless" and manifest.kv_cache_strategy == PROPAGATE:
            raise GenerationError(
                f"mode 'lossless' needs an exact K/V cache, and bundle {self.bundle.path} propagates: export it with "
                "kv_cache_strategy exact"
            )
        check_lookup(mode, prompt_lookup)
        if mode == "lossless":
            state = self.start(thresholds, NO_LIMIT)  # the decoder itself says when to verify
            context = manifest.model.context_length
            lookup = lookup_of(manifest, prompt_lookup)
            lossless = LosslessDecoder(state, sampler, manifest.segment_sizes, waiting, lookup, stops, context)
            return TokenStream(state, manifest, prompt, limit, sampler, stops, lossless)
        return TokenStream(self.start(thresholds, waiting), manifest, prompt, limit, sampler, stops)

    def start(self, thresholds: Sequence[float], max_pending: int | None = None, room: int = ROOM) -> State:
        """An empty sequence to `step` by hand.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` gives them; 2.0 turns one off.
            max_pending: None: the bundle's.
            room: tokens of K/V buffer to have beyond the first step's.
        """
        if len(thresholds) != len(self.manifest.checkpoints):
            raise GenerationError(f"{len(thresholds)} thresholds for {len(self.manifest.checkpoints)} checkpoints")
        limit = self.manifest.max_pending if max_pending is None else max_pending
        return self._sequence(self._session, self.manifest, thresholds, limit, room)


class TokenStream(Iterator[int]):
    """Yields the tokens of one generation as they are made.

    Attributes:
        stats: of the tokens made so far; in lossless mode a few may have been made that are not handed out yet.
        finish_reason: None until the stream has ended.
    """

    def __init__(
        self,
        state: State,
        manifest: Manifest,
        prompt: np.ndarray,
        max_new_tokens: int,
        sampler: Sampler,
        stop: frozenset[int],
        lossless: LosslessDecoder | None = None,
    ) -> None:
        self.stats = ExitStats(manifest.checkpoints, manifest.model.num_layers, prompt_tokens=len(prompt))
        self.finish_reason: FinishReason | None = None
        self._state = state
        self._segment_sizes = manifest.segment_sizes
        self._context = manifest.model.context_length
        self._max_new_tokens = max_new_tokens
        self._sampler = sampler
        self._stop = stop
        self._lossless = lossless
        self._next_ids: np.ndarray | list[int] = prompt
        self._ready: deque[int] = deque()
        self._ending: FinishReason | None = None  # why the last token that is ready is the last of all

    def __next__(self) -> int:
        if self.finish_reason is not None:
            raise StopIteration
        if not self._ready:
            self._advance()
        token = self._ready.popleft()
        if not self._ready:
            self.finish_reason = self._ending
        return token

    def _advance(self) -> None:
        """Makes the next token, in lossless mode the next few."""
        stats, started = self.stats, time.perf_counter()
        first = not stats.total_tokens
        for token in self._step() if self._lossless is None else self._verified_block(self._lossless):
            stats.record(token.exit_layer, token.layers_run)
            self._ready.append(token.id)
            self._ending = ending(token.id, self._stop, stats.total_tokens, self._max_new_tokens)
            if self._ending is not None:
                break
        else:
            if self._state.length == self._context:
                self._ending = "context"  # the last token has no place left to be read from
        self._next_ids = [self._ready[-1]]
        seconds = time.perf_counter() - started
        if first:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds

    def _step(self) -> list[Token]:
        result = self._state.step(self._next_ids)
        token = self._sampler(result.logits)
        self._count(0)
        return [Token(token, result.exit_layer, sum(self._segment_sizes[: result.segments_run]))]

    def _verified_block(self, decoder: LosslessDecoder) -> list[Token]:
        block = decoder.block(self._next_ids, self._max_new_tokens - self.stats.total_tokens)
        stats = self.stats
        stats.drafted, stats.accepted = decoder.drafted, decoder.accepted
        stats.looked_up, stats.lookups_accepted = decoder.looked_up, decoder.lookups_accepted
        self._count(decoder.undone * self.stats.num_layers)
        return block

    def _count(self, undone: int) -> None:
        kept = sum(n * size for n, size in zip(self._state.computed, self._segment_sizes, strict=True))
        self.stats.layer_tokens_run = kept + undone
        self.stats.layer_tokens_total = self.stats.num_layers * self._state.length
