"""Chooses and encodes the prompts whose answers a drafter is trained or measured on."""

import hashlib
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tide_export.calibration.self_generated import encode_prompt
from tide_export.common.prompt_files import read_prompts
from tide_export.drafting.config import DraftConfig
from tide_export.drafting.shipped_prompts import shipped_prompts
from tide_export.errors import DatasetError, DraftError, GenerationError

logger = logging.getLogger("tide_export")

MAX_PROMPT_TOKENS = 512
MAX_PROMPTS = 20_000
HELD_OUT_PROMPTS = 100  # maximum; also the maximum number of answers that acceptance is measured on
HELD_OUT_SHARE = 0.1  # maximum share of the prompts, or of the forms of shipped prompts
HELD_OUT_EVERY = 10  # every tenth answer is held out, until there are enough


@dataclass(frozen=True)
class Request:
    """A prompt to answer: token ids, the seed of the answer, whether the answer is held out."""

    number: int
    ids: tuple[int, ...]
    seed: int
    held_out: bool


class Prompts:
    """Prompts in random order, some of which are held out: their answers are never trained on."""

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        seed: int,
        forms: Mapping[str, str] | None = None,
    ) -> None:
        """Takes at least two different texts.

        Args:
            limit: maximum tokens of a prompt; longer prompts are skipped.
            seed: seed of the order and the answers.
            forms: text -> the form that it was filled from. All texts of a form are held out, or none, because answers
                to texts of one form are alike. None: each text has its own form.
        """
        self._tokenizer, self._limit, self._seed = tokenizer, limit, seed
        generator = random.Random(seed)
        shuffled = generator.sample(texts, len(texts))
        form_of = forms or {text: text for text in shuffled}
        names = list(dict.fromkeys(form_of[text] for text in shuffled))
        generator.shuffle(names)  # forms of many texts come early, and would be held out most
        held_out = set(names[: max(1, int(HELD_OUT_SHARE * len(names)))])
        self._held_out = [text for text in shuffled if form_of[text] in held_out][:HELD_OUT_PROMPTS]
        if forms is None:
            held_out = set(self._held_out)
        self._training = [text for text in shuffled if form_of[text] not in held_out]
        self._encoded: dict[str, tuple[int, ...]] = {}

    @property
    def sha256(self) -> str:
        """The hash of all texts in order."""
        texts = (*self._held_out, *self._training)
        return hashlib.sha256(b"".join(text.encode() + b"\0" for text in texts)).hexdigest()

    def request(self, number: int) -> Request:
        """Returns request `number`, from 0: the prompts in order and repeated, each time with another seed.

        Raises:
            DraftError: every prompt is empty or too long, or the chat template refuses one.
        """
        group, rest = divmod(number, HELD_OUT_EVERY)
        held_out = rest == 0 and group < HELD_OUT_PROMPTS
        ids = self._ids(self._held_out, group) if held_out else self._ids(self._training, number)
        return Request(number, ids, self._seed * 1_000_003 + number, held_out)

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a prompt; empty if there are more than the limit.

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

    def _ids(self, texts: Sequence[str], start: int) -> tuple[int, ...]:
        for step in range(len(texts)):
            if ids := self.encode(texts[(start + step) % len(texts)]):
                return ids
        raise DraftError(f"none of {len(texts)} prompts has 1 to {self._limit} tokens")


def check_prompts(config: DraftConfig) -> list[str] | None:
    """Reads the distinct prompts of the user's file; None: shipped prompts are used.

    Raises:
        DraftError: the file cannot be read, or holds fewer than two prompts.
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
    """Returns the user's prompts, or shipped ones; warns of prompts that are left out as too long.

    Args:
        texts: the result of `check_prompts`.
        context: the maximum number of tokens of the model and its bundle; None: unlimited.

    Raises:
        DraftError: fewer than two of the user's prompts can be used, or the chat template refuses one.
    """
    limit = MAX_PROMPT_TOKENS if context is None else min(MAX_PROMPT_TOKENS, context // 2)
    if texts is None:
        chat = tokenizer.chat_template is not None
        if not chat:
            logger.info(
                "the model has no chat template: it continues shipped beginnings of texts and code; --prompts with "
                "text like that of its users gives better drafts"
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
