"""Loads a bundle and generates tokens from it.

An `Engine` holds what all sequences share (manifest and backend); everything that belongs to one sequence lives in its
`TokenStream`, so any number of threads may generate on one engine at once. `start` and `start_batch` give sequences
that are stepped by hand.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

import numpy as np

from tide_export.bundle.auto_mode import AutoMode
from tide_export.bundle.manifest import Drafting, Manifest
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.bundle.verification import verifying
from tide_export.runtime.config import GenerationConfig, GenerationOptions, with_options
from tide_export.runtime.decoding.decoder import Decoder, run_block
from tide_export.runtime.decoding.generation import FinishReason, Generation, Progress
from tide_export.runtime.decoding.sampling import TokenLogprobs
from tide_export.runtime.providers import open_provider
from tide_export.runtime.request import (
    check_prompt,
    check_thresholds,
    decoder_of,
    is_list_of_prompts,
    resolve,
    sampler_of,
    seeds,
    text_of,
    without_auto,
)
from tide_export.runtime.scheduling.audit import AuditConfig
from tide_export.runtime.scheduling.scheduler import Scheduler, SchedulerLimits
from tide_export.runtime.sequence import ROOM, Backend, Batch, SingleSequence
from tide_export.runtime.tokenizer import BundleTokenizer, tokenizer_of
from tide_export.values import whole_number

LIST_PROMPT_TOKENS = 2048  # of a list's prompts in one step, as in C++: nobody waits for a token of it


def load(
    bundle: str | os.PathLike[str],
    provider: str = "auto",
    threads: int | None = None,
    verify: bool = True,
    plugins: str | os.PathLike[str] | None = None,
    device: int | None = None,
) -> "Engine":
    """Opens a bundle for generation.

    Args:
        bundle: the folder that `tide-export export` wrote.
        provider: "cpu", "cuda" (ONNX Runtime), "torch" (PyTorch), "tensorrt", "tensorrt-rtx"; "auto" takes the fastest
            that the bundle holds and this machine runs, never PyTorch.
        threads: threads one step may use on the CPU; None: one per physical core.
        verify: check the sha256 of every file (sizes are always checked); that of large files while the engine opens,
            and only once as long as the file stays untouched (see `bundle.verification`).
        plugins: the plugin library, for TensorRT engines that use plugins; None: that of the environment variable
            TIDE_PLUGINS, or an installed one.
        device: the number of the GPU to run on, with a provider that runs on one; None: the first.

    Raises:
        BundleError: the bundle is missing, damaged or of another release.
        ProviderError: the provider cannot run this bundle here.
        ConfigError: threads not in 1..1024.
    """
    opened = open_bundle(bundle, verify=False)
    with verifying(opened) if verify else contextlib.nullcontext():
        return Engine(opened, open_provider(opened, provider, threads, plugins, device))


class Engine:
    """A loaded bundle. Safe to use from several threads."""

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        self.bundle, self.backend = bundle, backend

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    @property
    def auto(self) -> AutoMode | None:
        """What mode `auto` is on this provider, for one sequence; None: not measured, so that it is full depth."""
        auto = self.manifest.auto
        return auto if auto is not None and auto.provider == self.backend.provider else None

    def auto_of(self, slots: int) -> AutoMode | None:
        """What mode `auto` is for so many sequences at once: the prompts of a list, or the slots of a scheduler,
        however many are taken. None: full depth, as nothing else was measured to pay."""
        return None if self.auto is None else self.auto.of(min(slots, self.max_batch_size))

    def resolved(self, config: GenerationConfig, slots: int = 1) -> GenerationConfig:
        """`config` with the mode and thresholds that mode `auto` stands for, where it has that mode; `slots` as in
        `auto_of`."""
        return without_auto(self.bundle, config, self.auto_of(slots))

    @property
    def tokenizer(self) -> BundleTokenizer:
        """The bundle's. Raises BundleError: it has none that can be used."""
        return tokenizer_of(self.bundle)

    @property
    def max_batch_size(self) -> int:
        """Prompts of a list that can be decoded at the same time; 1: a list is refused."""
        return self.backend.max_batch_size

    def drafting_as(self, drafting: Drafting) -> "Engine":
        """The same engine with other drafting in lossless mode; the bundle stays as it is."""
        return Engine(replace(self.bundle, manifest=replace(self.manifest, drafting=drafting)), self.backend)

    @overload
    def generate(
        self,
        ids: Sequence[int] | np.ndarray,
        config: GenerationConfig | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        ids: Sequence[Sequence[int]] | Sequence[np.ndarray],
        config: GenerationConfig | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Generation]: ...

    def generate(
        self,
        ids: Sequence[int] | np.ndarray | Sequence[Sequence[int]] | Sequence[np.ndarray],
        config: GenerationConfig | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generation | list[Generation]:
        """Generates the tokens that follow a prompt, or each of a list of prompts.

        The prompts of a list, of any lengths, are decoded as a batch of up to 32 (on TensorRT and CUDA as many as the
        bundle's networks take); when one ends the next takes its slot. Each gets the tokens it would get alone, up to
        rounding (docs/guide/batches.md).

        Args:
            ids: one prompt, or a list of prompts (each a flat list or an integer array [S]).
            config: how to generate; None: the defaults.
            options: fields of `GenerationConfig` by name, which override those of `config`.

        Raises:
            GenerationError: as `stream`; for a list of prompts also where the bundle holds no networks for batches.
        """
        config = with_options(config, options)
        if is_list_of_prompts(ids):
            return self._generate_batch(ids, config)
        return self._stream(ids, config).finish()

    def stream(
        self,
        ids: Sequence[int] | np.ndarray,
        config: GenerationConfig | None = None,
        **options: Unpack[GenerationOptions],
    ) -> "TokenStream":
        """Checks the request and returns an iterator of new token ids; the model runs as it is read.

        Args:
            ids: the prompt, a flat list of token ids or an integer array [S].
            config: how to generate; None: the defaults.
            options: fields of `GenerationConfig` by name, which override those of `config`.

        Raises:
            GenerationError: the prompt is empty, holds something that is no token id or is longer than the model's
                context; or an option is out of range, or of no effect: threshold, min_layers and max_pending in mode
                "full" or where the bundle has no checkpoints, max_pending where K/V are propagated, prompt_lookup
                outside mode "lossless", top_k, top_p and min_p without a temperature, compaction_threshold for one
                prompt.
        """
        return self._stream(ids, with_options(config, options))

    def _stream(self, ids: Any, config: GenerationConfig) -> "TokenStream":
        manifest = self.manifest
        prompt, request = check_prompt(manifest, ids), resolve(self.bundle, config, batched=False, auto=self.auto)
        sampler = sampler_of(request, prompt)
        state = self.start(request.thresholds, request.max_pending)
        decoder = decoder_of(manifest, sampler, request.stop, request.drafts, state)
        text = text_of(self.bundle, config, prompt)
        return TokenStream(state, decoder, Progress(manifest, prompt, config.max_new_tokens, request.stop, text))

    def _generate_batch(self, prompts: Any, config: GenerationConfig) -> list[Generation]:
        manifest = self.manifest
        checked = [check_prompt(manifest, ids, f"prompt {number}") for number, ids in enumerate(prompts, 1)]
        share = resolve(self.bundle, config, batched=True, auto=self.auto_of(len(checked))).compaction_threshold
        if not checked:
            return []
        configs = [replace(config, seed=seed, compaction_threshold=None) for seed in seeds(config, len(checked))]
        scheduler = self.scheduler(SchedulerLimits(slots=len(checked), prompt_tokens=LIST_PROMPT_TOKENS), share)
        handles = [scheduler.submit(prompt, one) for prompt, one in zip(checked, configs, strict=True)]
        try:
            return [handle.result() for handle in handles]
        except BaseException:
            scheduler.discard()
            raise

    def scheduler(
        self,
        limits: SchedulerLimits | None = None,
        compaction_threshold: float | None = None,
        audit: AuditConfig | None = None,
    ) -> Scheduler:
        """A scheduler of its own for requests that come and go; see `Scheduler`.

        Args:
            limits: what it holds at most; None: the defaults.
            compaction_threshold: see `GenerationConfig`; None: the bundle's.
            audit: checks some of the tokens of mode `exit` against full depth; None: none.

        Raises:
            GenerationError: the bundle holds no networks for batches, or there is no memory; a prefix cache or an audit
                that this bundle or provider cannot have.
        """
        manifest, limits = self.manifest, limits or SchedulerLimits()
        share = manifest.compaction_threshold if compaction_threshold is None else compaction_threshold
        batch = self.start_batch(share, limits.slots)
        return Scheduler(self.bundle, self.auto, batch, limits, audit)

    def start(self, thresholds: Sequence[float], max_pending: int | None = None, room: int = ROOM) -> SingleSequence:
        """An empty sequence to `step` by hand; see `Backend.start`.

        Args:
            max_pending: None: the bundle's.
        """
        check_thresholds(self.manifest, thresholds)
        limit = self.manifest.max_pending if max_pending is None else max_pending
        return self.backend.start(
            thresholds, whole_number("max_pending", limit, minimum=0), whole_number("room", room, minimum=0)
        )

    def start_batch(self, compaction_threshold: float, slots: int) -> Batch:
        """An empty batch to `step` by hand; see `Backend.start_batch`."""
        return self.backend.start_batch(compaction_threshold, slots)


class TokenStream(Iterator[int]):
    """Yields the tokens of one generation as they are made.

    An exception that ends a read at any point (KeyboardInterrupt, a time-out from a signal handler, GenerationError)
    changes nothing: the next read makes the same token. On TensorRT and CUDA one in the middle of a step ends the
    stream, whose next read raises GenerationError.

    Attributes:
        stats: of the tokens made so far; in lossless mode these may be a few more than were returned.
    """

    def __init__(self, state: SingleSequence, decoder: Decoder, progress: Progress) -> None:
        """`decoder` is that of `state`, which is empty."""
        self.stats = progress.stats
        self._state, self._decoder, self._progress = state, decoder, progress
        self._returned = 0  # of the tokens made
        self._saved: Any = None  # before a block; None: it was made to its end

    @property
    def tokens(self) -> list[int]:
        """The tokens returned so far. The last may be missing where an exception ended the caller's `next(stream)`."""
        return self._progress.tokens[: self._returned]

    @property
    def text(self) -> str | None:
        """Of the tokens made so far, without what may become a stop string; None: neither `stop` nor `detokenize` asks
        for it."""
        return self._progress.text

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Of the tokens returned so far; None: they were not asked for."""
        logprobs = self._progress.logprobs
        return None if logprobs is None else logprobs[: self._returned]

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until the stream has ended."""
        ended = self._saved is None and self._returned == len(self._progress.tokens)
        return self._progress.finish_reason if ended else None

    def __next__(self) -> int:
        progress = self._progress
        if self._saved is not None:
            self._undo()
        if self._returned == len(progress.tokens):
            if progress.finish_reason is not None:
                raise StopIteration
            self._make_block()
        token = progress.tokens[self._returned]
        self._returned += 1  # Python runs signal handlers at calls and loops: none comes between this and the return
        return token

    def _make_block(self) -> None:
        """Makes the next tokens. `_saved` is set until all that a block changes has changed."""
        state, decoder, progress = self._state, self._decoder, self._progress
        self._saved = state.save(), decoder.save(), progress.save()
        started = time.perf_counter()
        tokens = run_block(progress.block(decoder), state.step)
        seconds = time.perf_counter() - started
        progress.take(tokens, decoder, state.computed, seconds)
        self._saved = None

    def _undo(self) -> None:
        """Undoes a block that an exception ended."""
        state, decoder, progress = self._saved
        self._progress.restore(progress)
        self._decoder.restore(decoder)
        self._state.restore(state)
        self._saved = None

    def finish(self) -> Generation:
        """Generates the remaining tokens; the whole generation."""
        for _ in self:
            pass
        return self._progress.finished()
