"""A server on a bundle with a drafter: the text of full depth, sampled, of a form and with stops; drafts by source."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafters import drafting_copy
from running_server import PROMPT, Running

SOURCES = ("drafter", "lookup", "exit")
ASKED: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 32, "n": 3, "temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def drafting(chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(drafting_copy(chat_bundle, tmp_path_factory.mktemp("served")))
    yield running
    running.stop()


def drafted(server: Running) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith("tide_drafts_total{")]
    return {
        source: sum(float(line.split()[-1]) for line in lines if f'source="{source}"' in line) for source in SOURCES
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0, "n": 1, "stop": ["\n\n"]},
        {"extra_body": {"top_k": 20, "repetition_penalty": 1.2}},
        {"extra_body": {"regex": "(alpha|beta|gamma ){3,9}"}},
    ],
    ids=str,
)
def test_text_is_that_of_full_depth(drafting: Running, options: dict[str, Any]) -> None:
    extra = options.get("extra_body", {})
    texts = []
    for mode in ("full", "lossless"):
        asked = ASKED | options | {"extra_body": extra | {"mode": mode}}
        texts.append([choice.text for choice in drafting.openai.completions.create(**asked).choices])
    assert texts[0] == texts[1]
    assert drafted(drafting)["drafter"] > 0, "by the first of these requests: none was accepted"
