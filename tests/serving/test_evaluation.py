"""lm-evaluation-harness gets the source model's log-probabilities and the engine's texts from the server."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from running_server import KEY, PROMPT, Running, text_of

from tide_export.runtime.engine import Engine

QUESTION = "def read_lines(path):\n    with open(path) as file:\n        return"
CHOICES = [" file.read()", " None", " 3"]


@pytest.fixture(scope="module")
def judge(demo_source: Any) -> Any:
    """Log-probabilities [S - 1] of the tokens of a prompt after its first, by the source model in PyTorch."""

    def judged(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = demo_source.model(torch.tensor([ids])).logits[0].double()
        return torch.log_softmax(logits, -1)

    return judged


def echo(server: Running, prompt: Any, **options: Any) -> list[dict[str, Any]]:
    """The choices of the request that `local-completions` of lm_eval 0.4.13 sends for log-likelihoods."""
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answered = server.http.post("/v1/completions", json=body | {"echo": True} | options)
    assert answered.status_code == 200, answered.text
    return answered.json()["choices"]


@pytest.mark.parametrize("mode", ["full", "exit", "lossless"])
def test_an_echo_has_the_source_model_s_log_probabilities(
    server: Running, engine: Engine, judge: Any, mode: str
) -> None:
    prompts = [engine.tokenizer.encode(text) for text in (QUESTION + CHOICES[0], PROMPT)]
    for choice, ids in zip(echo(server, prompts, mode=mode), prompts, strict=True):
        found, expected = choice["logprobs"], judge(ids)
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        own = [float(row[token]) for row, token in zip(expected, ids[1:], strict=False)]
        assert found["token_logprobs"][1:-1] == pytest.approx(own, abs=2e-3)
        best = [float(row.max()) for row in expected[:-1]]
        assert [max(top.values()) for top in found["top_logprobs"][1:-1]] == pytest.approx(best, abs=2e-3)
        assert len(found["tokens"]) == len(ids) + 1
        made = text_of(engine, ids, max_new_tokens=1, mode=mode)
        assert choice["text"] == engine.tokenizer.decode(ids) + made
    (nothing,) = echo(server, PROMPT, max_tokens=0, mode=mode)
    assert (nothing["text"], nothing["finish_reason"]) == (PROMPT, "length")
    assert len(nothing["logprobs"]["tokens"]) == len(prompts[1])


def test_an_echo_of_any_kind(server: Running, engine: Engine) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "echo": True}
    whole = server.openai.completions.create(**asked, logprobs=2)
    events = list(server.openai.completions.create(**asked, logprobs=2, stream=True))
    assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
    parts = [event.choices[0].logprobs for event in events if event.choices[0].logprobs is not None]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [one for part in parts for one in getattr(part, name)] == getattr(whole.choices[0].logprobs, name)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6
    plain = server.openai.completions.create(**asked)  # whose beginning the prefix cache may have
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (whole.choices[0].text, None)
    for body, sentence in (
        ({"max_tokens": 0}, "max_tokens 0 needs echo: otherwise there is nothing to answer"),
        ({"max_tokens": 1, "echo": True, "logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
    ):
        refused = server.http.post("/v1/completions", json={"model": "demo", "prompt": PROMPT} | body)
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, sentence)


def test_the_harness(
    server: Running, engine: Engine, judge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed (the extra `eval`)")
    from lm_eval.tasks import TaskManager

    rows = [{"text": QUESTION, "choices": CHOICES, "answer": 0}, {"text": PROMPT, "choices": CHOICES, "answer": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    chosen = data | {
        "task": "tide_choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    written = data | {
        "task": "tide_texts",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "mode": "full"},
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in (chosen, written):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task))  # which is YAML
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    where = f"http://127.0.0.1:{server.port}/v1/completions"
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": "demo", "base_url": where, "auth_token": KEY, "max_length": 512},
        tasks=[chosen["task"], written["task"]],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    encode = engine.tokenizer.encode_plain
    right = 0
    for sample in found["samples"]["tide_choices"]:
        context, likelihoods = encode(sample["doc"]["text"]), []
        for choice, ((likelihood, greedy),) in zip(CHOICES, sample["resps"], strict=True):
            ids = encode(sample["doc"]["text"] + choice)
            rows_of = judge(ids)[len(context) - 1 : -1]
            own = [float(row[token]) for row, token in zip(rows_of, ids[len(context) :], strict=True)]
            assert likelihood == pytest.approx(sum(own), abs=5e-3)
            assert greedy == all(value >= float(row.max()) for value, row in zip(own, rows_of, strict=True))
            likelihoods.append(likelihood)
        right += likelihoods.index(max(likelihoods)) == sample["doc"]["answer"]
    assert found["results"]["tide_choices"]["acc,none"] == right / len(rows)
    for sample in found["samples"]["tide_texts"]:
        ids = encode(sample["doc"]["text"])
        expected = engine.generate(ids, max_new_tokens=12, mode="full", stop=["\n\n"]).text
        assert sample["resps"] == [[expected]]
