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
from functools import partial
from typing import Any, overload

import numpy as np

from tide_export.bundle.manifest import PROPAGATE, Drafting, Manifest
from tide_export.bundle.store import Bundle, open_bundle
from tide_export.errors import GenerationError
from tide_export.runtime.branched.sequence import NO_LIMIT, ROOM, SequenceState, State
from tide_export.runtime.decoding.continuous_batching import empty_batch, generate_batch
from tide_export.runtime.decoding.decoder import Decoder, OneByOne, run_block
from tide_export.runtime.decoding.depth_rule import AnyBatch
from tide_export.runtime.decoding.generation import FinishReason, Generation, Progress
from tide_export.runtime.decoding.lossless import DraftLimits, LosslessDecoder, Rewindable
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.options import whole_number
from tide_export.runtime.packed.networks import MAX_BATCH_SIZE, BatchNetworks
from tide_export.runtime.providers import open_provider
from tide_export.runtime.request import (
    check_exits,
    check_sampling,
    draft_limits,
    is_list_of_prompts,
    prompt_of,
    seeds_of,
    share_of,
    stops_of,
    thresholds_of,
    waiting_limit,
)
from tide_export.runtime.segmented.batch import SegmentedBatch


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

    @property
    def max_batch_size(self) -> int:
        """Prompts of a list that can be decoded at the same time; 1: a list is refused."""
        networks = self._session if self._batch_networks is None else self._batch_networks
        return int(networks.max_batch_size)

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
        Each gets the tokens it would get alone, with the same options, up to rounding (docs/guide/batches.md).

        Args:
            ids: one prompt, or a list of prompts (each a flat list or an integer array [S]).
            seed: of a list of prompts, one for each of them, or one that each of them starts from.
            compaction_threshold: of a list of prompts, in [0, 1]: when a smaller share of the sequences than this needs
                a segment, only those run it; else all that wait before it catch up along. Changes speed, never tokens.
                None: the bundle's; in lossless mode 0, and with a temperature always 1, because when a sequence is
                verified decides what it draws. Not where K/V are propagated: nothing waits there.

        Raises:
            GenerationError: as `stream`; for a list of prompts also where the bundle holds no networks for batches.
        """
        options = (max_new_tokens, mode, threshold, min_layers, max_pending, prompt_lookup, temperature, top_k, top_p)
        if is_list_of_prompts(ids):
            return self._generate_batch(ids, *options, seed, stop_token_ids, compaction_threshold)
        check_exits(self.bundle, mode, {"compaction_threshold": compaction_threshold})
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
        drafts = self._drafts(mode, max_pending, prompt_lookup)
        waiting = NO_LIMIT if drafts else waiting_limit(manifest, max_pending)  # a decoder itself says when to verify
        samplers = [Sampler(temperature, top_k, top_p, own) for own in seeds_of(seed, len(checked))]
        check_sampling(temperature, top_k, top_p)
        exits = {"threshold": threshold, "min_layers": min_layers, "max_pending": max_pending}
        check_exits(self.bundle, mode, {**exits, "compaction_threshold": compaction_threshold}, several=True)
        share = share_of(manifest, compaction_threshold, drafts is not None, all(one.greedy for one in samplers))
        stops = stops_of(manifest, stop_token_ids)
        batch = self.start_batch(thresholds, waiting, share, len(checked))
        decoders = [partial(decoder_of, manifest, sampler, stops, drafts) for sampler in samplers]
        return generate_batch(batch, manifest, checked, decoders, limit, stops)

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
        return empty_batch(self._batch_networks.sessions(min(places, MAX_BATCH_SIZE)), *options)

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
                context; or an option is out of range, or of no effect: threshold, min_layers and max_pending in mode
                "full" or where the bundle has no checkpoints, max_pending where K/V are propagated, prompt_lookup
                outside mode "lossless", top_k and top_p without a temperature.
        """
        manifest = self.manifest
        prompt = prompt_of(manifest, ids)
        limit = whole_number("max_new_tokens", max_new_tokens, least=1)
        thresholds = thresholds_of(manifest, mode, threshold, min_layers)
        drafts = self._drafts(mode, max_pending, prompt_lookup)
        waiting = NO_LIMIT if drafts else waiting_limit(manifest, max_pending)  # the decoder itself says when to verify
        sampler = Sampler(temperature, top_k, top_p, seed)
        check_sampling(temperature, top_k, top_p)
        exits = {"threshold": threshold, "min_layers": min_layers, "max_pending": max_pending}
        check_exits(self.bundle, mode, exits)
        stops = stops_of(manifest, stop_token_ids)
        state = self.start(thresholds, waiting)
        decoder = decoder_of(manifest, sampler, stops, drafts, state)
        return TokenStream(state, decoder, Progress(manifest, prompt, limit, stops))

    def _drafts(self, mode: str, max_pending: int | None, prompt_lookup: int | None) -> DraftLimits | None:
        drafts = draft_limits(self.manifest, mode, max_pending, prompt_lookup)
        if drafts and self.manifest.kv_cache_strategy == PROPAGATE:
            raise GenerationError(
                f"mode 'lossless' needs an exact K/V cache, and bundle {self.bundle.path} propagates: export it with "
                "kv_cache_strategy exact"
            )
        return drafts

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


def decoder_of(
    manifest: Manifest, sampler: Sampler, stop: frozenset[int], drafts: DraftLimits | None, state: Rewindable
) -> Decoder:
    """What chooses the tokens of an empty sequence; `drafts` are None outside lossless mode."""
    depths = (*manifest.checkpoints, manifest.model.num_layers)
    if drafts is None:
        return OneByOne(sampler, depths)
    return LosslessDecoder(state, sampler, depths, drafts, stop, manifest.model.context_length)


class TokenStream(Iterator[int]):
    """Yields the tokens of one generation as they are made.

    Attributes:
        stats: of the tokens made so far; in lossless mode a few may have been made that are not handed out yet.
        finish_reason: None until the stream has ended.
    """

    def __init__(self, state: State, decoder: Decoder, progress: Progress) -> None:
        """`decoder` is that of `state`, which is empty."""
        self.stats = progress.stats
        self.finish_reason: FinishReason | None = None
        self._state, self._decoder, self._progress = state, decoder, progress
        self._ready: deque[int] = deque()

    def __next__(self) -> int:
        if self.finish_reason is not None:
            raise StopIteration
        if not self._ready:
            started = time.perf_counter()
            tokens = run_block(self._progress.block(self._decoder), self._state.step)
            seconds = time.perf_counter() - started
            self._ready.extend(self._progress.take(tokens, self._decoder, self._state.computed, seconds))
        token = self._ready.popleft()
        if not self._ready:
            self.finish_reason = self._progress.ending
        return token
