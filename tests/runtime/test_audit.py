"""The audit counts what exits change, and nothing else changes: on every engine, sampled or not."""

import random
from typing import Any

import pytest
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.errors import GenerationError
from tide_export.runtime.engine import Engine
from tide_export.runtime.scheduler import AuditConfig, Scheduler, SchedulerLimits
from tide_export.runtime.stepping import sample
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.export_gate import dividing_thresholds

SLOTS = 3
RAISES = 3  # of thresholds; the next step turns exits off
EVERYTHING = AuditConfig(rate=1.0)


@pytest.fixture(scope="module")
def exits(tiny_llama: TinyLlama) -> dict[str, Any]:
    """Thresholds that some of the tokens pass."""
    thresholds = dividing_thresholds(tiny_llama.source, tiny_llama.routers, TEXT)
    return {"mode": "exit", "threshold": thresholds, "min_layers": 0, "stop_token_ids": [], "max_new_tokens": 12}


@pytest.fixture(scope="module")
def graph(tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.graph(tiny_llama.exact)


@pytest.fixture(scope="module", params=["graph", "networks"])
def engine(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> Engine:
    return tiny_llama.networks() if request.param == "networks" else tiny_llama.graph(tiny_llama.exact)


def audited(engine: Engine, config: AuditConfig = EVERYTHING, **limits: Any) -> tuple[Scheduler, Any]:
    scheduler = engine.scheduler(SchedulerLimits(slots=SLOTS, **limits), audit=config)
    assert scheduler.audit is not None
    return scheduler, scheduler.audit


def differing(engine: Engine, prompt: list[int], tokens: list[int], options: dict[str, Any]) -> list[bool]:
    """Of each token, whether full depth makes another one after the same text, with the same random number."""
    state = engine.start([NEVER_EXIT] * len(engine.manifest.checkpoints))
    logits = state.step([*prompt, *tokens[:-1]], logits_to_keep=len(tokens), full=True).position_logits
    drawn = {name: options[name] for name in ("temperature", "top_k", "seed") if name in options}
    rows = enumerate(zip(logits, tokens, strict=True), len(prompt))
    return [sample(row, position, **drawn) != token for position, (row, token) in rows]


@pytest.mark.parametrize("drawn", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_it_counts_the_tokens_that_full_depth_would_not_make(
    engine: Engine, exits: dict[str, Any], drawn: dict[str, Any]
) -> None:
    order, options = random.Random(1), exits | drawn
    vocabulary = engine.manifest.model.vocab_size
    prompts = [[order.randrange(vocabulary) for _ in range(order.choice((1, 2, 17, 40)))] for _ in range(12)]
    scheduler, audit = audited(engine, prompt_tokens=9)
    handles = [scheduler.submit(prompt, **options) for prompt in prompts]
    handles += [scheduler.submit(prompts[0], mode=mode, max_new_tokens=4) for mode in ("full", "lossless")]
    found = [handle.result() for handle in handles][: len(prompts)]
    for prompt, one in zip(prompts, found, strict=True):
        expected = engine.generate(prompt, **options)
        assert (one.tokens, one.stats.exit_layer) == (expected.tokens, expected.stats.exit_layer), "as without an audit"
    left = [layers < engine.manifest.model.num_layers for one in found for layers in one.stats.exit_layer]
    wrong = [
        other
        for prompt, one in zip(prompts, found, strict=True)
        for other in differing(engine, prompt, one.tokens, options)
    ]
    assert (audit.audited, audit.checked, audit.different) == (len(left), sum(left), sum(wrong))
    assert 0 < sum(wrong) < sum(left) < len(left)
    assert audit.lower_bound < sum(wrong) / len(left) < audit.upper_bound


def test_penalties_and_logprobs_are_those_without_an_audit(graph: Engine, exits: dict[str, Any]) -> None:
    options = exits | {"repetition_penalty": 1.5, "temperature": 0.9, "seed": 4, "logprobs": 2, "max_new_tokens": 30}
    scheduler, audit = audited(graph)
    found, expected = scheduler.submit([5, 6], **options).result(), graph.generate([5, 6], **options)
    assert found.tokens == expected.tokens
    assert found.logprobs is not None
    assert expected.logprobs is not None
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert audit.different > 0


def test_a_sample_is_drawn_whatever_the_tokens_are(graph: Engine, exits: dict[str, Any]) -> None:
    scheduler, audit = audited(graph, AuditConfig(rate=0.3), prefix_cache_bytes=2**20)
    handles = [scheduler.submit(list(range(3, 40)), **exits) for _ in range(30)]
    assert len({tuple(handle.result().tokens) for handle in handles}) == 1
    layers = handles[0].stats.exit_layer
    assert 0.2 * 360 < audit.audited < 0.4 * 360
    share = sum(layer < graph.manifest.model.num_layers for layer in layers) / len(layers)
    assert abs(audit.checked / audit.audited - share) < 0.15


def test_cancelled_and_failed_requests_are_no_evidence(graph: Engine, exits: dict[str, Any]) -> None:
    scheduler, audit = audited(graph)
    one = scheduler.submit([5, 6], **exits | {"threshold": 0.0})
    scheduler.step()
    one.cancel()
    assert (one.result().tokens, audit.audited) == ([], 0), "between a token and its audit"
    options = exits | {"threshold": 0.0, "logits_processor": lambda ids, logits: 1 / 0}
    with pytest.raises(GenerationError, match="division by zero"):
        scheduler.submit([5, 6], **options).result()
    assert audit.audited == 0


def test_thresholds_are_raised_while_exits_change_too_much(
    graph: Engine, exits: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, audit = audited(graph, AuditConfig(rate=1.0, epsilon=0.02))
    bad, layers = exits | {"threshold": 0.0, "max_new_tokens": 100}, graph.manifest.model.num_layers
    early = list[float]()
    while audit.raises <= RAISES and len(early) < 60:
        running = scheduler.submit([len(early) + 3], **bad)
        tokens = running.result().tokens
        early.append(sum(layer < layers for layer in running.stats.exit_layer) / len(tokens))
        assert len(tokens) == 100
    assert audit.raises == RAISES + 1
    assert early[0] == 1.0
    done = scheduler.submit([5], **bad).result()
    assert set(done.stats.exit_layer) == {layers}
    assert done.tokens == graph.generate([5], mode="full", max_new_tokens=100, stop_token_ids=[]).tokens
    sentences = [record.message for record in caplog.records if record.message.startswith("audit: ")]
    assert len(sentences) == RAISES + 1
    assert sentences[0].endswith("audit_epsilon is 2 %: the thresholds of requests that begin from now on are raised")
    assert sentences[-1].endswith("let nothing exit any more")


def test_nothing_is_raised_where_exits_change_nothing(graph: Engine, exits: dict[str, Any]) -> None:
    scheduler, audit = audited(graph, AuditConfig(rate=1.0, epsilon=0.02))
    scheduler.submit([5], **exits | {"threshold": 1.0, "max_new_tokens": 200}).result()
    assert (audit.audited, audit.checked, audit.different, audit.raises) == (200, 0, 0, 0)
    assert 0 < audit.upper_bound < 0.05


def test_lossless_drafts_as_ever(graph: Engine, exits: dict[str, Any]) -> None:
    scheduler, audit = audited(graph, AuditConfig(rate=1.0, epsilon=0.5))
    options: dict[str, Any] = {"mode": "lossless", "threshold": 0.0, "max_new_tokens": 40, "stop_token_ids": []}
    found, expected = (each.submit([5], **options).result() for each in (scheduler, graph.scheduler()))
    assert (found.tokens, found.stats.drafted) == (expected.tokens, expected.stats.drafted)
    assert found.stats.drafted > 0
    assert audit.audited == 0


@pytest.mark.parametrize(("name", "value"), [("rate", 0), ("rate", 1.5), ("rate", "1"), ("epsilon", -1)])
def test_wrong_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(GenerationError, match=f"audit {name} must be"):
        AuditConfig(**{name: value})
