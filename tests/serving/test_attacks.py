"""What clients sent to stop a server: each is refused or bounded, and others are answered meanwhile."""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiers
from command_line import refused
from running_server import KEY, PROMPT, Running
from starlette.responses import JSONResponse

from tide_export.runtime import grammar
from tide_export.runtime.limited import LimitedProcess
from tide_export.serving import app

HOURS = {"type": "integer", "multipleOf": 9999991}  # of compiling
ASKED: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "mode": "full"}


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedProcess]:
    """The grammars of a request may take a quarter of a second."""
    process = LimitedProcess("tide_export.runtime.grammar_process", 0.25)
    monkeypatch.setattr(grammar, "_process", process)
    monkeypatch.setattr(grammar, "GRAMMAR_SECONDS", 0.25)
    yield process
    process.close()


@pytest.mark.parametrize(
    "more",
    tiers.exhaustive_beyond(
        1,
        [
            {"guided_json": HOURS},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": HOURS}}},
            {"guided_grammar": f"start: %json {json.dumps(HOURS)}"},
        ],
    ),
    ids=["guided_json", "response_format", "inside a grammar"],
)
def test_a_grammar_that_compiles_for_hours_stops_nobody(
    server: Running, brief: LimitedProcess, more: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(6) as pool:
        refusals = [pool.submit(server.http.post, "/v1/completions", json=ASKED | more) for _ in range(6)]
        assert server.http.post("/v1/completions", json=ASKED).status_code == 200
        assert not all(one.done() for one in refusals)  # they were compiling
        assert server.http.get("/health").status_code == 200
    for one in refusals:
        assert one.result().status_code == 400
        assert "cannot be compiled: takes longer than 0.25 s" in one.result().json()["error"]["message"]
    answer = server.http.post("/v1/completions", json=ASKED | {"guided_json": {"enum": [12]}})
    assert answer.json()["choices"][0]["text"] == "12"


def test_the_grammars_of_clients_that_left_are_not_compiled(server: Running, brief: LimitedProcess) -> None:
    content = json.dumps(ASKED | {"guided_json": HOURS}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(content)}"
    left = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(12)]
    for connection in left:
        connection.sendall(f"{head}\r\n\r\n".encode() + content)
    while server.service._compiling._work_queue.qsize() < 10:
        time.sleep(0.001)
    for connection in left:
        connection.close()
    started = time.monotonic()
    assert server.http.post("/v1/completions", json=ASKED | {"guided_json": {"enum": [12]}}).status_code == 200
    assert time.monotonic() - started < 12 * 0.25


def test_a_template_that_loops_stops_conversations_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(server.service, "conversation", lambda request: [3] if end.wait(30) else [])
    with ThreadPoolExecutor(16) as pool:
        chats = [pool.submit(server.http.post, "/v1/chat/completions", json=CHAT | {"max_tokens": 1}) for _ in range(8)]
        chats += [pool.submit(server.http.post, "/tokenize", json=CHAT) for _ in range(8)]
        while server.service._rendering._work_queue.qsize() < 14:
            time.sleep(0.001)
        assert server.http.post("/v1/completions", json=ASKED).status_code == 200
        assert server.http.post("/tokenize", json={"prompt": PROMPT}).status_code == 200
        end.set()
        assert {one.result().status_code for one in chats} <= {200, 429}


def test_a_body_that_is_too_large_is_read_before_its_answer(server: Running) -> None:
    """Its client, which writes, would see the connection end instead."""
    for _ in range(5):
        answer = server.http.post("/v1/completions", content=b"x" * 4_000_000)
        assert (answer.status_code, answer.json()["error"]["message"]) == (413, "the request has more than 20000 bytes")


def test_a_server_ends_while_a_grammar_compiles(chat_bundle: Path) -> None:
    running = Running(chat_bundle, drain_seconds=0.2)
    with ThreadPoolExecutor(4) as pool:
        asked = ASKED | {"guided_json": HOURS}
        waiting = [pool.submit(running.http.post, "/v1/completions", json=asked) for _ in range(4)]
        while not running.service._compiling._threads:
            pass
        running.stop()
        for one in waiting:
            assert one.exception() is not None or one.result().status_code >= 400


def test_an_ambiguous_grammar_is_refused_before_it_takes_long(server: Running) -> None:
    ambiguous = 'start: s\ns: a s b | s s | "a"\na: "a" | \nb: "a" | "b" |'
    answer = server.http.post("/v1/completions", json=ASKED | {"guided_grammar": ambiguous, "max_tokens": 200})
    assert answer.status_code == 400
    assert "items; max is 500" in answer.json()["error"]["message"]


def test_choices_may_be_many(server: Running) -> None:
    """They are one lexeme, not a rule of a thousand."""
    choices = [f"choice {number}" for number in range(600)]
    answer = server.http.post("/v1/completions", json=ASKED | {"guided_choice": choices, "max_tokens": 20})
    assert answer.json()["choices"][0]["text"] in choices


NAMED = {"type": "function", "function": {"name": "f"}}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("completions", ASKED | {"stop": ["x"] * 3000}, "stop: give at most 16 strings, not 3000"),
        ("completions", ASKED | {"stop": ["x", 3]}, "stop: give a string or a list of strings, none of them empty"),
        ("completions", ASKED | {"prompt": ["a", 1]}, "prompt: give a string, a list of strings, a list of"),
        (
            "completions",
            ASKED | {"prompt": [[1], "a"]},
            "prompt: give a string, a list of strings, a list of token ids",
        ),
        ("completions", ASKED | {"prompt": [True, 3]}, "prompt: give a string, a list of strings, a list of"),
        ("completions", ASKED | {"prompt": [1.0, 3]}, "prompt: give a string, a list of strings, a list of"),
        ("completions", ASKED | {"stop_token_ids": [True]}, "stop_token_ids.0: Input should be a valid integer"),
        ("completions", ASKED | {"prompt": [[]] * 3000}, "prompt: give at most 2048, not 3000"),
        ("embeddings", {"model": "demo", "input": [2.0]}, "input: give a string, a list of strings, a list of token"),
        ("chat/completions", CHAT | {"tools": [NAMED] * 300}, "tools: give at most 128, not 300"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(server: Running, path: str, body: dict[str, Any], reason: str) -> None:
    answer = server.http.post(f"/v1/{path}", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]


def test_a_large_answer_is_written_item_by_item() -> None:
    answer = {
        "id": "ä",
        "choices": [{"text": "b", "logprobs": None}, {"text": "\n", "n": 1.5}],
        "usage": {"a": []},
        "x": [],
    }
    assert app._written(answer) == JSONResponse(answer).body


def test_log_probabilities_and_text_are_read_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them anew for each piece, which would grow with the square of the answer."""
    from tide_export.runtime import generation, handle

    made = list[int]()
    monkeypatch.setattr(generation, "_logprobs", lambda *of: pytest.fail("the whole generation was read"))
    one_token = handle.token_logprobs
    monkeypatch.setattr(handle, "token_logprobs", lambda entries: made.append(1) or one_token(entries))
    handles = server.service.scheduler.submit([3, 4], max_new_tokens=30, logprobs=20, stop=["never"], stop_token_ids=[])
    pieces = [len(handles.logprobs or ()) + len(handles.text or "") for _ in handles]
    assert len(pieces) == len(made) == 30
    assert pieces == sorted(pieces)


def test_others_cannot_see_what_was_asked(chat_bundle: Path, server: Running) -> None:
    """By the number of cached tokens, or the time that they save."""
    prompt = [place % 90 + 3 for place in range(100)]

    def cached(running: Running, **more: Any) -> int:
        answer = running.http.post("/v1/completions", json=ASKED | {"prompt": prompt} | more)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(server, cache_salt="ours") > 0 for _ in range(2)] == [False, True]
    assert cached(server, cache_salt="theirs") == cached(server) == 0
    running = Running(chat_bundle, private_cache=True)
    try:
        assert [cached(running) for _ in range(3)] == [0, 0, 0]
        assert [cached(running, cache_salt="ours") > 0 for _ in range(2)] == [False, True]
    finally:
        running.stop()


# --- connections -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bounded(chat_bundle: Path) -> Iterator[Running]:
    running = Running(chat_bundle, connections=3, body_seconds=0.3, request_seconds=0.5, api_key=None)
    yield running
    running.stop()


HEADERS = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def connected(running: Running, text: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=30)
    connection.sendall(text)
    return connection


# uvicorn closes those that do not say anything after an answer.
@pytest.mark.parametrize(("requests", "text"), [(0, b""), (0, HEADERS), (1, HEADERS)])
def test_headers_that_do_not_come_are_408(bounded: Running, requests: int, text: bytes) -> None:
    with connected(bounded) as connection:
        for _ in range(requests):
            connection.sendall(HEADERS + b"\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += connection.recv(4096)
        connection.sendall(text)
        received = b"".join(iter(lambda: connection.recv(4096), b""))  # until the server closes it
    late = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    assert received == late


def test_a_body_that_does_not_come_is_408(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "config", server.service.config.model_copy(update={"body_seconds": 0.05}))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(head.encode() + b'{"model"')
        answer = client.makefile("rb").read().decode()  # to the end: the connection is closed
    said = json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"]
    assert (answer[:13], said) == ("HTTP/1.1 408 ", "the request's body took longer than 0.05 s")


@pytest.mark.parametrize("text", [b"", HEADERS, HEADERS + b"Content-Length: 9\r\n\r\n{"])
def test_connections_are_counted(bounded: Running, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Those that do not send their request make room for others, whatever they sent so far."""
    bounded.http.close()
    monkeypatch.setattr(bounded.service, "config", bounded.service.config.model_copy(update={"body_seconds": 30}))
    waiting = [connected(bounded, text.replace(b"GET /health", b"POST /v1/completions")) for _ in range(6)]
    for connection in waiting[:3]:
        assert connection.recv(4096).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    bounded.http = httpx.Client(base_url=f"http://127.0.0.1:{bounded.port}", timeout=60)
    for _ in range(3):
        assert bounded.http.get("/health").status_code == 200
    for connection in waiting:
        connection.close()


def test_requests_that_run_keep_their_connections(bounded: Running) -> None:
    bounded.http.close()
    body = json.dumps(ASKED | {"max_tokens": 900, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    running = [connected(bounded, (head + body).encode()) for _ in range(3)]
    assert [connection.recv(15) for connection in running] == [b"HTTP/1.1 200 OK"] * 3
    with connected(bounded, HEADERS + b"\r\n") as another:
        assert another.recv(4096).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    for connection in running:
        connection.close()
    bounded.http = httpx.Client(base_url=f"http://127.0.0.1:{bounded.port}", timeout=60)
    assert bounded.idle()


def test_clients_that_do_not_read_are_left(bounded: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that read slowly get the whole answer."""
    answer = b"x" * (1 << 26)  # more than the sockets hold
    monkeypatch.setattr(bounded.service.metrics, "render", lambda: answer)
    with connected(bounded, HEADERS.replace(b"/health", b"/metrics") + b"\r\n") as connection:
        until = time.monotonic() + 30
        while not (ours := bounded._server.server_state.connections) and time.monotonic() < until:
            time.sleep(0.01)
        while ours and time.monotonic() < until:
            time.sleep(0.01)
        assert not ours
        assert sum(map(len, iter(lambda: connection.recv(1 << 20), b""))) < len(answer)
    monkeypatch.setitem(vars(bounded.service.config), "body_seconds", 0.6)
    with connected(bounded, HEADERS.replace(b"/health", b"/metrics") + b"\r\n") as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # else most of it waits here
        reading = connection.makefile("rb")
        for _ in range(8):
            assert len(reading.read(1 << 23)) == 1 << 23
            time.sleep(0.15)


def test_embeddings_are_bounded_as_a_whole(bounded: Running) -> None:
    texts = [[number % 100 + 3] * 400 for number in range(400)]
    bounded.service.config.__dict__["body_bytes"] = 1 << 24
    answer = bounded.http.post("/v1/embeddings", json={"model": "demo", "input": texts})
    assert (answer.status_code, answer.json()["error"]["message"]) == (504, "the request took longer than 0.5 s")
    assert bounded.idle()


def test_pages_of_other_origins_are_refused(bounded: Running, chat_bundle: Path) -> None:
    page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    answer = bounded.http.post("/v1/completions", json=ASKED, headers=page)
    assert answer.status_code == 403
    assert "start it with --allow-origin https://evil.example" in answer.json()["error"]["message"]
    allowing = Running(chat_bundle, api_key=None, allow_origin=("https://ours.example",))
    try:
        ours = page | {"Origin": "https://ours.example"}
        before = {"Access-Control-Request-Method": "POST", "Origin": "https://ours.example"}
        assert allowing.http.post("/v1/completions", json=ASKED, headers=page).status_code == 403
        answer = allowing.http.post("/v1/completions", json=ASKED, headers=ours)
        assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, "https://ours.example")
        assert allowing.http.options("/v1/completions", headers=before).status_code == 200
    finally:
        allowing.stop()


def test_a_page_with_the_key_is_served(server: Running) -> None:
    headers = {"Origin": "https://evil.example", "Authorization": f"Bearer {KEY}"}
    assert server.http.post("/v1/completions", json=ASKED, headers=headers).status_code == 200


def test_a_key_may_have_any_characters(chat_bundle: Path) -> None:
    running = Running(chat_bundle, api_key="schlüssel-鍵")
    try:
        for key, status in (("schlüssel-鍵", 200), ("schlussel", 401), (KEY, 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert running.http.get("/v1/models", headers=headers).status_code == status
    finally:
        running.stop()


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_before_the_bundle_is_loaded(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_export.cli.serve._log", lambda options: None)  # it is of the process
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        says = refused(capsys, "serve", "no-such-bundle", "--port", str(port))
    where = f"127.0.0.1 port {port} ({os.strerror(errno.EADDRINUSE)})"
    assert says == f"tide-export: error: cannot listen on {where}: give another --port or --host"


@pytest.mark.parametrize("option", ["drain-seconds", "request-seconds", "body-seconds"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_times_are_finite(capsys, option: str, value: str) -> None:
    says = refused(capsys, "serve", "no-such-bundle", f"--{option}", value)
    assert f"--{option} must be a finite number" in says
