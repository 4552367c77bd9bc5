"""Writes an answer as the JSON of POST /v1/responses, whole or as typed events."""

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tide_export.serving.answers import told_by
from tide_export.serving.call_reader import Part
from tide_export.serving.protocol import UNFORESEEN, ApiError
from tide_export.serving.responses_request import ResponsesRequest
from tide_export.serving.service import Choices, Service, cancel, usage

logger = logging.getLogger("tide_export")

Event = dict[str, Any]


class ResponsesAnswer:
    """Writes the answer to one request that is in the queue."""

    def __init__(self, service: Service, request: ResponsesRequest, choices: Choices) -> None:
        """Takes a single choice."""
        self._service, self._request, self._choices = service, request, choices
        self._id, self._created = _new_id("resp"), int(time.time())
        self._items: list[dict[str, Any]] = []  # the last one is in progress
        self._spent = 0

    async def whole(self) -> dict[str, Any]:
        """Returns the answer once it has ended; ApiError if it failed."""
        answer: dict[str, Any] = {}
        async for event in self._told():
            answer = event.get("response", answer)
        return answer

    async def events(self) -> AsyncIterator[bytes]:
        """Yields server-sent events; a failed answer ends with `response.failed`."""
        number = 0
        try:
            async for event in self._told():
                yield _data(event, number)
                number += 1
        except ApiError as error:
            yield self._failed(error, number)
        except Exception:
            logger.exception("the response failed")
            yield self._failed(ApiError(500, UNFORESEEN, "server_error"), number)
        finally:  # also when the client disconnects
            cancel([handle for _, handle in self._choices])

    def _failed(self, error: ApiError, number: int) -> bytes:
        failed = self._response("failed") | {"error": {"code": error.kind, "message": str(error)}}
        return _data({"type": "response.failed", "response": failed}, number)

    async def _told(self) -> AsyncIterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress")}
        reason, ((_, handle),) = None, self._choices
        async for piece, parts in told_by(self._service, self._request.chat, handle):
            self._spent += len(piece.tokens)
            for part in parts:
                for event in self._take(part):
                    yield event
            reason = piece.finish_reason
        if not self._items:
            for event in self._begin_message():
                yield event
        status = "incomplete" if reason == "length" else "completed"
        for event in self._end_item(status):
            yield event
        yield {"type": f"response.{status}", "response": self._response(status)}

    def _take(self, part: Part) -> Iterator[Event]:
        """Yields the events of a part."""
        if part.name:
            yield from self._end_item()
            item = {"type": "function_call", "id": _new_id("fc"), "call_id": part.id, "name": part.name}
            yield self._begin(item | {"arguments": "", "status": "in_progress"})
        elif part.number is not None:
            self._items[-1]["arguments"] += part.text
            yield self._of_item("response.function_call_arguments.delta", delta=part.text)
        else:
            if not self._items or self._items[-1]["type"] != "message":
                yield from self._end_item()
                yield from self._begin_message()
            self._items[-1]["content"][0]["text"] += part.text
            yield self._of_item("response.output_text.delta", content_index=0, delta=part.text, logprobs=[])

    def _begin_message(self) -> Iterator[Event]:
        item = {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": "in_progress", "content": []}
        yield self._begin(item)
        self._items[-1]["content"].append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        yield self._of_item("response.content_part.added", content_index=0, part=dict(self._items[-1]["content"][0]))

    def _begin(self, item: dict[str, Any]) -> Event:
        self._items.append(item)
        shown = {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
        return {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": shown}

    def _end_item(self, status: str = "completed") -> Iterator[Event]:
        """Yields the events that end the item in progress, if there is one."""
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._of_item("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}

    def _of_item(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **more}

    def _response(self, status: str) -> dict[str, Any]:
        """Returns the response so far."""
        request, ended = self._request, status in ("completed", "incomplete")
        text = request.text.model_dump(exclude_none=True) if request.text else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": self._items if ended else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            **{name: getattr(request.chat, name) for name in ("temperature", "top_p")},
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        spent = usage(self._choices, self._spent)
        return {
            "input_tokens": spent["prompt_tokens"],
            "input_tokens_details": spent["prompt_tokens_details"],
            "output_tokens": spent["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": spent["total_tokens"],
        }


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _data(event: Event, number: int) -> bytes:
    text = json.dumps(event | {"sequence_number": number}, ensure_ascii=False)
    return f"event: {event['type']}\ndata: {text}\n\n".encode()
