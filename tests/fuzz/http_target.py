"""Bytes of a connection, given to the server without a socket: every request is answered, none with 500."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
import uvicorn
from bundles import put_text
from tokenizers import pre_tokenizers
from tokenizers_to_mutate import ADDED, BYTES, bpe, tokenizer
from uvicorn.server import ServerState

from tide_export.runtime.engine import load
from tide_export.serving.app import build_app
from tide_export.serving.config import ServerConfig
from tide_export.serving.server import connection_class
from tide_export.serving.service import Service

SECONDS = 20  # for an answer
STATUSES = {0, 200, 400, 403, 404, 405, 413, 499}  # 0, 499: the client had gone
TEMPLATE = "{% for m in messages %}{{ (m.content or '')[:20] }}{% endfor %}a"
CONFIG = ServerConfig(model_name="m", max_tokens=4, body_bytes=20_000, slots=2, waiting=2, allow_origin=("http://a",))


def http_json(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Changes the body of the last request, and its length in the headers."""
    head, _, body = data.rpartition(b"\r\n\r\n")
    body = change(body)
    return re.sub(rb"(?i)(content-length: )\d+$", rb"\g<1>%d" % len(body), head, flags=re.M) + b"\r\n\r\n" + body


def byte_tokenizer(size: int) -> dict[str, Any]:
    """A tokenizer of `size` tokens: an unknown one, the end of the text, all bytes, and others that no text has."""
    names = ["[UNK]", "a", "</s>", *sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"a"})]
    names += [f"<{token}>" for token in range(len(names), size)]
    spaces = BYTES | {"add_prefix_space": False}
    model = bpe(vocab={name: token for token, name in enumerate(names)}, merges=[])
    end = ADDED | {"id": 2, "content": "</s>"}
    return tokenizer(model, pre_tokenizer=spaces, decoder=spaces, added_tokens=[end])


class Transport(asyncio.Transport):
    """Keeps what the server writes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class Watched:
    """The application, whose answers are kept."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.answers = list[list[Any]]()  # each a method, a path, a status, a body, and whether it was sent

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer: list[Any] = [scope["method"], scope["path"], 0, b"", False]
        self.answers.append(answer)

        async def watched(message: Any) -> None:
            answer[2] = message.get("status", answer[2])
            await send(message)
            answer[3] += message.get("body", b"")
            answer[4] = message["type"] == "http.response.body" and not message.get("more_body", False)

        await self._app(scope, receive, watched)


def http(given: Any) -> Callable[[bytes], None]:
    """Each answer has a status that a client can cause, and says in JSON what was done or why not."""
    bundle = Path(shutil.copytree(given.bundle, given.folder / "served"))
    put_text(bundle, "tokenizer.json", json.dumps(byte_tokenizer(512)))
    put_text(bundle, "chat_template.jinja", TEMPLATE)
    service = Service(load(bundle, threads=1), CONFIG)
    given.after.callback(service.close)
    service.scheduler.start()
    app, loop = Watched(build_app(service)), asyncio.new_event_loop()
    given.after.callback(loop.close)
    connection = connection_class(CONFIG)
    config = uvicorn.Config(app, http=connection, log_config=None, access_log=False, lifespan="off")
    config.load()

    async def ask(data: bytes) -> None:
        app.answers.clear()
        state, transport = ServerState(), Transport()
        one = connection(config, state, {}, loop)
        one.connection_made(transport)
        if data:  # a socket that has none does not say so
            one.data_received(data)
        while state.tasks:
            for _ in range(20):
                await asyncio.sleep(0)
            if one.conn.their_state in (h11.SEND_BODY, h11.ERROR):  # the rest does not come
                one.connection_lost(None)
            if not state.tasks:
                break
            _, late = await asyncio.wait(state.tasks, timeout=SECONDS)
            assert not late, "there is no answer"
        if not transport.closed:
            one.connection_lost(None)
        assert transport.written[:9] in (b"", b"HTTP/1.1 "), transport.written[:99]

    def check(data: bytes) -> None:
        loop.run_until_complete(ask(data))
        for answer in app.answers:
            check_answer(*answer)

    return check


def check_answer(method: str, path: str, status: int, body: bytes, sent: bool) -> None:
    assert status in STATUSES, (status, body)
    if not sent or status == 499 or method == "OPTIONS":  # the client had gone; CORS answers OPTIONS
        return
    text = body.decode()
    if status >= 400:
        message = json.loads(text)["error"]["message"]
        assert message.strip()
        assert len(message.splitlines()) == 1, f"several lines: {message!r}"
        assert len(message) < 1000, f"no sentence: {len(message)} characters"
    elif text.startswith(("data: ", "event: ")):
        assert text.endswith("\n\n")
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert path == "/v1/responses" or lines.pop() == "[DONE]"
        assert all(isinstance(json.loads(line), dict) for line in lines)
    elif path.startswith("/v1/"):
        assert isinstance(json.loads(text), dict)
