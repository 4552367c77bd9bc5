"""Held-out acceptance: noise is distributed as the real one, and shares are those of real coupled drafting."""

from pathlib import Path

import numpy as np
import pytest
import tiers
import torch
from drafting_stubs import StubEngine, small_target

from tide_export.calibration.distributed import Processes
from tide_export.drafting.measure import DRAFTS, HeldOut
from tide_export.drafting.network import DrafterNetwork
from tide_export.drafting.prompts import Request
from tide_export.drafting.store import AnswerStore
from tide_export.drafting.target import Target
from tide_export.routers.drafter_weights import CONFIDENCES, Shape

TEMPERATURE = 0.8
SINGLE = Processes(0, 1)
ANSWERS, NEW_TOKENS = tiers.sized(30, 60), 40


class CoupledEngine(StubEngine):
    """Draws `argmax(logits / T + noise)`, and keeps the noise."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.noise: list[np.ndarray] = []

    def answer(self, request: Request) -> tuple[list[int], np.ndarray, np.ndarray]:
        random = np.random.default_rng(request.seed)
        tokens, states, noise = list(request.ids), [], []
        for position in range(len(request.ids) + NEW_TOKENS - 1):
            last, before = torch.tensor(tokens[position]), torch.tensor(tokens[max(0, position - 1)])
            states.append(self.states_of(last, before))
            if position >= len(request.ids) - 1:
                noise.append(random.gumbel(size=self.target.vocabulary))
                logits = (self.target.head @ states[-1].bfloat16().float()).numpy()
                tokens.append(int((logits / TEMPERATURE + noise[-1]).argmax()))
        return tokens[len(request.ids) :], torch.stack(states).numpy(), np.array(noise)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory):
    """A target, answers of it, and the noise that they were drawn with."""
    target = small_target()
    store = AnswerStore(tmp_path_factory.mktemp("answers"), target.head.shape[1])
    engine, answered, noise = CoupledEngine(target), [], []
    for number in range(ANSWERS):
        request = Request(number, tuple(range(3, 5 + number % 3)), number, held_out=True)
        tokens, states, drawn_noise = engine.answer(request)
        answered.append((request, tokens, states))
        noise.append(drawn_noise)
    store.append(answered, 1.0)
    store.reload()
    return target, store, noise


def network_of(target: Target, store: AnswerStore, tokens: torch.Tensor) -> DrafterNetwork:
    """An untrained network that is right now and then: where the residual is the last token's embedding, nearly."""
    states = torch.cat([store.hidden(answer) for answer in store.answers])
    shape = Shape.of(target.head.shape[1], target.embeddings.shape[1])
    network = DrafterNetwork.untrained(shape, states, target.head[tokens], None, 0)
    with torch.no_grad():  # a regression from the last token to the state after it
        last = torch.cat([target.embeddings[torch.from_numpy(answer.ids[:-1]).long()] for answer in store.answers])
        last = last / last.square().mean(-1, keepdim=True).sqrt()
        solved = torch.linalg.lstsq(last, states.float()).solution.T
        network.fuse.zero_()
        network.fuse[:, : shape.embedding] = solved
        network.final_norm.fill_(3.0)
    return network


@torch.no_grad()
def test_shares_are_those_of_real_coupled_drafting(drawn) -> None:
    target, store, noise = drawn
    tokens = torch.arange(0, target.vocabulary, 1)[:250]
    network = network_of(target, store, tokens)
    found = HeldOut(target, store, TEMPERATURE, 7, SINGLE).measure(network, tokens)

    counts = np.zeros((2, DRAFTS, 2))
    confident = np.zeros((len(CONFIDENCES), 2))
    for answer, gumbel in zip(store.answers, noise, strict=True):
        ids, states = answer.ids, store.hidden(answer).float()
        cache = None
        for row in range(answer.rows):
            run = network.rows(target.embeddings[ids[row + 1]][None], states[row : row + 1], cache)
            cache = run.cache
            for kind in range(2) if row >= answer.prompt - 1 else ():
                step = run
                for draft in range(DRAFTS):
                    at = row + draft + 1
                    if at >= answer.rows:
                        break
                    if draft:
                        step = network.rows(target.embeddings[ids[row + draft + 1]][None], step.hidden, step.cache)
                    logits = step.logits[0].numpy()
                    own = gumbel[at - answer.prompt + 1][: len(tokens)]
                    drafted = int((logits / TEMPERATURE + own if kind == 0 else logits).argmax())
                    likeliest = int((target.head @ states[at]).argmax())
                    right = drafted == (ids[at + 1] if kind == 0 else likeliest)
                    counts[kind, draft] += right, 1
                    if kind == 0 and draft == 0:
                        chance = float(torch.softmax(step.logits[0] / TEMPERATURE, -1)[drafted])
                        confident[np.searchsorted(CONFIDENCES, chance, "right") - 1] += right, 1
                    if drafted != ids[at + 1]:
                        break
    assert found.drafts == counts[0, 0, 1] == ANSWERS * (NEW_TOKENS - 1)
    shares = counts[..., 0] / counts[..., 1]
    assert 0.15 < shares[0, 0] < 0.9
    # The text is the same, the noise drawn again: only that differs.
    for draft in range(2):
        error = 4 * np.sqrt(shares[0, draft] * (1 - shares[0, draft]) / counts[0, draft, 1])
        assert found.sampled[draft] == pytest.approx(shares[0, draft], abs=error)
    assert found.greedy == pytest.approx(shares[1].tolist(), abs=1e-9)  # has no noise
    many = confident[:, 1] > tiers.sized(100, 200)
    assert many.sum() >= 2
    for share, (right, made) in zip(np.array(found.by_confidence)[many], confident[many], strict=True):
        assert share == pytest.approx(right / made, abs=0.12)
    again = HeldOut(target, store, TEMPERATURE, 7, SINGLE).measure(network, tokens)
    assert again == found  # the same noise in each measurement


def test_noise_is_that_of_the_token_which_was_drawn() -> None:
    target = small_target()
    tokens = torch.arange(target.vocabulary)
    states = torch.randn(1, target.head.shape[1]).expand(20_000, -1) * 2
    network = DrafterNetwork.untrained(Shape.of(64, 48), torch.randn(99, 64), target.head, None, 0)
    held_out = HeldOut(target, None, TEMPERATURE, 0, SINGLE)  # type: ignore[arg-type]
    logits = network.logits(states[:1])[0] / TEMPERATURE
    generator = torch.Generator().manual_seed(3)
    following = torch.multinomial(logits.softmax(-1), len(states), replacement=True, generator=generator)
    normalizers = torch.logsumexp(logits, -1).expand(len(states))
    noise = held_out._noise(network, tokens, states, following, normalizers, generator)
    assert torch.equal((logits + noise).argmax(-1), following)
    likely = logits.argsort(descending=True)[:5]
    for token in (*likely.tolist(), 0):
        values = noise[:, token].double()
        assert float(values.mean()) == pytest.approx(0.5772, abs=0.05)
        assert float(values.var()) == pytest.approx(np.pi**2 / 6, abs=0.12)


def test_answers_of_one_token_are_not_measured(tmp_path: Path) -> None:
    target = small_target()
    store = AnswerStore(tmp_path, 64)
    states = torch.randn(3, 64).numpy()
    store.append([(Request(0, (3, 4, 5), 0, True), [2], states)], 1.0)
    store.reload()
    assert HeldOut(target, store, TEMPERATURE, 0, SINGLE).answers == []
