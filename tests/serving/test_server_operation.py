"""Keys, limits, failures and the end of the server, as who operates it sees them."""

import asyncio
import json
import runpy
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import tiers
from command_line import refused
from fastapi import FastAPI
from running_server import GREEDY, KEY, Running, free_port, text_of

from tide_export.errors import BundleError
from tide_export.runtime.engine import Engine
from tide_export.runtime.tokenizer import BundleTokenizer
from tide_export.serving.app import build_app


def test_paths_keys_and_health(server: Running) -> None:
    bare = f"http://127.0.0.1:{server.port}"
    answer = httpx.get(f"{bare}/v1/models")
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    assert [model.id for model in server.openai.models.list()] == ["demo"]
    assert httpx.get(f"{bare}/health").json() == {"status": "ok"}
    assert httpx.get(f"{bare}/ready").json() == {"status": "ready"}
    for method, path in (("GET", "/v1/nothing"), ("GET", "/v1/completions")):
        answer = server.http.request(method, path)
        assert answer.status_code in (404, 405)
        assert "here" in answer.json()["error"]["message"]


@pytest.mark.parametrize("mounted", [False, True])
def test_a_root_path_needs_the_key_too(server: Running, mounted: bool) -> None:
    inner, outer = build_app(server.service), FastAPI()
    outer.mount("/llm", inner)
    transport = httpx.ASGITransport(outer) if mounted else httpx.ASGITransport(inner, root_path="/llm")

    async def statuses(**headers: str) -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://x/llm", headers=headers) as client:
            paths = "/v1/models", "/tokenizer_info", "/nothing", "/health", "/ready", "/metrics"
            return [(await client.get(path)).status_code for path in paths]

    assert asyncio.run(statuses()) == [401, 401, 401, 200, 200, 200]
    assert asyncio.run(statuses(Authorization=f"Bearer {KEY}")) == [200, 200, 404, 200, 200, 200]


def test_every_application_asks_for_the_key_of_the_environment(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDE_API_KEY", "theirs")
    monkeypatch.setattr(server.service, "config", server.service.config.model_copy(update={"api_key": None}))
    transport = httpx.ASGITransport(build_app(server.service))

    async def status(key: str) -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code

    assert [asyncio.run(status(key)) for key in (KEY, "theirs")] == [401, 200]
    monkeypatch.setitem(sys.modules, "ray", ray := MagicMock())
    build = runpy.run_module("tide_export.serving.ray")["application"]
    bound = ray.serve.deployment.return_value.return_value.bind
    for given, key in (({}, "theirs"), ({"api_key": "ours"}, "ours")):
        build({"bundle": "demo"} | given)
        assert bound.call_args.args[1].api_key == key


@pytest.mark.parametrize(
    ("given", "loading", "gpus"),
    [
        ({"num_cpus": 3}, {"threads": 3}, 0),
        ({"provider": "cuda", "num_gpus": 1}, {"provider": "cuda"}, 1),
        ({"num_gpus": "0.5"}, {}, 0.5),
        ({"provider": "cpu", "threads": "2"}, {"provider": "cpu", "threads": 2}, 0),
    ],
)
def test_replicas_have_threads_on_cpus_alone(monkeypatch: pytest.MonkeyPatch, given, loading, gpus) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray := MagicMock())
    runpy.run_module("tide_export.serving.ray")["application"]({"bundle": "demo"} | given)
    assert ray.serve.deployment.return_value.return_value.bind.call_args.args[2] == loading
    assert ray.serve.deployment.call_args.kwargs["ray_actor_options"]["num_gpus"] == gpus


def test_a_client_that_leaves_frees_its_slot(server: Running) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 900, "temperature": 0}
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        next(stream.iter_lines())
    assert server.idle()
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=body, timeout=0.2)
    assert server.idle()


def test_a_full_queue_is_429(server: Running) -> None:
    scheduler = server.service.scheduler
    handles = [scheduler.submit([5], max_new_tokens=900, mode="full", stop_token_ids=[]) for _ in range(7)]
    answer = server.http.post("/v1/completions", json={"model": "demo", "prompt": "x", "n": 3})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert "submit again later" in answer.json()["error"]["message"]
    for handle in handles:
        handle.cancel()
    assert server.idle()


def test_many_clients_get_their_own_text(server: Running, engine: Engine) -> None:
    tokenizer, prompts = BundleTokenizer(engine.bundle), [f"def f{number}(x):" for number in range(6)]
    expected = [text_of(engine, tokenizer.encode(one), max_new_tokens=24, mode="full") for one in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda one: server.openai.completions.create(prompt=one, **GREEDY), prompts))
    assert [one.choices[0].text for one in found] == expected


@pytest.mark.parametrize("key", [KEY, None])
def test_rates_are_limited_by_client(chat_bundle: Path, key: str | None) -> None:
    running = Running(chat_bundle, requests_per_minute=2, api_key=key)
    try:
        statuses = []
        for number in range(3):
            bearer = f"Bearer {key or number}"  # which is no client's name where no key is asked for
            statuses.append(running.http.get("/v1/models", headers={"Authorization": bearer}).status_code)
        assert statuses == [200, 200, 429]
        answer = running.http.get("/v1/models")
        assert 1 <= int(answer.headers["Retry-After"]) <= 31
        assert running.http.get("/health").status_code == 200
    finally:
        running.stop()


def test_a_request_that_takes_too_long_is_504(chat_bundle: Path) -> None:
    running = Running(chat_bundle, request_seconds=0.05)
    try:
        answer = running.http.post(
            "/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": 900, "temperature": 0}
        )
        assert answer.status_code == 504
        assert "took longer than 0.05 s" in answer.json()["error"]["message"]
    finally:
        running.stop()


def test_a_server_that_stops_says_so(chat_bundle: Path) -> None:
    running = Running(chat_bundle)
    body = {"model": "demo", "prompt": "x", "max_tokens": 900, "temperature": 0, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        running.service.scheduler.close(drain=False)
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping"
    answer = running.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is stopping")
    for path in ("/health", "/ready"):
        answer = running.http.get(path)
        assert (answer.status_code, answer.json()) == (503, {"status": "failed"})
    running.stop()


def test_what_nobody_foresaw_is_an_error_too(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(server.service, "prompts", broken)
    answer = server.http.post("/v1/completions", json={"model": "demo", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_a_step_that_fails_is_the_last_event(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Any) -> None:
        raise RuntimeError("broken")

    def fails(ids: Any, logits: Any) -> None:
        raise BundleError("the weights are gone")

    def last() -> tuple[str, str]:
        body = {"model": "demo", "prompt": "x", "stream": True}
        streamed = server.http.post("/v1/completions", json=body, timeout=10).text
        told = json.loads(streamed.strip().removeprefix("data: "))["error"]
        return told["message"], told["type"]

    scheduler, submit = server.service.scheduler, server.service.scheduler.submit
    with monkeypatch.context() as patch:
        patch.setattr(
            scheduler,
            "submit",
            lambda ids, config, **more: submit(ids, replace(config, logits_processor=fails), **more),
        )
        assert last() == ("the weights are gone", "server_error")
    monkeypatch.setattr(server.service, "reader", broken)
    assert last() == ("the server failed: its log says how", "server_error")
    assert server.idle()


def test_a_client_that_leaves_in_its_request_is_no_failure(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 99\r\n\r\n"
    with caplog.at_level("INFO", "tide_export.serving"):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head.encode() + b'{"model"')
        while "/v1/completions 499" not in caplog.text:
            time.sleep(0.01)
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_a_path_cannot_forge_a_line_of_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tide_export.serving"):
        assert server.http.get("/x%0aGET%20/admin%20200%1b[2J").status_code == 404
        while not caplog.messages:
            time.sleep(0.01)
    assert caplog.messages[-1].startswith("GET /x%0AGET%20/admin%20200%1B%5B2J 404 ")


@pytest.mark.parametrize(
    ("seconds", "last"),
    tiers.exhaustive_beyond(1, [("30", "data: [DONE]"), ("0", 'data: {"error": {"message": "the server is stopping"')]),
)
def test_the_command_serves_and_drains(chat_bundle: Path, seconds: str, last: str) -> None:
    port = str(free_port())
    line = ["-m", "tide_export.cli.main", "serve", str(chat_bundle), "--port", port, "--threads", "1", "--json"]
    line += ["--drain-seconds", seconds]
    process = subprocess.Popen([sys.executable, *line], stderr=subprocess.PIPE, text=True)
    try:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        for _ in range(600):
            try:
                assert client.get("/health").status_code == 200
                break
            except httpx.ConnectError:
                assert process.poll() is None
                time.sleep(0.05)
        body = {"model": "demo", "prompt": "x", "max_tokens": 400, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1].startswith(last), "what runs is answered to its end, or told that it comes too late"
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
    logged = [json.loads(line) for line in process.communicate()[1].splitlines()]
    assert any(one.get("path") == "/v1/completions" and one["status"] == 200 for one in logged)


def test_a_bundle_that_cannot_be_served_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tide_export.cli.serve._log", lambda _: None)  # which is for the rest of the process
    assert "is not a bundle" in refused(capsys, "serve", tmp_path)
    slots = refused(capsys, "serve", tmp_path, "--slots", 0)
    assert "--slots must be greater than or equal to 1, not 0" in slots
