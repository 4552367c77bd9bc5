"""Samples the model's own answers to a few shipped prompts, on which `probe` measures exits."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from tide_export.calibration.collect import check_ids
from tide_export.calibration.self_generated import encode_prompt, sample_answers
from tide_export.common.progress import stage
from tide_export.data.sequences import TokenSequence
from tide_export.drafting.shipped_prompts import shipped_prompts
from tide_export.errors import CalibrationError, ProbeError
from tide_export.model.source import SourceModel

PROMPTS = 32
NEW_TOKENS = 48  # maximum of an answer
MAX_PROMPT_TOKENS = 96
ROWS = 32  # answers sampled together
SPARE = 4  # prompts made for each that is used, because some are too long


@dataclass(frozen=True)
class Answers:
    """Prompts and sampled answers, as token ids; `chat`: the prompts are a user's messages."""

    prompts: list[list[int]]
    answers: list[list[int]]
    chat: bool
    temperature: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))


def sample(source: SourceModel, tokenizer: PreTrainedTokenizerBase, temperature: float, seed: int = 0) -> Answers:
    """Samples an answer to each of PROMPTS shipped prompts.

    A model without chat template continues beginnings of texts.

    Raises:
        ProbeError: no prompt fits the model's context, the model cannot generate, or it answers with a token or two.
        CalibrationError: the tokenizer is another model's.
        DatasetError: the chat template refuses a prompt.
    """
    context = source.context_length or 4 * MAX_PROMPT_TOKENS
    new_tokens = min(NEW_TOKENS, context // 2)
    limit = min(MAX_PROMPT_TOKENS, context - new_tokens)
    chat = tokenizer.chat_template is not None
    encoded = (encode_prompt(tokenizer, text) for text in shipped_prompts(seed, SPARE * PROMPTS, chat))
    prompts = sorted([ids for ids in encoded if 0 < len(ids) <= limit][:PROMPTS], key=len)
    if not prompts:
        raise ProbeError(f"model {source.name!r}: none of the shipped prompts has 1 to {limit} tokens of its tokenizer")
    check_ids(source, [TokenSequence(number, np.array(ids, np.int32)) for number, ids in enumerate(prompts)])
    answers = list[list[int]]()
    with stage("sampling answers", total=float(len(prompts))) as advance:
        for first in range(0, len(prompts), ROWS):
            batch = prompts[first : first + ROWS]
            try:
                answers += sample_answers(source, batch, max(map(len, batch)) + new_tokens, temperature, seed + first)
            except CalibrationError as error:
                reason = str(error).partition(";")[0]
                raise ProbeError(f"{reason}; export it (--checkpoints none), then bench measures it") from error
            advance(float(len(batch)))
    made = Answers(prompts, answers, chat, temperature)
    if made.tokens < 8 * len(prompts):
        raise ProbeError(
            f"model {source.name!r} answers {len(prompts)} prompts with {made.tokens} tokens, too few to measure exits "
            "on: export it, and calibrate on text with --dataset"
        )
    return made
