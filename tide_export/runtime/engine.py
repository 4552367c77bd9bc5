"""Loads a bundle and generates tokens from it.

An `Engine` holds the state that all sequences share, a `TokenStream` that of one sequence, so any number of threads may
generate on one engine at once. `start` and `start_batch` return sequences that are stepped by hand. The native library
(`native`) does the work; this module checks types and owns the handles.
"""

import ctypes
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from ctypes import c_size_t
from dataclasses import replace
from typing import Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from tide_export.bundle.auto_mode import AutoMode, sentence
from tide_export.bundle.manifest import Drafting, Manifest
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.common.values import real_number, whole_number
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig, GenerationOptions, with_options
from tide_export.runtime.embedding import EmbeddingConfig
from tide_export.runtime.generation import Generation
from tide_export.runtime.grammar import Compilations
from tide_export.runtime.handle import RequestHandle
from tide_export.runtime.native import Owned, call, created, doubles, library
from tide_export.runtime.providers import open_library_engine
from tide_export.runtime.request import hooks_of, is_list_of_prompts, options_json, prompt_ids
from tide_export.runtime.scheduler import AuditConfig, Scheduler, SchedulerLimits
from tide_export.runtime.stepping import Batch, SingleSequence, encoded
from tide_export.runtime.token_stream import TokenStream
from tide_export.runtime.tokenizer import BundleTokenizer, LateText, tokenizer_of

MAX_SLOTS = 1024
LIST_SLOTS = 32  # prompts of a list that are decoded at once: their logits are in memory together
LIST_PROMPT_TOKENS = 2048  # of a list's prompts in one step: high, because the list is returned as a whole


def load(
    bundle: str | os.PathLike[str],
    provider: str = "auto",
    threads: int | None = None,
    verify: bool = True,
    plugins: str | os.PathLike[str] | None = None,
    device: int | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
) -> "Engine":
    """Opens a bundle for generation.

    The engine belongs to the process that loads it. A child process made by `os.fork` lacks its threads, so using the
    engine there raises GenerationError: load the bundle again in the child, or start the child by spawn.

    Args:
        bundle: the folder that `tide-export export` wrote.
        provider: "cpu", "cuda" (ONNX Runtime), "tensorrt", "tensorrt-rtx"; "auto" takes the fastest that the bundle
            holds and this machine runs.
        threads: CPU threads of one step; None: one per physical core.
        verify: check the sha256 of every file (sizes are always checked). Large files are hashed while the engine
            opens, and not again until they change.
        plugins: the plugin library, for TensorRT plans that use plugins; None: the environment variable
            TIDE_PLUGINS, or an installed one.
        device: the number of the GPU, for a provider that runs on one; None: the first.
        adapters: folders of low-rank adapters (LoRA) as peft writes them, by the names that requests give
            (`GenerationConfig.adapter`); for provider "cpu" and a bundle that was exported with `lora_rank`.

    Raises:
        BundleError: the bundle is missing, damaged or written by an incompatible release.
        ProviderError: the provider cannot run this bundle here.
        ConfigError: threads not in 1..1024; an adapter cannot be read, or does not fit the bundle.
    """
    return open_engine(open_bundle(bundle, verify=False), provider, threads, verify, plugins, device, adapters=adapters)


def open_engine(
    bundle: Bundle,
    provider: str = "auto",
    threads: int | None = None,
    verify: bool = False,
    plugins: str | os.PathLike[str] | None = None,
    device: int | None = None,
    graphs: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
) -> "Engine":
    """Creates an engine for an opened bundle, with the arguments of `load` and two for checks.

    Args:
        provider: also "cpu-networks": the segment networks in ONNX Runtime on the CPU.
        graphs: a folder with files of the names of the bundle's networks, which replace them; provider "cpu".
    """
    handle = open_library_engine(bundle, provider, threads, verify, plugins, device, graphs, adapters)
    return Engine(bundle, handle, tuple(adapters or ()))


class Engine:
    """Runs a loaded bundle; safe to use from several threads."""

    def __init__(self, bundle: Bundle, handle: Owned, adapters: tuple[str, ...] = ()) -> None:
        """Wraps the tide_engine that `open_engine` creates, with the names of its adapters."""
        self.bundle, self._handle, self.adapters = bundle, handle, adapters
        self._drafting: Drafting | None = None  # in place of the bundle's
        self.provider: str = library().tide_provider(handle).decode()
        self.max_batch_size: int = library().tide_max_batch_size(handle)

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self.bundle.manifest

    @property
    def auto(self) -> AutoMode | None:
        """Mode `auto` on this provider for one sequence; None: not measured, so it runs at full depth."""
        auto = self.manifest.auto
        return auto if auto is not None and auto.provider == self.provider else None

    def auto_of(self, slots: int) -> AutoMode | None:
        """Returns mode `auto` for `slots` prompts of a list or slots of a scheduler; None: full depth."""
        return None if self.auto is None else self.auto.of(min(slots, self.max_batch_size))

    def resolved(self, config: GenerationConfig, prompts: int | None = None) -> dict[str, Any]:
        """Checks options and fills in the bundle's defaults.

        Args:
            prompts: the number of prompts in a list; None: a single prompt.

        Returns:
            `mode`, `thresholds` (above 1: off), `max_pending` (-1: no limit), `drafting` (None outside mode lossless)
            and `compaction_threshold` (None for a single prompt).

        Raises:
            GenerationError: an option is out of range, or has no effect.
        """
        options = options_json(self.bundle, replace(config, stop=(), detokenize=False), self._drafting)
        text, size = ctypes.create_string_buffer(4096), c_size_t()
        for _ in range(2):
            call("resolve", self._handle, options, prompts or 0, text, len(text), ctypes.byref(size))
            if size.value < len(text):
                break
            text = ctypes.create_string_buffer(size.value + 1)
        resolved: dict[str, Any] = json.loads(text.value)
        return resolved

    @property
    def tokenizer(self) -> BundleTokenizer:
        """The bundle's tokenizer; BundleError if it is missing or cannot be used."""
        return tokenizer_of(self.bundle)

    def drafting_as(self, drafting: Drafting) -> "Engine":
        """Returns this engine with other drafting for lossless mode; the bundle on disk is not changed."""
        bundle = replace(self.bundle, manifest=replace(self.manifest, drafting=drafting))
        other = Engine.__new__(Engine)
        other.__dict__ |= self.__dict__ | {"bundle": bundle, "_drafting": drafting}
        return other

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

        A list is decoded as a batch of up to 32 prompts of any lengths (on TensorRT and CUDA as many as the bundle's
        networks take); when one ends, the next takes its slot. Each prompt gets the tokens it would get alone, up to
        rounding (docs/guide/several-prompts.md).

        Args:
            ids: one prompt, or a list of prompts (each a flat list or an integer array [S]).
            config: how to generate; None: the defaults.
            options: fields of `GenerationConfig` by name, which override those of `config`.

        Raises:
            GenerationError: as `stream` raises it.
        """
        config = with_options(config, options)
        if is_list_of_prompts(ids):
            return self._generate_list(ids, config)
        return self._stream(ids, config).finish()

    def stream(
        self,
        ids: Sequence[int] | np.ndarray,
        config: GenerationConfig | None = None,
        **options: Unpack[GenerationOptions],
    ) -> TokenStream:
        """Checks the request and returns an iterator of new token ids; the model runs as it is read.

        Args:
            ids: the prompt, a flat list of token ids or an integer array [S].
            config: how to generate; None: the defaults.
            options: fields of `GenerationConfig` by name, which override those of `config`.

        Raises:
            GenerationError: the prompt is empty, is longer than the model's context or holds something other than
                token ids; or an option is out of range or has no effect: threshold, min_layers and max_pending in
                mode "full" or in a bundle without checkpoints, prompt_lookup outside mode "lossless", what only
                sampling needs without a temperature, compaction_threshold for one prompt.
        """
        return self._stream(ids, with_options(config, options))

    def _stream(self, ids: Any, config: GenerationConfig) -> TokenStream:
        prompt, options = prompt_ids(ids), options_json(self.bundle, config, self._drafting)
        hooks = hooks_of(self.bundle, config, prompt)
        pointer = None if hooks is None else ctypes.byref(hooks.struct)
        arguments = self._handle, prompt.ctypes.data, len(prompt), options, pointer
        handle = created("token_stream_open", *arguments, needed=(self._handle,))
        late = None
        if config.detokenize and not config.stop:
            late = LateText(self.tokenizer, prompt.tolist(), config.special_tokens)
        wanted = config.logprobs is not None, config.prompt_logprobs is not None
        mode = self.resolved(config)["mode"] if config.states else "full"
        return TokenStream(handle, hooks, late, mode, *wanted)

    def _generate_list(self, prompts: Any, config: GenerationConfig) -> list[Generation]:
        checked = [prompt_ids(ids, f"prompt {number}") for number, ids in enumerate(prompts, 1)]
        share = self.resolved(config, len(checked) or 1)["compaction_threshold"]
        if not checked:
            return []
        seeds = config.seed if isinstance(config.seed, Sequence) else [config.seed] * len(checked)
        configs = [replace(config, seed=seed, compaction_threshold=None) for seed in seeds]
        return [handle.result() for handle in self._submit_list(checked, configs, share)]

    def _submit_list(
        self, prompts: Sequence[np.ndarray], configs: Sequence[GenerationConfig], share: float | None
    ) -> list[RequestHandle]:
        """Submits the prompts to a new scheduler, whose steps run in the thread that reads the results."""
        slots = min(len(prompts), LIST_SLOTS, self.max_batch_size)
        tokens = min(LIST_PROMPT_TOKENS, max(1, sum(map(len, prompts))))
        scheduler = self.scheduler(SchedulerLimits(slots=slots, prompt_tokens=tokens), share)
        handles, compilations = [], Compilations()
        for number, (prompt, one) in enumerate(zip(prompts, configs, strict=True), 1):
            try:
                with compilations.shared():
                    handles.append(scheduler.submit_ids(prompt, one))
            except GenerationError as error:
                raise GenerationError(str(error).replace("the prompt", f"prompt {number}", 1)) from None
        return handles

    def embed(
        self,
        ids: Sequence[int] | np.ndarray | Sequence[Sequence[int]] | Sequence[np.ndarray],
        *,
        pooling: str = "last",
        layer: int | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        adapter: str | None = None,
    ) -> NDArray[np.float32]:
        """Computes the embedding of one text, [D], or of several, [texts, D], from the final hidden states.

        Args:
            ids: the token ids of one text, or of several.
            pooling, layer, dimensions, normalize, adapter: the fields of `EmbeddingConfig`.

        Raises:
            GenerationError: as `generate` or `EmbeddingConfig` raises it.
        """
        how = EmbeddingConfig(pooling=pooling, layer=layer, dimensions=dimensions, normalize=normalize, adapter=adapter)
        config, several = how.options(self.manifest), is_list_of_prompts(ids)
        if not several:
            return how.vector(self._stream(ids, config).finish())
        texts: Any = ids
        checked = [prompt_ids(text, f"prompt {number}") for number, text in enumerate(texts, 1)]
        waiting = deque(self._submit_list(checked, [config] * len(checked), None))
        return np.stack([how.vector(waiting.popleft().result()) for _ in checked])  # popped: its states are freed

    def scheduler(
        self,
        limits: SchedulerLimits | None = None,
        compaction_threshold: float | None = None,
        audit: AuditConfig | None = None,
    ) -> Scheduler:
        """Creates a `Scheduler` for requests that arrive over time.

        Args:
            limits: its limits; None: the defaults.
            compaction_threshold: as in `GenerationConfig`; None: the bundle's.
            audit: checks a share of the tokens of mode `exit` against full depth; None: checks none.

        Raises:
            GenerationError: memory ran out; or this bundle or provider has no prefix cache or audit and one was asked
                for.
        """
        limits = limits or SchedulerLimits()
        if limits.slots <= MAX_SLOTS:  # else the library refuses it
            limits = replace(limits, slots=min(limits.slots, self.max_batch_size))
        # By all slots, not by those in use: tokens must not depend on the load.
        mode = "full" if (auto := self.auto_of(limits.slots)) is None else auto.mode
        by_default = f"{mode} by default: {sentence(self.auto)}"
        return Scheduler(self.bundle, self._handle, limits, compaction_threshold, audit, by_default, self._drafting)

    def start(
        self, thresholds: Sequence[float], max_pending: int | None = None, adapter: str | None = None
    ) -> SingleSequence:
        """Creates an empty sequence to `step` by hand.

        Args:
            thresholds: one per checkpoint, as `resolve_thresholds` returns them; `NEVER_EXIT` turns one off.
            max_pending: a segment is forced to run when more tokens than this would be pending before it; None: the
                bundle's.
            adapter: the name of one that the bundle was loaded with.

        Raises:
            GenerationError: an argument is out of range, or memory for the sequence ran out.
        """
        for value in thresholds:
            real_number("a threshold", value)
        limit = self.manifest.max_pending if max_pending is None else max_pending
        whole_number("max_pending", limit, minimum=0)
        arguments = self._handle, doubles(thresholds), len(thresholds), limit, encoded(adapter)
        handle = created("sequence_create", *arguments, needed=(self._handle,))
        return SingleSequence(handle, len(self.manifest.segment_sizes), len(self.manifest.checkpoints))

    def start_batch(self, compaction_threshold: float, slots: int) -> Batch:
        """Creates an empty batch to `step` by hand.

        Args:
            compaction_threshold: if a smaller share of a step's sequences needs a segment, only those run it; else
                all that have tokens pending before it do.
            slots: its capacity in sequences, at most `max_batch_size`.

        Raises:
            GenerationError: memory ran out.
        """
        handle = created("batch_create", self._handle, compaction_threshold, slots, needed=(self._handle,))
        return Batch(handle, len(self.manifest.segment_sizes))
