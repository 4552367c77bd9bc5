"""`tide-export triton` writes a repository from which a real tritonserver gives the engine's tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import refused
from conformance import REQUEST_SECONDS, by_triton, check, expected, items_of, values
from triton_server import TritonServer, triton_folder

from tide_export.cli.main import main
from tide_export.runtime.engine import load


@pytest.fixture(scope="module")
def server(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    triton_folder()  # or skip
    scratch = tmp_path_factory.mktemp("triton")
    line = ["triton", demo_bundle, "--repository", scratch / "models", "--threads", 1, "--slots", 3]
    line += ["--request-seconds", REQUEST_SECONDS]
    assert main([str(word) for word in (*line, "--name", "demo")]) == 0
    assert main([str(word) for word in (*line, "--name", "damaged", "--copy")]) == 0
    (scratch / "models" / "damaged" / "1" / "bundle" / "tide.json").write_text("{")
    assert main([str(word) for word in (*line, "--name", "crowded")]) == 0
    config = scratch / "models" / "crowded" / "config.pbtxt"
    config.write_text(config.read_text().replace('"3"', '"many"'))
    with TritonServer(scratch / "models", scratch) as running:
        running.http.timeout = REQUEST_SECONDS
        yield running


def test_it_gives_the_engine_s_tokens(server: TritonServer, demo_bundle: Path, demo_text_ids: list[int]) -> None:
    engine = load(demo_bundle, provider="cpu", threads=1)
    items = items_of(engine, demo_text_ids)
    check(by_triton(server.http, "demo"), items, expected(engine, items), engine)


def test_text_in_and_out(server: TritonServer, demo_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-new-tokens", "12", "--mode", "full", "--threads", "1", "-q"]
    assert main(["generate", str(demo_bundle), "--prompt", "def read(", *options]) == 0
    found = ask(server, prompt="def read(", max_tokens=12, mode="full", temperature=0.0)
    assert bytes(values(found, "text_output")).decode() == capsys.readouterr().out.removesuffix("\n")
    assert bytes(values(found, "finish_reason")) == b"length"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "prompt: Field required"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": '["a", "b"]', "mode": "fast"}, "mode: Input should be 'auto', 'exit', 'full' or 'lossless'"),
        ({"input_ids": [99999]}, "outside the vocabulary"),
        ({"input_ids": [1] * 1024}, "the model's context of 1024 leaves no room"),
        ({"prompt": "a", "n": 2}, "n: a request has one choice here"),
        ({"prompt": "a", "top_p": 3.0}, "top_p: Input should be less than or equal to 1"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens 0 needs echo"),
    ],
)
def test_what_is_wrong_is_one_sentence(server: TritonServer, fields: dict[str, Any], reason: str) -> None:
    for path in ("generate", "generate_stream"):
        answer = server.http.post(f"/v2/models/demo/{path}", json=fields)
        said = json.loads(answer.text.removeprefix("data: "))["error"]
        assert reason in said
        assert "\n" not in said


def test_clients_that_leave_free_their_slots(server: TritonServer) -> None:
    body = {"prompt": "x", "max_tokens": 900, "temperature": 0.0, "stream": True}
    for _ in range(7):  # twice the slots
        with server.http.stream("POST", "/v2/models/demo/generate_stream", json=body) as stream:
            next(stream.iter_lines())
    assert len(values(ask(server, prompt="x", max_tokens=1, temperature=0.0), "token_ids")) == 1


def test_a_bundle_that_cannot_be_served_is_one_sentence(server: TritonServer) -> None:
    index = {one["name"]: one for one in server.http.post("/v2/repository/index").json()}
    assert index["demo"]["state"] == "READY"
    assert "tide.json" in index["damaged"]["reason"]
    assert "slots: Input should be a valid integer" in index["crowded"]["reason"]


def test_nothing_in_the_repository_is_replaced(
    demo_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    assert main(["triton", str(demo_bundle), "--repository", str(models)]) == 0
    (folder,) = models.iterdir()
    assert capsys.readouterr().out == f"{folder}\n"
    assert (folder / "1" / "bundle").resolve() == demo_bundle.resolve()
    again = refused(capsys, "triton", demo_bundle, "--repository", models)
    assert f"'{folder}' exists: remove it, or give another --name" in again
    assert "is no folder's name" in refused(capsys, "triton", demo_bundle, "--repository", models, "--name", "a/b")
    slots = refused(capsys, "triton", demo_bundle, "--repository", models, "--name", "b", "--slots", 0)
    assert "--slots must be greater than or equal to 1, not 0" in slots
    assert "is not a bundle: it has no tide.json" in refused(capsys, "triton", tmp_path, "--repository", models)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert f"cannot write '{blocked}" in refused(capsys, "triton", demo_bundle, "--repository", blocked)
    assert [one.name for one in models.iterdir()] == [folder.name]


def ask(server: TritonServer, **fields: Any) -> dict[str, Any]:
    """The one response of a request that is not streamed."""
    answer = server.http.post("/v2/models/demo/generate", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()
