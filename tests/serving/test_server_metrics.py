"""What /metrics counts: requests and their modes, tokens, the prefix cache and the audit."""

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running_server import GREEDY, PROMPT, Running, text_of

from tide_export.bundle.auto_mode import AutoMode
from tide_export.bundle.store import replace_manifest
from tide_export.runtime.engine import Engine

EXIT = AutoMode("exit", (0.3, 0.3, 0.3), 0.02, "cpu", 1.25, 1.2, "a processor, 2 threads", {})


def value_of(server: Running, name: str) -> float:
    """A metric; 0 where there is none yet."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", server.http.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def test_a_prompt_that_begins_like_another_is_cached(server: Running) -> None:
    names = ["tide_prompt_tokens_total", "tide_cached_prompt_tokens_total", "tide_prefix_cache_hits_total"]
    prompt = "class Cached:\n" + "    def method(self): pass\n" * 10
    before, cached, texts = [value_of(server, name) for name in names], [], []
    for _ in range(2):
        done = server.openai.completions.create(prompt=[prompt, "x"], **GREEDY)
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        cached.append(done.usage.prompt_tokens_details.cached_tokens)
        texts.append([choice.text for choice in done.choices])
    after, size = [value_of(server, name) for name in names], done.usage.prompt_tokens
    assert cached[0] == 0
    assert size - 20 < cached[1] < size
    assert texts[0] == texts[1]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2 * size, cached[1], 1]
    assert 0 < value_of(server, "tide_prefix_cache_bytes") <= 2**28  # the demo model is small


def test_metrics_count(server: Running) -> None:
    names = ['tide_requests_total{path="/v1/completions",status="200"}', "tide_prompt_tokens_total"]
    names += [
        'tide_tokens_total{layer="12"}',
        "tide_first_token_seconds_count",
        'tide_generations_total{mode="full",reason="length"}',
    ]
    before = [value_of(server, name) for name in names]
    done = server.openai.completions.create(prompt=PROMPT, **GREEDY)
    assert done.usage is not None
    after = [value_of(server, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, done.usage.prompt_tokens, 24, 1, 1]
    assert value_of(server, 'tide_layer_passes_total{kind="run"}') > 0


def test_the_audit_is_in_the_metrics(chat_bundle: Path, engine: Engine) -> None:
    running = Running(chat_bundle, audit_rate=1.0, audit_epsilon=0.5)
    try:
        mode: dict[str, Any] = {"extra_body": {"mode": "exit", "threshold": 0.3}}
        done = running.openai.completions.create(prompt=PROMPT, **GREEDY | mode)
        ids = engine.tokenizer.encode(PROMPT)
        assert done.choices[0].text == text_of(engine, ids, max_new_tokens=24, mode="exit", threshold=0.3)
        names = [f"tide_audit_{name}_total" for name in ("tokens", "checked", "different", "raises")]
        tokens, checked, different, raises = (value_of(running, name) for name in names)
        assert tokens == 24 >= checked > 0
        assert checked >= different
        assert raises == 0
        lower, upper = (value_of(running, f"tide_audit_changed_tokens_{side}_bound") for side in ("lower", "upper"))
        assert 0 <= lower <= different / 24 < upper <= 1
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("auto", "mode"),
    [
        (EXIT, "full"),
        (replace(EXIT, slots=2), "full"),
        (replace(EXIT, slots=4), "exit"),
        (replace(EXIT, mode="lossless", slots=4), "lossless"),
    ],
)
def test_mode_auto_is_what_was_measured_for_so_many_slots(
    chat_bundle: Path, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, auto: AutoMode, mode: str
) -> None:
    folder = Path(shutil.copytree(chat_bundle, tmp_path / "demo"))
    replace_manifest(replace(engine.bundle, path=folder), replace(engine.manifest, auto=auto))
    ids = engine.tokenizer.encode(PROMPT)
    full, exits = (
        text_of(engine, ids, max_new_tokens=24, **options)
        for options in ({"mode": "full"}, {"mode": "exit", "threshold": list(auto.thresholds), "min_layers": 0})
    )
    assert full != exits
    with caplog.at_level(logging.INFO, "tide_export.scheduling"):
        running = Running(folder, slots=3)
    try:
        done = running.openai.completions.create(prompt=PROMPT, model="demo", temperature=0, max_tokens=24)
        assert done.choices[0].text == (exits if mode == "exit" else full)
        assert value_of(running, f'tide_generations_total{{mode="{mode}",reason="length"}}') == 1
        assert f"3 slots, mode {mode} by default: mode auto is {auto.mode}, " in caplog.text
    finally:
        running.stop()
