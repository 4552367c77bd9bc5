"""Texts seen before, over HTTP: earlier answers and `prediction` are drafted from, `usage` and /metrics count it."""

import re
from typing import Any

import pytest
from running_server import PROMPT, Running

ASKED: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 48, "temperature": 0.8, "seed": 5}


def answer(server: Running, **fields: Any) -> dict[str, Any]:
    return server.http.post("/v1/completions", json=ASKED | fields).json()


def details(answered: dict[str, Any]) -> tuple[int, int]:
    counts = answered["usage"]["completion_tokens_details"]
    return counts["accepted_prediction_tokens"], counts["rejected_prediction_tokens"]


def of_source(server: Running, name: str) -> dict[str, float]:
    found = re.findall(rf"^{name}{{(.*)}} (\S+)$", server.http.get("/metrics").text, re.M)
    return {labels: float(value) for labels, value in found}


@pytest.mark.parametrize("form", [str, lambda text: [{"type": "text", "text": part} for part in (text[:9], text[9:])]])
def test_a_predicted_text_is_drafted_from(server: Running, form: Any) -> None:
    """By mode auto too, which is full depth on this bundle."""
    full = answer(server, mode="full")
    text = full["choices"][0]["text"]
    assert details(full) == (0, 0)
    drafted = answer(server, cache_salt=f"{form}", prediction={"type": "content", "content": form(text)})
    assert drafted["choices"][0]["text"] == text
    accepted, _ = details(drafted)
    assert accepted > 15
    assert drafted["usage"]["completion_tokens"] == full["usage"]["completion_tokens"]
    other = answer(server, cache_salt=f"{form} reversed", prediction={"type": "content", "content": text[::-1]})
    assert other["choices"][0]["text"] == text
    assert details(other)[0] < accepted
    assert details(answer(server, prediction={"type": "content", "content": ""})) == (0, 0)


def test_openai_s_client_predicts_in_conversations(server: Running) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 32}
    asked |= {"temperature": 0, "extra_body": {"mode": "full"}}
    text = server.openai.chat.completions.create(**asked).choices[0].message.content
    asked |= {"prediction": {"type": "content", "content": text}, "extra_body": {}}
    done = server.openai.chat.completions.create(**asked)
    assert done.choices[0].message.content == text
    assert done.usage is not None
    assert done.usage.completion_tokens_details is not None
    assert done.usage.completion_tokens_details.accepted_prediction_tokens
    *_, last = server.openai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    assert last.usage == done.usage


@pytest.mark.parametrize("prediction", ["text", {"type": "tokens", "content": "x"}, {"type": "content", "content": 3}])
def test_a_prediction_of_another_form_is_refused(server: Running, prediction: Any) -> None:
    refused = server.http.post("/v1/completions", json=ASKED | {"prediction": prediction})
    assert refused.status_code == 400
    assert "prediction" in refused.json()["error"]["message"]


def test_answers_are_drafted_from_those_of_the_same_salt_and_counted(server: Running) -> None:
    before = of_source(server, "tide_drafts_total"), of_source(server, "tide_draft_saved_seconds")
    full = answer(server, mode="full")["choices"][0]["text"]
    first, again, others = (  # by text alone, as what is known of exits is everybody's
        answer(server, mode="lossless", threshold=1.0, cache_salt=salt) for salt in ("ours", "ours", "theirs")
    )
    assert {one["choices"][0]["text"] for one in (first, again, others)} == {full}
    assert details(again)[0] > details(first)[0]
    assert details(others) == details(first)
    after = of_source(server, "tide_drafts_total"), of_source(server, "tide_draft_saved_seconds")
    accepted = 'kind="accepted",source="answers"'
    assert after[0][accepted] > before[0].get(accepted, 0)
    assert after[1]['source="answers"'] > before[1].get('source="answers"', 0)
