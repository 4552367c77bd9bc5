"""Generates calibration text with the model itself, for `self_generated` instead of a dataset.

The model answers prompts by sampling, as in LLM-QAT (Liu et al., https://arxiv.org/abs/2305.17888). Routers and lenses
then see text that the model writes in use, and only the positions that it wrote.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase

from tide_export.calibration.config import TideConfig
from tide_export.calibration.distributed import Processes
from tide_export.common.files import failure, replace_files
from tide_export.common.progress import quiet_transformers
from tide_export.common.prompt_files import Beginning, read_prompts
from tide_export.common.values import parse_json
from tide_export.data.documents import document_hash
from tide_export.data.sequences import TokenSequence
from tide_export.errors import CalibrationError, DatasetError, GenerationError, one_line
from tide_export.model.source import SourceModel

logger = logging.getLogger("tide_export")

Answers = list[list[int]]  # token ids of the answer to each prompt of a batch
MAX_PROMPT_SHARE = 0.5  # maximum share of a sequence; longer prompts are left out


@dataclass(frozen=True)
class Answered:
    """Prompts with the model's answers.

    Attributes:
        sequences: prompts with answers; `document` is the index of the prompt, `first` the start of the answer.
        hashes: `document_hash` of each prompt of the file.
        sha256: hash of all prompts.
    """

    sequences: list[TokenSequence]
    hashes: list[str]
    sha256: str


def prompts_in(path: str) -> list[str]:
    """Reads the prompts of a file.

    Raises:
        DatasetError: the file cannot be read or holds no prompt.
    """
    try:
        return read_prompts(Path(path))
    except GenerationError as error:
        raise DatasetError(str(error)) from None


def prompts_to_answer(
    tokenizer: PreTrainedTokenizerBase, path: str, length: int, limit: int
) -> tuple[list[str], dict[int, list[int]]]:
    """Reads the first `limit` prompts of a file and encodes those that leave room for an answer.

    Warns of the others. A tokenizer with a chat template gets each prompt as a user's message.

    Returns:
        The prompts, and index -> token ids of those with at most half of `length` tokens.

    Raises:
        DatasetError: the file cannot be read or holds no prompt, the chat template refuses one, or all are too long.
    """
    prompts = prompts_in(path)[:limit]
    encoded = {number: encode_prompt(tokenizer, prompt) for number, prompt in enumerate(prompts)}
    usable = {number: ids for number, ids in encoded.items() if 0 < len(ids) <= MAX_PROMPT_SHARE * length}
    if not usable:
        raise DatasetError(
            f"{path}: none of its {len(prompts)} prompts has 1 to {int(MAX_PROMPT_SHARE * length)} tokens, half of "
            "calibration_length"
        )
    if len(usable) < len(prompts):
        logger.warning(
            "%s: %d of %d prompts are left out: they have no token, or more than half of calibration_length (%d)",
            path,
            len(prompts) - len(usable),
            len(prompts),
            length,
        )
    return prompts, usable


def answer_prompts(
    source: SourceModel, tokenizer: PreTrainedTokenizerBase, config: TideConfig, cache: Path | None
) -> Answered:
    """Samples answers of `source` to the prompts of `config.self_generated`.

    Each prompt gets `config.self_generated_answers` answers at `config.self_generated_temperature`. An answer ends with
    the model's end-of-sequence token, or when prompt and answer have `config.calibration_length` tokens. Processes
    started by a launcher share the work.

    Args:
        cache: a folder whose subfolder `answers` gets a file for each batch, from which a killed run resumes.

    Raises:
        DatasetError: `prompts_to_answer` refuses the prompts.
        CalibrationError: the model gives NaN or cannot generate, the folder cannot be used, or another process ended.
    """
    assert config.self_generated is not None
    length = answer_length(source, config)
    prompts, usable = prompts_to_answer(tokenizer, config.self_generated, length, config.calibration_samples)
    numbers = sorted(usable, key=lambda number: len(usable[number]))  # similar lengths need less padding
    size = config.calibration_batch
    once = [numbers[first : first + size] for first in range(0, len(numbers), size)]
    batches = once * config.self_generated_answers
    processes = Processes.current()
    settings = {
        "weights_sha256": source.weights_sha256,
        "quantized": source.quantized is not None,
        "prompts": [[usable[number] for number in batch] for batch in once],
        "length": length,
        "temperature": config.self_generated_temperature,
        "seed": config.seed,
        "versions": {package: version(package) for package in ("torch", "transformers")},
    }
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    ours: dict[int, Answers] = {}
    with processes.stage("answering prompts", float(len(batches[processes.rank :: processes.count]))) as advance:
        for number in range(processes.rank, len(batches), processes.count):
            encoded, seed = [usable[one] for one in batches[number]], config.seed * 1_000_003 + number
            file = None if cache is None else cache / "answers" / f"{key}-{number:04}.json"
            ours[number] = _kept(
                file, partial(sample_answers, source, encoded, length, config.self_generated_temperature, seed)
            )
            advance(1)
    answers = {number: batch for share in processes.gather(ours) for number, batch in share.items()}
    sequences = [
        TokenSequence(number, np.array(usable[number] + answer, np.int32), first=len(usable[number]) - 1)
        for batch, one in enumerate(batches)
        for number, answer in zip(one, answers[batch], strict=True)
    ]
    return Answered(
        sorted(sequences, key=lambda sequence: sequence.document),
        [document_hash(prompt) for prompt in prompts],
        hashlib.sha256(b"".join(prompt.encode() + b"\0" for prompt in prompts)).hexdigest(),
    )


def answer_length(source: SourceModel, config: TideConfig) -> int:
    """Returns the maximum tokens of a prompt with its answer."""
    return min(config.calibration_length, source.context_length or config.calibration_length)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Returns the token ids of a prompt, as a user's message if the tokenizer has a chat template.

    A `Beginning` is no message.

    Raises:
        DatasetError: the chat template refuses it.
    """
    if tokenizer.chat_template is None or isinstance(prompt, Beginning):
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # Jinja and templates raise many types
        raise DatasetError(f"the chat template refuses the prompt {prompt[:40]!r}: {one_line(error)}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def sample_answers(
    source: SourceModel, prompts: Sequence[Sequence[int]], length: int, temperature: float, seed: int
) -> Answers:
    """Samples one answer to each prompt, including its end-of-sequence token.

    Args:
        prompts: token ids of each.
        length: tokens at which an answer ends, together with the longest prompt.

    Raises:
        CalibrationError: the model gives NaN or cannot generate.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    stop = list(source.eos_token_ids)
    settings = GenerationConfig(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=length - width,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
    )
    model: Any = source.model  # PyTorch's modules do not declare `generate`
    # One that takes any number of layers: of its own, transformers makes one for the config's, and loops have more.
    cache = {"past_key_values": DynamicCache()} if source.remote_code else {}
    devices = [source.device] if source.device.type == "cuda" else []
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            rows = model.generate(
                ids.to(source.device), attention_mask=mask.to(source.device), generation_config=settings, **cache
            )
    except Exception as error:  # models and transformers raise many types
        raise CalibrationError(
            f"model {source.name!r} cannot answer prompts: {one_line(error)}; calibrate on text with --dataset"
        ) from error
    return [_until(row[width:].tolist(), stop) for row in rows]


def _kept(file: Path | None, answer: Callable[[], Answers]) -> Answers:
    """Returns the answers in `file`, or calls `answer` and stores them there."""
    if file is None:
        return answer()
    try:
        if not file.exists():
            answers = answer()
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_files({file: json.dumps(answers).encode()})
        return [[int(token) for token in one] for one in parse_json(file.read_text())]
    except OSError as error:
        raise CalibrationError(
            f"cannot write the calibration folder {file.parent}: {failure(error, file.parent)}"
        ) from error
    except (ValueError, TypeError) as error:
        raise CalibrationError(
            f"calibration folder {file.parent} is damaged ({file.name}): delete it or use another"
        ) from error


def _until(answer: list[int], stop: Sequence[int]) -> list[int]:
    end = next((place for place, token in enumerate(answer) if token in stop), len(answer))
    return answer[: end + 1]
