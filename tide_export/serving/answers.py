"""Puts generated text into the JSON of OpenAI's API, whole or as server-sent events."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from tide_export.runtime.handle import RequestHandle
from tide_export.serving.logprobs import of_completion, of_conversation
from tide_export.serving.protocol import ApiError, ChatRequest, GenerationRequest
from tide_export.serving.service import Piece, Prompt, Service, cancel, usage

DONE = b"data: [DONE]\n\n"


@dataclass
class Answer:
    """The choices of one request, in the queue already."""

    service: Service
    request: GenerationRequest
    choices: Sequence[tuple[Prompt, RequestHandle]]

    def __post_init__(self) -> None:
        self._chat = isinstance(self.request, ChatRequest)
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets = [0] * len(self.choices)  # characters of the tokens so far

    async def whole(self) -> dict[str, Any]:
        """The answer once all choices have ended. Raises ApiError: one failed; the others are cancelled."""

        async def read(number: int) -> list[Piece]:
            return [piece async for piece in self._pieces(number)]

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read(number)) for number in range(len(self.choices))]
        except* ApiError as errors:
            raise errors.exceptions[0] from None
        finally:
            cancel([handle for _, handle in self.choices])
        choices, spent_tokens = [], 0
        for number, pieces in enumerate(task.result() for task in tasks):
            text, reason = "".join(piece.text for piece in pieces), pieces[-1].finish_reason
            said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            logprobs = self._logprobs(number, pieces)
            choices.append({"index": number, **said, "logprobs": logprobs, "finish_reason": reason})
            spent_tokens += sum(len(piece.tokens) for piece in pieces)
        spent = usage(self.choices, spent_tokens)
        return self._head("chat.completion" if self._chat else "text_completion") | {"choices": choices, "usage": spent}

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, the choices interleaved as they come; an error is the last event."""
        queue, spent = asyncio.Queue[tuple[int, Piece | Exception]](), 0

        async def read(number: int) -> None:
            try:
                async for piece in self._pieces(number):
                    queue.put_nowait((number, piece))
            except ApiError as error:
                queue.put_nowait((number, error))

        tasks = [asyncio.create_task(read(number)) for number in range(len(self.choices))]
        try:
            if self._chat:
                for number in range(len(tasks)):
                    yield self._event(number, {"delta": {"role": "assistant", "content": ""}}, None)
            left = len(tasks)
            while left:
                number, piece = await queue.get()
                if isinstance(piece, ApiError):
                    yield _data(piece.body())
                    return
                assert isinstance(piece, Piece)
                spent += len(piece.tokens)
                logprobs = self._logprobs(number, [piece])
                left -= piece.finish_reason is not None
                said: dict[str, Any] = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
                if piece.text and piece.finish_reason is not None:
                    yield self._event(number, said, None, logprobs)
                    logprobs = None
                    said = {"delta": {}} if self._chat else {"text": ""}
                yield self._event(number, said, piece.finish_reason, logprobs)
            if self.request.stream_options is not None and self.request.stream_options.include_usage:
                yield _data(self._chunk() | {"choices": [], "usage": usage(self.choices, spent)})
            yield DONE
        finally:  # also where the client has gone
            cancel([handle for _, handle in self.choices])
            for task in tasks:
                task.cancel()

    def _pieces(self, number: int) -> AsyncIterator[Piece]:
        return self.service.pieces(self.choices[number][1])

    def _logprobs(self, number: int, pieces: Sequence[Piece]) -> Any:
        """Of the tokens of the next pieces of a choice; None: nobody asked for them."""
        tokens = [token for piece in pieces for token in piece.tokens]
        found = [one for piece in pieces for one in piece.logprobs or ()]
        if self.request.logprobs_wanted is None or not tokens:
            return None
        if self._chat:
            return of_conversation(self.service.tokenizer, tokens, found)
        made = of_completion(self.service.tokenizer, tokens, found, self._offsets[number])
        self._offsets[number] += sum(map(len, made["tokens"]))
        return made

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.service.model}

    def _chunk(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self._chat else "text_completion")

    def _event(self, number: int, said: dict[str, Any], reason: str | None, logprobs: Any = None) -> bytes:
        choice = {"index": number, **said, "logprobs": logprobs, "finish_reason": reason}
        return _data(self._chunk() | {"choices": [choice]})


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
