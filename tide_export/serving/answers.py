"""Writes generated text as the JSON of OpenAI's API, whole or as server-sent events."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from tide_export.runtime.handle import RequestHandle
from tide_export.serving.call_reader import Part
from tide_export.serving.echo import echoed
from tide_export.serving.logprobs import of_completion, of_conversation
from tide_export.serving.protocol import UNFORESEEN, ApiError, ChatRequest, CompletionRequest, GenerationRequest
from tide_export.serving.service import Choices, Piece, Service, cancel, usage

logger = logging.getLogger("tide_export.serving")
DONE = b"data: [DONE]\n\n"


@dataclass
class Answer:
    """Writes the answer to one request whose choices are in the queue."""

    service: Service
    request: GenerationRequest
    choices: Choices

    def __post_init__(self) -> None:
        self._chat = isinstance(self.request, ChatRequest)
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets = [0] * len(self.choices)  # characters of the tokens so far

    async def whole(self) -> dict[str, Any]:
        """Returns the answer once all choices have ended.

        Raises:
            ApiError: a choice failed; the others are cancelled.
        """

        async def read(number: int) -> list[tuple[Piece, list[Part]]]:
            return [piece async for piece in self._told(number)]

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read(number)) for number in range(len(self.choices))]
        except* ApiError as errors:
            raise errors.exceptions[0] from None
        finally:
            cancel([handle for _, handle in self.choices])
        return await asyncio.to_thread(self._joined, [task.result() for task in tasks])

    def _joined(self, told: Sequence[Sequence[tuple[Piece, list[Part]]]]) -> dict[str, Any]:
        choices, spent_tokens = [], 0
        for number, some_told in enumerate(told):
            pieces, parts = [piece for piece, _ in some_told], [part for _, some in some_told for part in some]
            reason = pieces[-1].finish_reason
            said = {"message": message_of(parts)} if self._chat else {"text": "".join(part.text for part in parts)}
            logprobs = self._logprobs(number, pieces)
            choices.append({"index": number, **said, "logprobs": logprobs, "finish_reason": reason})
            spent_tokens += sum(len(piece.tokens) for piece in pieces if not piece.echoed)
        spent = usage(self.choices, spent_tokens)
        return self._head("chat.completion" if self._chat else "text_completion") | {"choices": choices, "usage": spent}

    async def events(self) -> AsyncIterator[bytes]:
        """Yields server-sent events, the choices interleaved; an error is the last event."""
        queue, spent = asyncio.Queue[tuple[int, tuple[Piece, list[Part]] | ApiError]](), 0

        async def read(number: int) -> None:
            try:
                async for told in self._told(number):
                    queue.put_nowait((number, told))
            except ApiError as error:
                queue.put_nowait((number, error))
            except Exception:
                logger.exception("choice %d failed", number)
                queue.put_nowait((number, ApiError(500, UNFORESEEN, "server_error")))

        tasks = [asyncio.create_task(read(number)) for number in range(len(self.choices))]
        try:
            if self._chat:
                for number in range(len(tasks)):
                    yield self._event(number, {"delta": {"role": "assistant", "content": ""}}, None)
            left = len(tasks)
            while left:
                number, told = await queue.get()
                if isinstance(told, ApiError):
                    yield _data(told.body())
                    return
                piece, parts = told
                spent += 0 if piece.echoed else len(piece.tokens)
                left -= piece.finish_reason is not None
                if piece.echoed:  # thousands of log-probabilities
                    events = await asyncio.to_thread(self._events_of, number, piece, parts)
                else:
                    events = self._events_of(number, piece, parts)
                for event in events:
                    yield event
            if self.request.stream_options is not None and self.request.stream_options.include_usage:
                yield _data(self._chunk() | {"choices": [], "usage": usage(self.choices, spent)})
            yield DONE
        finally:  # also when the client disconnects
            cancel([handle for _, handle in self.choices])
            for task in tasks:
                task.cancel()

    def _events_of(self, number: int, piece: Piece, parts: Sequence[Part]) -> list[bytes]:
        """Returns the events of a piece of a choice."""
        events, logprobs = list[bytes](), self._logprobs(number, [piece])
        for part in parts:
            said = {"delta": _delta(part)} if self._chat else {"text": part.text}
            events.append(self._event(number, said, None, logprobs))
            logprobs = None
        if piece.finish_reason is not None or logprobs is not None:
            nothing: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            events.append(self._event(number, nothing, piece.finish_reason, logprobs))
        return events

    def _told(self, number: int) -> AsyncGenerator[tuple[Piece, list[Part]]]:
        prompt, handle = self.choices[number]
        told = told_by(self.service, self.request, handle)
        echoes = isinstance(self.request, CompletionRequest) and self.request.echo
        return echoed(self.service, prompt, handle, told) if echoes else told

    def _logprobs(self, number: int, pieces: Sequence[Piece]) -> Any:
        """Returns the log-probabilities of the next pieces of a choice; None: not requested."""
        tokens = [token for piece in pieces for token in piece.tokens]
        logprobs: list[Any] = [one for piece in pieces for one in piece.logprobs or ()]  # None: an echo's first token
        if self.request.logprobs_wanted is None or not tokens:
            return None
        if self._chat:
            return of_conversation(self.service.tokenizer, tokens, logprobs)
        entries = of_completion(self.service.tokenizer, tokens, logprobs, self._offsets[number])
        self._offsets[number] += sum(map(len, entries["tokens"]))
        return entries

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self.request.model}

    def _chunk(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self._chat else "text_completion")

    def _event(self, number: int, said: dict[str, Any], reason: str | None, logprobs: Any = None) -> bytes:
        choice = {"index": number, **said, "logprobs": logprobs, "finish_reason": reason}
        return _data(self._chunk() | {"choices": [choice]})


async def told_by(
    service: Service, request: GenerationRequest, handle: RequestHandle
) -> AsyncGenerator[tuple[Piece, list[Part]]]:
    """Yields the pieces of one choice, each with the parts (text, tool calls) that it completes.

    Raises:
        ApiError: as `Service.pieces` raises it.
    """
    reader = service.reader(request)
    async with aclosing(service.pieces(handle)) as pieces:
        async for piece in pieces:
            if reader is None:
                yield piece, [Part(piece.text)] if piece.text else []
                continue
            parts, reason = reader.push(piece.text, piece.finish_reason is not None), piece.finish_reason
            if reader.done or (reader.calls and reason == "stop"):
                reason = "tool_calls"
            yield replace(piece, finish_reason=reason), parts
            if reader.done:
                return


def message_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Joins parts to the assistant's message."""
    text, calls = "".join(part.text for part in parts if part.number is None), list[dict[str, Any]]()
    for part in parts:
        if part.name:
            calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        elif part.number is not None:
            calls[part.number]["function"]["arguments"] += part.text
    return {"role": "assistant", "content": text or (None if calls else "")} | ({"tool_calls": calls} if calls else {})


def _delta(part: Part) -> dict[str, Any]:
    """Returns a part as the `delta` of an event."""
    if part.number is None:
        return {"content": part.text}
    begun = {"id": part.id, "type": "function"} if part.name else {}
    function = ({"name": part.name} if part.name else {}) | {"arguments": part.text}
    return {"tool_calls": [{"index": part.number, **begun, "function": function}]}


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
