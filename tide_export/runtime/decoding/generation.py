"""The result of a generation, how it grows and when it ends; for one sequence and for batches."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tide_export.bundle.manifest import Manifest
from tide_export.runtime.decoding.decoder import Block, Decoder, Token
from tide_export.runtime.decoding.sampling import TokenLogprobs
from tide_export.runtime.decoding.stats import ExitStats
from tide_export.runtime.generated_text import GeneratedText

FinishReason = Literal["stop", "length", "context", "cancelled", "timeout"]


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    Attributes:
        tokens: the new token ids; the stop token, if one came, is the last.
        stats: exits, layers run, seconds.
        finish_reason: "stop" (a stop token or string), "length" (max_new_tokens), "context" (the model's context is
            full); of a scheduler's request also "cancelled" and "timeout".
        logprobs: of each token, where `GenerationConfig.logprobs` asked for them.
        text: of the tokens, up to a stop string, where `stop` or `detokenize` asked for it.
    """

    tokens: list[int]
    stats: ExitStats
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    text: str | None = None


class Progress:
    """A generation that grows block by block.

    Attributes:
        tokens: so far.
        logprobs: of them; None: they were not asked for.
        stats: of them.
        finish_reason: None while more will come.
        cached_tokens: of the prompt, whose K/V come from a prefix cache: `stats` count nothing as run for them.
    """

    def __init__(
        self,
        manifest: Manifest,
        prompt: np.ndarray,
        max_new_tokens: int,
        stop: Container[int],
        text: GeneratedText | None = None,
    ) -> None:
        """Nothing is generated after `prompt` yet.

        Args:
            text: that of the tokens; None: nobody asked for it.
        """
        self._text = text
        self.stats = ExitStats(manifest.checkpoints, manifest.model.num_layers, prompt_tokens=len(prompt))
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self.logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None
        self._next_ids: np.ndarray | list[int] = prompt
        self._segment_sizes, self._context = manifest.segment_sizes, manifest.model.context_length
        self._max_new_tokens, self._stop = max_new_tokens, stop

    def save(self) -> Any:
        """What `restore` needs to undo the blocks after this call."""
        text = None if self._text is None else self._text.save()
        return len(self.tokens), self._next_ids, self.stats.prefill_seconds, self.stats.decode_seconds, text

    def restore(self, saved: Any) -> None:
        """Undoes all blocks since `saved`, also one that was not taken to its end; its counts are the next block's."""
        count, self._next_ids, self.stats.prefill_seconds, self.stats.decode_seconds, text = saved
        if self._text is not None:
            self._text.restore(text)
        for values in (self.tokens, self.logprobs or [], self.stats.exit_layer, self.stats.layers_run):
            del values[count:]
        self.finish_reason = None

    def block(self, decoder: Decoder) -> Block:
        """The steps to the next tokens."""
        return decoder.block(self._next_ids, self._max_new_tokens - self.stats.total_tokens)

    def take(self, block: Sequence[Token], decoder: Decoder, computed: Sequence[int], seconds: float) -> list[int]:
        """The ids of a block's tokens, up to one that ends the generation.

        Args:
            computed: tokens of the sequence that each segment has run over since.
            seconds: that the block took.
        """
        stats, taken, first = self.stats, list[int](), not self.stats.total_tokens
        for token in block:
            stats.record(token.exit_layer, token.layers_run)
            taken.append(token.id)
            self.finish_reason = self._reason(token.id)
            if self._text is not None and self._text.push(token.id):
                self.finish_reason = "stop"
            if self.finish_reason is not None:
                break
        else:
            if computed[0] == self._context:
                self.finish_reason = "context"  # there is no position left for the last token
        if decoder.logprobs is not None:
            known = len(self.tokens)
            self.logprobs = (self.logprobs or []) + decoder.logprobs[known : known + len(taken)]
        if self.finish_reason is not None:
            self.end(self.finish_reason)
        self.tokens += taken
        self._next_ids = taken[-1:]
        if first:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds
        stats.drafted, stats.accepted = decoder.drafted, decoder.accepted
        stats.lookup_drafted, stats.lookup_accepted = decoder.lookup_drafted, decoder.lookup_accepted
        held = sum((n - self.cached_tokens) * size for n, size in zip(computed, self._segment_sizes, strict=True))
        stats.layer_tokens_run = held + decoder.undone * stats.num_layers
        stats.layer_tokens_total = stats.num_layers * (computed[0] - self.cached_tokens)
        return taken

    def end(self, reason: FinishReason) -> None:
        """Ends the generation, also where a token did not."""
        self.finish_reason = reason
        if self._text is not None:
            self._text.finish()

    @property
    def text(self) -> str | None:
        """Of the tokens so far; None: nobody asked for it."""
        return None if self._text is None else self._text.text

    def finished(self) -> Generation:
        """The whole generation, once there is a `finish_reason`."""
        if self.finish_reason is None:
            raise RuntimeError("the generation has not finished")
        return Generation(self.tokens, self.stats, self.finish_reason, self.logprobs, self.text)

    def _reason(self, token: int) -> FinishReason | None:
        if token in self._stop:
            return "stop"
        return "length" if self.stats.total_tokens == self._max_new_tokens else None
