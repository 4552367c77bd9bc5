"""Puts generated text into the JSON of OpenAI's API, whole or as server-sent events."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from tide_export.runtime.scheduling.handle import RequestHandle
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

    async def whole(self) -> dict[str, Any]:
        """The answer once all choices have ended. Raises ApiError: one failed; the others are cancelled."""

        async def read(number: int) -> tuple[str, str, int]:
            text, tokens, reason = "", 0, ""
            async for piece in self._pieces(number):
                text, tokens, reason = text + piece.text, tokens + piece.tokens, piece.finish_reason or ""
            return text, reason, tokens

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read(number)) for number in range(len(self.choices))]
        except* ApiError as errors:
            raise errors.exceptions[0] from None
        finally:
            cancel([handle for _, handle in self.choices])
        results = [task.result() for task in tasks]
        choices = []
        for number, (text, reason, _) in enumerate(results):
            said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append({"index": number, **said, "logprobs": None, "finish_reason": reason})
        spent = usage(self.choices, sum(tokens for _, _, tokens in results))
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
                spent += piece.tokens
                left -= piece.finish_reason is not None
                said: dict[str, Any] = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
                if piece.text and piece.finish_reason is not None:
                    yield self._event(number, said, None)
                    said = {"delta": {}} if self._chat else {"text": ""}
                yield self._event(number, said, piece.finish_reason)
            if self.request.stream_options is not None and self.request.stream_options.include_usage:
                yield _data(self._chunk() | {"choices": [], "usage": usage(self.choices, spent)})
            yield DONE
        finally:  # also where the client has gone
            cancel([handle for _, handle in self.choices])
            for task in tasks:
                task.cancel()

    def _pieces(self, number: int) -> AsyncIterator[Piece]:
        prompt, handle = self.choices[number]
        return self.service.pieces(handle, prompt, self.request.stops)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.service.model}

    def _chunk(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self._chat else "text_completion")

    def _event(self, number: int, said: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": number, **said, "logprobs": None, "finish_reason": reason}
        return _data(self._chunk() | {"choices": [choice]})


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
