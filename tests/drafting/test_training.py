"""Gradients of the loss, what is learned, batches, and how a training goes on."""

from pathlib import Path

import numpy as np
import pytest
import tiers
import torch
from drafting_stubs import StubEngine, small_target

from tide_export.calibration.distributed import Processes
from tide_export.drafting import training
from tide_export.drafting.batches import Batch, learned_tokens, plan_batches
from tide_export.drafting.network import DrafterNetwork
from tide_export.drafting.prompts import Request
from tide_export.drafting.store import AnswerStore
from tide_export.drafting.training import STEP_WEIGHTS, Trainer
from tide_export.drafting.vocabulary import frequent_tokens
from tide_export.errors import DraftError
from tide_export.routers.drafter_weights import Shape
from tide_export.runtime.config import GenerationConfig

SINGLE = Processes(0, 1)
TARGET = small_target(bias=True)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "fast_dtype", lambda device: None)


class BesideFaster(Processes):
    """A second process, whose main one is faster in bfloat16."""

    def gather(self, value: object) -> list:
        return [True, value]


def test_all_processes_compute_in_the_type_of_the_main_one(store: AnswerStore) -> None:
    """Each makes the same changes by the shared gradients: in types of their own their weights would differ."""
    assert trainer_of(store)._muon.dtype is torch.float32
    assert trainer_of(store, BesideFaster(1, 2))._muon.dtype is torch.bfloat16


def answered(folder: Path, count: int = 60) -> AnswerStore:
    folder.mkdir(exist_ok=True)
    store, engine = AnswerStore(folder, TARGET.head.shape[1]), StubEngine(TARGET)
    requests = [Request(n, tuple(range(3, 4 + n % 5)), n, n % 10 == 0) for n in range(count)]
    config = GenerationConfig(mode="full", temperature=0.8, max_new_tokens=24, seed=[r.seed for r in requests])
    results = engine.generate([list(request.ids) for request in requests], config)
    store.append([(r, a.tokens, a.states) for r, a in zip(requests, results, strict=True)], 1.0)
    store.reload()
    return store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> AnswerStore:
    return answered(tmp_path_factory.mktemp("answers"))


def trainer_of(store: AnswerStore, processes: Processes = SINGLE, tokens: int = 200) -> Trainer:
    ids = torch.from_numpy(frequent_tokens(store.answers, tokens, TARGET.vocabulary))
    states = torch.cat([store.hidden(answer) for answer in store.answers])
    shape = Shape.of(TARGET.head.shape[1], TARGET.embeddings.shape[1])
    network = DrafterNetwork.untrained(shape, states, TARGET.head[ids], TARGET.bias[ids], 0)
    return Trainer(network, ids, TARGET.embeddings, store, 0, processes)


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    return [torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in trainer.network.parameters()]


def test_the_gradient_is_that_of_the_divergence(store: AnswerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.CHUNK, "cpu", 7)
    trainer = trainer_of(store)
    network, steps = trainer.network, len(STEP_WEIGHTS)
    chosen = trainer.answers[:4]
    total = learned_tokens(chosen, steps)
    batch = Batch.of(chosen, store, steps, CPU)
    assert len(batch.positions) == total
    overlap = trainer.accumulate_gradients(batch, steps, total)
    found = gradients(trainer)
    network.zero_grad()
    loss, overlaps = torch.zeros(()), 0.0
    for answer in chosen:  # alone, without padding
        states = store.hidden(answer).float()
        wanted = torch.nn.functional.linear(states, network.head, network.bias).log_softmax(-1)
        embeddings = TARGET.embeddings[torch.from_numpy(answer.ids).long()]
        positions = torch.arange(max(answer.prompt - 1, steps), answer.rows)
        every = torch.arange(answer.rows)
        for step, rows in enumerate(network.draft_steps(embeddings[None], states[None], every[None], steps), 1):
            drafted = network.logits(rows[0, positions - step]).log_softmax(-1)
            divergence = torch.nn.functional.kl_div(drafted, wanted[positions], log_target=True, reduction="sum")
            loss = loss + STEP_WEIGHTS[step - 1] * divergence / total
            if step == 1:
                overlaps += float(torch.minimum(drafted.detach().exp(), wanted[positions].exp()).sum())
    loss.backward()
    assert overlap == pytest.approx(overlaps, rel=1e-4)
    for gradient, expected in zip(found, gradients(trainer), strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-3)


def test_the_gradients_of_several_batches_are_summed(store: AnswerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = trainer_of(store), trainer_of(store)
    whole.train_step(0.5)
    monkeypatch.setattr("tide_export.drafting.batches.MAX_ROWS", 120)
    monkeypatch.setattr(training, "STEP_BATCHES", 99)
    calls = []
    accumulate = parts.accumulate_gradients
    monkeypatch.setattr(parts, "accumulate_gradients", lambda *given: calls.append(given) or accumulate(*given))
    parts.train_step(0.5)
    assert len(calls) > 3
    assert parts.tokens == whole.tokens
    for one, other in zip(gradients(parts), gradients(whole), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


def test_a_drafter_learns(store: AnswerStore) -> None:
    trainer = trainer_of(store)
    trainer.train_step(0.0)
    before = trainer.overlap
    steps, gained = tiers.sized((40, 0.08), (60, 0.2))
    for step in range(steps):
        trainer.train_step(step / steps)
    assert trainer.overlap > before + gained
    assert trainer.tokens > trainer.step
    assert trainer.rows > 2 * trainer.tokens  # most steps have three drafts


def test_a_training_that_resumes_is_one_that_was_not_interrupted(store: AnswerStore, tmp_path: Path) -> None:
    whole, first = trainer_of(store), trainer_of(store)
    for step in range(6):
        whole.train_step(step / 8)
    for step in range(3):
        first.train_step(step / 8)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = trainer_of(store)
    second.resume(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(3, 6):
        second.train_step(step / 8)
    expected, found = whole.network.to_arrays(), second.network.to_arrays()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert second.state_dict()["visits"] == whole.state_dict()["visits"]


def test_two_processes_sum_to_the_gradient_of_one(store: AnswerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "gather", lambda processes, value: [value])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda gradient: None)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda weights, norm: torch.ones(()))
    made = []
    for processes in (SINGLE, Processes(0, 2), Processes(1, 2)):
        trainer = trainer_of(store, processes)
        trainer.train_step(0.5)
        made.append(gradients(trainer))
    for whole, first, second in zip(*made, strict=True):
        torch.testing.assert_close(first + second, whole, atol=1e-5, rtol=1e-3)


def test_a_training_that_diverges_ends(store: AnswerStore) -> None:
    trainer = trainer_of(store)
    with torch.no_grad():
        trainer.network.fuse.fill_(torch.inf)
    with pytest.raises(
        DraftError, match="the training of the drafter diverged after 0 steps: start it with another --seed"
    ):
        trainer.train_step(0.0)


def test_held_out_answers_are_not_trained_on(store: AnswerStore) -> None:
    trainer = trainer_of(store)
    assert not any(answer.held_out for answer in trainer.answers)
    assert 50 <= len(trainer.answers) <= 54


def test_batches_have_those_visited_least_and_similar_lengths(store: AnswerStore, monkeypatch) -> None:
    monkeypatch.setattr("tide_export.drafting.batches.MAX_ROWS", 120)
    random = np.random.default_rng(0)
    visits = {answer.number: 1 for answer in store.answers[:20]}
    batches = plan_batches(store.answers, 3, visits, random)
    assert sorted(place for batch in batches for place in batch) == list(range(20, len(store.answers)))
    for batch in batches:
        lengths = [learned_tokens([store.answers[place]], 3) for place in batch]
        assert len(batch) == 1 or len(batch) * max(lengths) <= 120


def test_frequent_tokens(store: AnswerStore) -> None:
    counts = np.zeros(TARGET.vocabulary)
    for answer in store.answers:
        np.add.at(counts, answer.ids[answer.prompt :], 1)
    tokens = frequent_tokens(store.answers, 20, TARGET.vocabulary)
    assert tokens.dtype == np.int64
    assert (np.diff(tokens) > 0).all()
    assert counts[tokens].min() >= np.sort(counts)[-60]
    assert frequent_tokens([], 5, 300).tolist() == [0, 1, 2, 3, 4]
    assert len(frequent_tokens(store.answers, 8192, TARGET.vocabulary)) == TARGET.vocabulary
