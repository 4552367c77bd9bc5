"""Changes the logits of one sequence before a token is chosen from them, by the tokens that it has so far.

The order is: the `logits_processor` hook; the repetition penalty, over the tokens of the prompt and those generated, as
transformers; the frequency and then the presence penalty, over those generated, as vLLM and OpenAI; `logit_bias`; the
grammar's mask. All arithmetic is in float32, each step rounded, so that the C++ runtime gets equal logits.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tide_export.errors import GenerationError, first_line
from tide_export.runtime.grammar import GrammarState

LogitsProcessor = Callable[[list[int], np.ndarray], np.ndarray]
FIRST_ENTRIES = 64


class LogitsProcessing:
    """The options of one generation that change logits, and the tokens of its sequence that they depend on.

    Attributes:
        ids: tokens of the prompt and those accepted since.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        processor: LogitsProcessor | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        """Takes options as `GenerationConfig` checked them; nothing came after `prompt` yet."""
        self.ids = list(prompt)
        self._prompt_length, self._processor = len(self.ids), processor
        self._repetition = np.float32(repetition_penalty)
        self._presence, self._frequency = np.float32(presence_penalty), np.float32(frequency_penalty)
        self._bias_ids = np.array(list(logit_bias or {}), np.int64)
        self._bias = np.array(list((logit_bias or {}).values()), np.float32)
        self._grammar = grammar
        self._count()

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """What the next token is chosen from, float32 [V], of a model's logits [V], which stay as they are.

        Raises:
            GenerationError: the hook failed, or returned something else than logits; the grammar became too complex.
        """
        logits = self._hooked(logits.astype(np.float32))
        if self._seen is not None:
            ids = self._seen.ids
            values = logits[ids]
            logits[ids] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._generated is not None:
            ids, counts = self._generated.ids, self._generated.counts
            logits[ids] -= self._frequency * counts
            logits[ids] -= self._presence
        logits[self._bias_ids] += self._bias
        if self._grammar is not None:
            logits[~self._grammar.mask()] = -np.inf
        return logits

    def accept(self, token: int) -> None:
        """Adds a token to the sequence."""
        self.ids.append(token)
        for table in (self._seen, self._generated):
            if table is not None:
                table.add(token)
        if self._grammar is not None:
            self._grammar.accept(token)

    def allows(self, token: int) -> bool:
        """Whether the grammar lets a token follow that does not end the text."""
        return self._grammar is None or self._grammar.allows(token)

    def rewind(self, length: int) -> None:
        """Removes all tokens but the first `length`."""
        if self._grammar is not None:
            self._grammar.rewind(len(self.ids) - length)
        while len(self.ids) > length:
            token = self.ids.pop()
            for table in (self._seen, self._generated):
                if table is not None:
                    table.remove(token)

    def restore(self, length: int) -> None:
        """As `rewind`, also where an exception ended `accept` or `rewind` at any point."""
        del self.ids[length:]
        self._count()
        if self._grammar is not None:
            self._grammar.restore(self.ids[self._prompt_length :])

    def _count(self) -> None:
        self._seen = _Counts(self.ids) if self._repetition != 1 else None
        penalized = self._presence or self._frequency
        self._generated = _Counts(self.ids[self._prompt_length :]) if penalized else None

    def _hooked(self, logits: np.ndarray) -> np.ndarray:
        if self._processor is None:
            return logits
        try:
            changed = np.array(self._processor(self.ids.copy(), logits), np.float32)
        except Exception as error:  # whatever a caller's function raises
            raise GenerationError(f"logits_processor failed: {first_line(error)}") from error
        if changed.shape != logits.shape:
            raise GenerationError(
                f"logits_processor must return logits of shape {list(logits.shape)}, not {list(changed.shape)}"
            )
        return changed


class _Counts:
    """How often each token occurs, in the order in which they first came. The last one added is removed first."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._place = dict[int, int]()
        self._ids, self._counts = np.zeros(FIRST_ENTRIES, np.int64), np.zeros(FIRST_ENTRIES, np.float32)
        for token in tokens:
            self.add(token)

    @property
    def ids(self) -> np.ndarray:
        """Tokens that occur, int64 [n]."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """Of each, float32 [n]."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids, self._counts = (np.concatenate([one, np.zeros_like(one)]) for one in (self._ids, self._counts))
        self._ids[place] = token
        self._counts[place] += 1

    def remove(self, token: int) -> None:
        place = self._place[token]
        self._counts[place] -= 1
        if not self._counts[place]:
            del self._place[token]
