"""Puts the prompt before the answer, for `echo` of /v1/completions."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tide_export.runtime.handle import RequestHandle
from tide_export.serving.call_reader import Part
from tide_export.serving.service import Piece, Prompt, Service

Told = AsyncGenerator[tuple[Piece, list[Part]]]


async def echoed(service: Service, prompt: Prompt, handle: RequestHandle, answer: Told) -> Told:
    """Yields the prompt, with log-probabilities if the request has them, and then the answer.

    If `prompt.max_tokens` is 0, only the end of the answer follows. Raises what `answer` raises.
    """
    begun = False
    async with aclosing(answer) as told:
        async for piece, parts in told:
            if not begun:
                text = service.tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text
                logprobs = await asyncio.to_thread(lambda: handle.prompt_logprobs)  # thousands of values
                yield Piece(text, prompt.ids, logprobs, echoed=True), [Part(text)]
            begun = True
            if prompt.max_tokens:
                yield piece, parts
            elif piece.finish_reason is not None:
                yield Piece("", [], None, "length"), []
