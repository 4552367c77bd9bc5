"""The network is the formula of `drafter`, and training sees what step-by-step drafting gives."""

import numpy as np
import pytest
import torch
from drafters import network_of

from tide_export.drafting.network import DrafterNetwork
from tide_export.routers.drafter_weights import EPSILON, HEAD_DIM, LIMIT, ROTARY_BASE, Drafter, Shape

LENGTH, DRAFTS = 9, 4


def some_drafter(shape: Shape, tokens: int = 40, bias: bool = True) -> Drafter:
    random = np.random.default_rng(3)
    arrays = {name: random.standard_normal(size) for name, size in shape.arrays.items()}
    for name, size in shape.arrays.items():
        if len(size) == 2:
            arrays[name] *= size[1] ** -0.5
    arrays["scale"] = 0.3 + np.abs(arrays["scale"])
    return Drafter(
        shape,
        np.arange(tokens, dtype=np.int64) * 2,
        random.standard_normal((tokens, shape.hidden)).astype(np.float32),
        random.standard_normal(tokens).astype(np.float32) if bias else None,
        {name: array.astype(np.float32) for name, array in arrays.items()},
        (0.5,) * 8,
        "ab" * 32,
    )


def rms(values: np.ndarray) -> np.ndarray:
    return values / np.sqrt((values**2).mean(-1, keepdims=True) + EPSILON)


class PlainDrafter:
    """The docstring of `drafter`, one row after the other, in float64."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.shape = drafter, drafter.shape
        self.arrays = {name: array.astype(np.float64) for name, array in drafter.arrays.items()}
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def rotated(self, heads: np.ndarray, position: int) -> np.ndarray:
        half = HEAD_DIM // 2
        angles = position * ROTARY_BASE ** (-np.arange(half) / half)
        first, second = heads[:, :half], heads[:, half:]
        return np.concatenate(
            [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], -1
        )

    def row(self, embedding: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a, shape, position = self.arrays, self.shape, len(self.keys)
        e = rms(embedding) * a["embedding_norm"]
        g = rms(np.clip((state - a["center"]) / a["scale"], -LIMIT, LIMIT)) * a["state_norm"]
        z = a["fuse"] @ np.concatenate([e, g])
        qkv = (a["qkv"] @ (rms(z) * a["attention_norm"])).reshape(-1, HEAD_DIM)
        queries = self.rotated(qkv[: shape.heads], position)
        self.keys.append(self.rotated(qkv[shape.heads : shape.heads + shape.kv_heads], position))
        self.values.append(qkv[shape.heads + shape.kv_heads :])
        attended = []
        for head, query in enumerate(queries):
            of = head // (shape.heads // shape.kv_heads)
            scores = np.array([query @ key[of] for key in self.keys]) / np.sqrt(HEAD_DIM)
            shares = np.exp(scores - scores.max())
            attended.append(sum(s * value[of] for s, value in zip(shares / shares.sum(), self.values, strict=True)))
        z = z + a["out"] @ np.concatenate(attended)
        gate, up = np.split(a["gate_up"] @ (rms(z) * a["mlp_norm"]), 2)
        z = z + a["down"] @ (gate / (1 + np.exp(-gate)) * up)
        logits = self.drafter.head @ (rms(z) * a["final_norm"])
        bias = self.drafter.bias
        return logits if bias is None else logits + bias, z * a["scale"] + a["center"]

    def forget(self, rows: int) -> None:
        del self.keys[rows:], self.values[rows:]


@pytest.mark.parametrize(("state", "embedding", "bias"), [(192, 48, True), (40, 40, False), (512, 64, False)])
def test_training_sees_what_step_by_step_drafting_gives(state: int, embedding: int, bias: bool) -> None:
    drafter = some_drafter(Shape.of(state, embedding), bias=bias)
    network, plain = network_of(drafter), PlainDrafter(drafter)
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(LENGTH + 1, embedding, generator=generator)
    states = torch.randn(LENGTH, state, generator=generator) * 4 + 1
    with torch.no_grad():
        every = torch.arange(LENGTH)[None]
        trained = [
            network.logits(rows)[0] for rows in network.draft_steps(embeddings[None], states[None], every, DRAFTS)
        ]
    cache = None
    for row in range(LENGTH):
        run = network.rows(embeddings[row + 1 : row + 2], states[row : row + 1], cache)
        cache = run.cache
        logits, state_after = plain.row(embeddings[row + 1].double().numpy(), states[row].double().numpy())
        for draft in range(DRAFTS):
            if row + draft + 1 > LENGTH:
                break
            if draft:
                run = network.rows(embeddings[row + draft + 1][None], run.hidden, run.cache)
                logits, state_after = plain.row(embeddings[row + draft + 1].double().numpy(), state_after)
            np.testing.assert_allclose(run.logits[0].numpy(), logits, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(run.hidden[0].numpy(), state_after, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(trained[draft][row], run.logits[0], atol=1e-3, rtol=1e-3)
        plain.forget(row + 1)


def test_rows_at_once_are_rows_one_by_one() -> None:
    drafter = some_drafter(Shape.of(192, 48))
    network = network_of(drafter)
    embeddings, states = torch.randn(LENGTH, 48), torch.randn(LENGTH, 192)
    whole = network.rows(embeddings, states)
    head = network.rows(embeddings[:4], states[:4])
    tail = network.rows(embeddings[4:], states[4:], head.cache)
    torch.testing.assert_close(tail.logits, whole.logits[4:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tail.cache.keys, whole.cache.keys)
    again = network.rows(embeddings[4:5], states[4:5], tail.cache.first(4))
    torch.testing.assert_close(again.logits[0], whole.logits[4], atol=1e-4, rtol=1e-4)
    assert (tail.cache.rows, again.cache.rows) == (LENGTH, 5)


def test_arrays_survive() -> None:
    drafter = some_drafter(Shape.of(192, 48))
    arrays = network_of(drafter).to_arrays()
    assert arrays.keys() == drafter.arrays.keys()
    assert all(np.array_equal(arrays[name], drafter.arrays[name]) for name in arrays)


def test_an_untrained_network_is_centered_on_the_states() -> None:
    states = torch.randn(5000, 64) * 3 + torch.arange(64)
    network = DrafterNetwork.untrained(Shape.of(64, 48), states, torch.randn(10, 64), None, 0)
    normalized = network.normalized_hidden(states)
    assert normalized.median().abs() < 0.05
    assert float(normalized.std()) == pytest.approx(1, abs=0.05)
    assert float(network.final_norm[0].detach()) == pytest.approx(0.4 * float(states.square().mean().sqrt()), rel=1e-4)
    assert sum(weight.requires_grad for weight in network.parameters()) == len(network.shape.arrays) - 2


def test_an_untrained_network_begins_with_the_state() -> None:
    shape = Shape.of(64, 48)
    fuse = DrafterNetwork.untrained(shape, torch.randn(5000, 64), torch.randn(10, 64), None, 0).fuse.detach()
    states = torch.randn(1000, 64)
    fused = states @ fuse[:, shape.embedding :].T
    assert float(torch.nn.functional.cosine_similarity(fused, states).mean()) == pytest.approx(0.8, abs=0.1)
    assert float(fuse.std()) == pytest.approx(0.7 * 112**-0.5, rel=0.35)
