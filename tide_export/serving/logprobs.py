"""Writes log-probabilities in the two JSON forms of OpenAI's API."""

import re
from collections.abc import Sequence
from typing import Any

from tide_export.runtime.generation import TokenLogprobs
from tide_export.runtime.tokenizer import REPLACEMENT, BundleTokenizer

SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that are characters themselves
BYTES = {chr(one): one for one in SHOWN}  # by the character that ByteLevel writes for them
BYTES |= {chr(0x100 + place): one for place, one in enumerate(sorted(set(range(0x100)) - set(SHOWN)))}
BYTE = re.compile("<0x([0-9A-F]{2})>")


def of_conversation(tokenizer: BundleTokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
    """Returns `logprobs` of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokenizer.token_text(token), "logprob": logprob, "bytes": bytes_of(tokenizer, token)}

    content = [
        entry(token, one.logprob) | {"top_logprobs": [entry(*alternative) for alternative in one.top]}
        for token, one in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def bytes_of(tokenizer: BundleTokenizer, token: int) -> list[int] | None:
    """Returns the bytes of a token; None: it holds part of a character, and no known form of bytes."""
    if REPLACEMENT not in (text := tokenizer.token_text(token)):
        return list(text.encode())
    inner = tokenizer._tokenizer
    entry, decoder = inner.id_to_token(token) or "", str(inner.decoder and inner.decoder.__getstate__())
    if "ByteFallback" in decoder and (byte := BYTE.fullmatch(entry)):
        return [int(byte[1], 16)]
    return [BYTES[one] for one in entry] if "ByteLevel" in decoder and BYTES.keys() >= set(entry) else None


def of_completion(
    tokenizer: BundleTokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offset: int
) -> Any:
    """Returns `logprobs` of /v1/completions for a text that begins at `offset`.

    A prompt's first token has None.
    """
    texts, offsets = [tokenizer.token_text(token) for token in tokens], list[int]()
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [one and one.logprob for one in logprobs],
        "top_logprobs": [
            one and {tokenizer.token_text(token): value for token, value in reversed(one.top)} for one in logprobs
        ],
        "text_offset": offsets,
    }
