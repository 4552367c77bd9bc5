"""The runtime on a real exported model: limits, growth and threads change nothing, and full depth is HuggingFace."""

import threading
from pathlib import Path

import numpy as np
import pytest
import tiers

from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import MAX_THRESHOLD

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "demo" / "demo-llama"


@pytest.fixture(scope="module")
def engine(demo_bundle: Path) -> Engine:
    return load(demo_bundle, threads=1)


@pytest.fixture(scope="module")
def text() -> list[int]:
    """700 tokens of English."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode((ROOT / "LICENSE").read_text()).ids[:700]
    assert len(ids) == 700
    return ids


@pytest.fixture(scope="module")
def mixed(engine: Engine, text: list[int]) -> list[float]:
    """Thresholds that about a third of what reaches each checkpoint passes, whatever the routers were trained on."""
    state = engine.start([MAX_THRESHOLD] * len(engine.manifest.checkpoints))
    scores = np.array([state.step([token]).scores.copy() for token in text[:150]])
    return np.clip(np.quantile(scores, 0.66, axis=0), 0.0, 1.0).tolist()


@pytest.mark.parametrize("length", tiers.exhaustive_but([1, 600], [1, 2, 30, 600]))
def test_max_pending_changes_speed_and_never_tokens(
    engine: Engine, text: list[int], mixed: list[float], length: int
) -> None:
    runs = {
        limit: engine.generate(
            text[:length], max_new_tokens=40, threshold=mixed, min_layers=0, max_pending=limit, stop_token_ids=[]
        )
        for limit in (0, 1, 4, 16)
    }
    for run in runs.values():
        assert run.tokens == runs[0].tokens
        assert run.stats.exit_layer == runs[0].stats.exit_layer
    # A limit of 0 lets nothing wait, so it saves nothing.
    assert runs[0].stats.layers_run_per_token == engine.manifest.model.num_layers
    assert runs[16].stats.layers_run_per_token <= runs[1].stats.layers_run_per_token


@pytest.mark.parametrize("max_pending", tiers.exhaustive_but([3], [1, 3, 8]))
def test_lossless_gives_the_tokens_of_full(
    engine: Engine, text: list[int], mixed: list[float], max_pending: int
) -> None:
    drafted = accepted = 0
    for start in range(0, 600, 60):
        prompt = text[start : start + 60]
        full = engine.generate(prompt, max_new_tokens=40, mode="full", stop_token_ids=[])
        lossless = engine.generate(
            prompt, max_new_tokens=40, mode="lossless", threshold=mixed, max_pending=max_pending, stop_token_ids=[]
        )
        assert lossless.tokens == full.tokens
        drafted += lossless.stats.drafted
        accepted += lossless.stats.accepted
    assert 0 < accepted < drafted


def test_every_checkpoint_takes_part(engine: Engine, text: list[int], mixed: list[float]) -> None:
    state = engine.start(mixed, max_pending=16)
    exits = {state.step([token]).exit_layer for token in text[:150]}
    assert exits == {*engine.manifest.checkpoints, engine.manifest.model.num_layers}


def test_a_token_s_logits_depend_on_its_prefix_alone(engine: Engine, text: list[int], mixed: list[float]) -> None:
    """Fed at once, in pieces or one by one, with anything waiting, the last token sees the same."""
    results = []
    for pieces, limit in [([100], 16), ([1] * 100, 16), ([1] * 100, 1), ([7, 13, 1, 1, 1, 40, 1, 36], 8)]:
        state, start = engine.start(mixed, limit), 0
        for count in pieces:
            result = state.step(text[start : start + count])
            start += count
        assert start == 100
        results.append((result.exit_layer, result.logits.copy()))
    for exit_layer, logits in results[1:]:
        assert exit_layer == results[0][0]
        np.testing.assert_allclose(logits, results[0][1], atol=2e-4)


def test_eight_threads_on_one_engine_equal_one_by_one(engine: Engine, text: list[int], mixed: list[float]) -> None:
    def run(n: int) -> tuple[list[int], list[int]]:
        done = engine.generate(
            text[10 * n : 12 * n + 3],
            max_new_tokens=40,
            threshold=mixed,
            min_layers=0,
            max_pending=2 * n,
            temperature=0.8 * (n % 2),
            seed=n,
            stop_token_ids=[],
        )
        return done.tokens, done.stats.exit_layer

    alone = [run(n) for n in range(8)]
    together: dict[int, tuple[list[int], list[int]]] = {}
    threads = [threading.Thread(target=lambda n=n: together.update({n: run(n)})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[n] for n in range(8)] == alone


@pytest.mark.parametrize("length", tiers.exhaustive_but([1, 600], [1, 2, 30, 600]))
def test_full_mode_is_huggingface_greedy(engine: Engine, text: list[int], length: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = engine.generate(text[:length], max_new_tokens=32, mode="full", stop_token_ids=[]).tokens
    with torch.no_grad():
        logits = model(torch.tensor([text[:length] + tokens])).logits[0, length - 1 : -1]
    for step, token in enumerate(tokens):
        # Two tokens may be so close that the order of additions decides; nothing else is forgiven.
        assert logits[step].max() - logits[step, token] < 1e-4, step
