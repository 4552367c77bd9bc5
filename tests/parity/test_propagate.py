"""`kv_cache_strategy = "propagate"` against its own oracle, family by family: skipped layers get keys and values from
the exit state, and every later token sees them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from families import build
from tiers import exhaustive_beyond
from tiny_configs import CHECKPOINTS, LAYERS
from tiny_engines import engine_of, lens_at_first, pieces_of

from tide_export.bundle.manifest import PROPAGATE
from tide_export.errors import UnsupportedModelError
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.stepping import StepResult
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.oracle import oracle
from tide_export.verify.parity import UNDECIDED_GAP, check_exit, check_full

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(20)]]
BATCH = [PROMPTS[2], PROMPTS[0], [(i * 53) % 400 + 9 for i in range(33)], PROMPTS[1], [11, 4, 8]]
NEW_TOKENS = 24
JOINS = (0, 0, 2, 5, 9)  # the step in which each of BATCH begins
LIMITS = (NEW_TOKENS, 8, NEW_TOKENS, NEW_TOKENS, NEW_TOKENS)  # and how many tokens it writes

# Rotary, packed projections and learned positions, windows with softcaps and a segment without keys and values of its
# own, partial rotary with biases, latent attention with experts, ALiBi.
FAMILIES = ("llama", "gpt2", "gemma3n (text)", "phi", "deepseek_v3", "mpt")


@pytest.mark.parametrize("family", exhaustive_beyond(1, FAMILIES))
def test_exits_equal_the_rule_of_frozen_hidden_states(family: str, tmp_path: Path) -> None:
    source = build(family)
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, lens_rank=8)
    if family == "llama":
        routers = lens_at_first(routers)
    pieces = pieces_of(source, CHECKPOINTS, every_layer=True)
    engine = engine_of(source, routers, tmp_path / "bundle", pieces, PROPAGATE, batch=True)
    assert not [tensor for tensor in engine.manifest.inputs if tensor.name.startswith("pending")]

    full = check_full(engine, source, PROMPTS, NEW_TOKENS)
    assert full.holds, full.differences

    exits: set[int] = set()
    middle = dividing_thresholds(source, routers, PROMPTS[2])
    for thresholds in ([0.3] * 2, [0.7] * 2, middle, [NEVER_EXIT, middle[1]]):
        check = check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, thresholds)
        assert check.holds, (thresholds, check.differences)
        exits |= set(check.exits)
    assert exits == {*CHECKPOINTS, LAYERS}, "every checkpoint must take part, and full depth too"

    for thresholds in ([0.3] * 2, [0.5] * 2, [0.85] * 2, middle):
        check_batch(engine, source, routers, thresholds)

    # The oracle's two rules must differ, or the above would not test the cache; but not for the layer after the exit,
    # whose input is the same state.
    ids = [*PROMPTS[2], *range(40, 60)]
    mixed = dividing_thresholds(source, routers, ids)
    exact = oracle(source, routers, ids, mixed)
    frozen = oracle(source, routers, ids, mixed, propagate_from=len(PROMPTS[2]))
    difference = (exact.logits - frozen.logits)[len(PROMPTS[2]) :].abs().max()
    assert (difference > 1e-3) == any(layer > CHECKPOINTS[0] for layer in engine.manifest.model.kv_read(range(LAYERS)))


@pytest.mark.exhaustive
def test_keys_that_need_an_attention_before_them_are_refused() -> None:
    source = build("longcat_flash")
    with pytest.raises(UnsupportedModelError, match=r"values of layer \d need more than the hidden states before it"):
        pieces_of(source, CHECKPOINTS, every_layer=True)


def check_batch(engine, source, routers, thresholds: Sequence[float]) -> None:
    """Five sequences in four slots, some joining while others are decoded: each equals the oracle."""
    batch = engine.start_batch(1.0, 4)
    written = [list[StepResult]() for _ in BATCH]
    texts, slots = [list(prompt) for prompt in BATCH], dict[int, int]()
    for step in range(max(JOINS) + NEW_TOKENS):
        for number, (joins, limit) in enumerate(zip(JOINS, LIMITS, strict=True)):
            if joins == step:
                slots[number] = batch.join(thresholds, 0)
            elif joins + limit == step:
                batch.leave(slots.pop(number))
        results = batch.step({slot: texts[n] if not written[n] else texts[n][-1:] for n, slot in slots.items()})
        for number, slot in slots.items():
            result = results[slot]
            written[number].append(result._replace(logits=result.logits.copy()))
            texts[number].append(int(result.logits.argmax()))
    for prompt, text, steps, limit in zip(BATCH, texts, written, LIMITS, strict=True):
        assert len(steps) == limit
        first = len(prompt) - 1
        expected_run = oracle(source, routers, text[:-1], thresholds, propagate_from=len(prompt))
        undecided = ((expected_run.scores - torch.tensor(thresholds)).abs() < UNDECIDED_GAP).any(-1)[first:]
        exits = torch.tensor([result.exit_layer for result in steps])
        assert ((exits == expected_run.exit_layers[first:]) | undecided).all(), (thresholds, prompt)
        same = exits == expected_run.exit_layers[first:]
        logits, expected = torch.tensor(np.stack([result.logits for result in steps])), expected_run.logits[first:]
        assert (logits - expected)[same].abs().max() < 1e-3 * expected.abs().max()
        chosen = expected.gather(-1, logits.argmax(-1, keepdim=True))[:, 0]
        assert (expected.max(-1).values - chosen)[same].max() < UNDECIDED_GAP


def test_the_oracle_by_hand(demo_source) -> None:
    """Token by token with Hugging Face's cache, the layers after an exit fed with the exit state."""
    from transformers import DynamicCache

    source = demo_source
    prompt, rest = [573, 1003, 391, 1266, 382], [1339, 83, 14, 538, 898, 199, 199, 605, 2721]
    routers = random_routers(source, (3, 6, 9), [*prompt, *rest], bottleneck=16)
    thresholds = [0.6, 0.5, 0.5]
    expected_run = oracle(source, routers, [*prompt, *rest], thresholds, propagate_from=len(prompt))

    backbone, cache = source.model.model, DynamicCache()
    rows, exits = [], []
    with torch.no_grad():
        source.model(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True)
        for place, token in enumerate(rest, start=len(prompt)):
            positions = torch.tensor([[place]])
            x = backbone.embed_tokens(torch.tensor([[token]]))
            rotary = backbone.rotary_emb(x, positions)
            left, answer = source.num_layers, None
            for number, layer in enumerate(backbone.layers, start=1):
                y = layer(x, position_embeddings=rotary, past_key_values=cache, use_cache=True)
                if answer is not None:
                    continue  # its key and value are written, its result is unused
                x = y
                router = routers.routers.get(number)
                if router is not None and router(source.normalize(x)) > thresholds[number // 3 - 1]:
                    left, answer = number, source.normalize(x)
            rows.append(source.head(source.normalize(x) if answer is None else answer)[0, 0])
            exits.append(left)
    assert len(set(exits)) > 2
    assert expected_run.exit_layers[len(prompt) :].tolist() == exits
    assert (expected_run.logits[len(prompt) :] - torch.stack(rows)).abs().max() < 1e-4
    assert set(expected_run.exit_layers[: len(prompt)].tolist()) == {source.num_layers}
