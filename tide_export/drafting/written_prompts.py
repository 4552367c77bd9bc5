"""Lets a chat model write prompts, so that a drafter learns from more kinds of text than shipped prompts ask for.

A chat template begins a user's message in the same way each time. A model that was trained on whole conversations
continues that beginning with a message such as it was trained to answer (Xu et al. 2024, "Magpie", arXiv:2406.08464).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from tide_export.drafting.engine import AnswerEngine
from tide_export.runtime.config import GenerationConfig

TEMPERATURE = 0.8
MAX_NEW_TOKENS = 96  # of a message and its end; one that has not ended by then is not used
MIN_TOKENS = 4
STAND_INS = ("a message of a user", "What others write")  # for the message; unlike at their beginnings and ends
SEED = 1 << 40  # added to an answer's seed, the message's


@dataclass(frozen=True)
class PromptWriter:
    """What a chat template puts around a user's message.

    Attributes:
        head: tokens before the message.
        tail: tokens after it, up to where the answer begins; the first one ends the message.
        marks: tokens that templates are made of; a message that holds one is no message.
        limit: tokens of a prompt at most.
    """

    head: tuple[int, ...]
    tail: tuple[int, ...]
    marks: frozenset[int]
    limit: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, limit: int) -> "PromptWriter | None":
        """Reads the chat template; None where there is none, it does not put a message between two texts, no token
        tells the message's end, or the limit leaves no room for a message."""
        if tokenizer.chat_template is None:
            return None
        texts = list[str]()
        for message in STAND_INS:
            messages = [{"role": "user", "content": message}]
            try:
                text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            except Exception:  # Jinja's own, and what a template raises
                return None
            if text.count(message) != 1:
                return None
            texts.append(text)
        one, other = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        head, tail = _shared(one, other), _shared(one[::-1], other[::-1])[::-1]
        marks = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip())
        tail = _from_end(tokenizer, tail, marks)
        if not (head and tail) or limit - len(head) - len(tail) < MIN_TOKENS:
            return None
        return cls(head, tail, marks, limit)

    def write(self, engine: AnswerEngine, seeds: Sequence[int]) -> list[tuple[int, ...] | None]:
        """Returns a prompt for each seed, head and tail included; None where the model wrote no whole message.

        Raises:
            GenerationError: the bundle cannot answer lists of prompts.
        """
        if not seeds:
            return []
        config = GenerationConfig(
            mode="full",
            temperature=TEMPERATURE,
            max_new_tokens=min(MAX_NEW_TOKENS, self.limit - len(self.head) - len(self.tail) + 1),
            seed=[seed + SEED for seed in seeds],
            stop_token_ids=[self.tail[0]],
        )
        written = engine.generate([list(self.head)] * len(seeds), config)
        return [self._prompt(result.tokens) for result in written]

    def _prompt(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        message = tuple(map(int, tokens[:-1]))
        if len(message) < MIN_TOKENS or tokens[-1] != self.tail[0] or self.marks.intersection(message):
            return None
        return (*self.head, *message, *self.tail)


def _shared(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Returns the tokens that two texts begin with."""
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _from_end(tokenizer: PreTrainedTokenizerBase, tail: tuple[int, ...], marks: frozenset[int]) -> tuple[int, ...]:
    """Returns a tail from the token on that ends a message, such as `<|im_end|>`, `[/INST]` or a line's end; blank text
    before a mark is the message's. Nothing where the tail begins with a word, as messages have it, too."""
    first = next((place for place, token in enumerate(tail) if token in marks), len(tail))
    if first < len(tail) and not str(tokenizer.decode(list(tail[:first]))).strip():
        return tail[first:]
    end = str(tokenizer.decode(list(tail[:1])))
    return () if not end.strip(" ") or any(letter.isalnum() for letter in end) else tail
