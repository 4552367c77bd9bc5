"""Chooses and encodes the prompts whose answers a drafter is trained on, and those whose answers it is measured on."""

import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tide_export.calibration.self_generated import encode_prompt
from tide_export.drafting.config import DraftConfig
from tide_export.drafting.shipped_prompts import shipped_prompts
from tide_export.errors import DatasetError, DraftError, GenerationError
from tide_export.runtime.tokenizer import read_prompts

logger = logging.getLogger("tide_export")

MAX_PROMPT_TOKENS = 512
MAX_PROMPTS = 20_000
HELD_OUT_PROMPTS = 100  # at most; also the most answers that acceptance is measured on
HELD_OUT_SHARE = 0.1  # of the prompts, or of the forms of shipped ones, at most
HELD_OUT_EVERY = 10  # until there are as many as wanted, every tenth answer is held out


@dataclass(frozen=True)
class Request:
    """A prompt to answer: its token ids, the seed of the answer, whether the answer is never trained on."""

    number: int
    ids: tuple[int, ...]
    seed: int
    held_out: bool


class Prompts:
    """Prompts in random order. The answers to some are never trained on, however often they are answered."""

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        seed: int,
        forms: Mapping[str, str] | None = None,
    ) -> None:
        """Takes different texts, two or more.

        Args:
            limit: tokens of a prompt at most; longer ones are passed over.
            seed: of the order and the answers.
            forms: that texts were filled from: answers to others of a form say little of answers to new prompts, so all
                of a form are held out, or none. None: each text is one of its own.
        """
        self._tokenizer, self._limit, self._seed = tokenizer, limit, seed
        shuffled = random.Random(seed).sample(texts, len(texts))
        form_of = forms or {text: text for text in shuffled}
        names = list(dict.fromkeys(form_of[text] for text in shuffled))
        held_out = set(names[: max(1, int(HELD_OUT_SHARE * len(names)))])
        self._held_out = [text for text in shuffled if form_of[text] in held_out][:HELD_OUT_PROMPTS]
        if forms is None:
            held_out = set(self._held_out)
        self._training = [text for text in shuffled if form_of[text] not in held_out]
        self._encoded: dict[str, tuple[int, ...]] = {}

    @property
    def sha256(self) -> str:
        """Over all of them, in order."""
        texts = (*self._held_out, *self._training)
        return hashlib.sha256(b"".join(text.encode() + b"\0" for text in texts)).hexdigest()

    def request(self, number: int) -> Request:
        """Returns the request of answer `number`, from 0: the prompts in turn, each time with another seed.

        Raises:
            DraftError: no prompt has a number of tokens that can be used; the chat template refuses one.
        """
        turn, rest = divmod(number, HELD_OUT_EVERY)
        held_out = rest == 0 and turn < HELD_OUT_PROMPTS
        ids = self._ids(self._held_out, turn) if held_out else self._ids(self._training, number)
        return Request(number, ids, self._seed * 1_000_003 + number, held_out)

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a prompt, none where there are more than the limit.

        Raises:
            DraftError: the chat template refuses it.
        """
        if text not in self._encoded:
            try:
                ids = tuple(encode_prompt(self._tokenizer, text))
            except DatasetError as error:
                raise DraftError(str(error)) from None
            self._encoded[text] = ids if len(ids) <= self._limit else ()
        return self._encoded[text]

    def _ids(self, texts: Sequence[str], place: int) -> tuple[int, ...]:
        for step in range(len(texts)):
            if ids := self.encode(texts[(place + step) % len(texts)]):
                return ids
        raise DraftError(f"none of {len(texts)} prompts has 1 to {self._limit} tokens")


def check_prompts(config: DraftConfig) -> list[str] | None:
    """Reads the prompts of the user's file; None where shipped ones are used.

    Raises:
        DraftError: it cannot be read, holds no prompt or only one.
    """
    if config.prompts is None:
        return None
    try:
        texts = list(dict.fromkeys(read_prompts(Path(config.prompts))))
    except GenerationError as error:
        raise DraftError(str(error)) from None
    if len(texts) < 2:
        raise DraftError(f"{config.prompts} holds one prompt, and drafts are measured on another: give more")
    return texts


def choose_prompts(
    texts: list[str] | None, tokenizer: PreTrainedTokenizerBase, config: DraftConfig, context: int | None
) -> Prompts:
    """Makes `Prompts` of the user's, without those that are too long, which a warning counts; or of shipped ones.

    Args:
        texts: of `check_prompts`.
        context: tokens that the model takes; None: any number.

    Raises:
        DraftError: fewer than two of the user's can be used, or the chat template refuses one.
    """
    limit = MAX_PROMPT_TOKENS if context is None else min(MAX_PROMPT_TOKENS, context // 2)
    if texts is None:
        chat = tokenizer.chat_template is not None
        if not chat:
            logger.info(
                "the model has no chat template: it continues shipped beginnings of texts and code; --prompts with "
                "text as it will be given makes better drafts"
            )
        forms = shipped_prompts(config.seed, MAX_PROMPTS, chat)
        return Prompts(list(forms), tokenizer, limit, config.seed, forms)
    prompts = Prompts(texts[:MAX_PROMPTS], tokenizer, limit, config.seed)
    usable = [text for text in texts[:MAX_PROMPTS] if prompts.encode(text)]
    if len(usable) < 2:
        raise DraftError(f"{config.prompts}: {len(usable)} of its prompts have 1 to {limit} tokens, and 2 are needed")
    if len(usable) < len(texts):
        left_out = len(texts) - len(usable)
        logger.warning(
            "%s: %d of %d prompts are left out: they have no token or more than %d, or are beyond the first %d",
            *(config.prompts, left_out, len(texts), limit, MAX_PROMPTS),
        )
    return Prompts(usable, tokenizer, limit, config.seed)
