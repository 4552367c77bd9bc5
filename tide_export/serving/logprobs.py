"""Writes log-probabilities in the two JSON forms of OpenAI's API."""

from collections.abc import Sequence
from typing import Any

from tide_export.runtime.generation import TokenLogprobs
from tide_export.runtime.tokenizer import BundleTokenizer


def of_conversation(tokenizer: BundleTokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Any:
    """Returns `logprobs` of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(token, one.logprob) | {"top_logprobs": [entry(*alternative) for alternative in one.top]}
        for token, one in zip(tokens, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


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
