"""Only what tokens are chosen from crosses to the host: the same tokens as from all logits."""

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from batch_prompts import TEXT
from fake_cudart import FakeCudart
from fake_gpu import FakeGpu

from tide_export import names
from tide_export.compose.segments import compose_choices
from tide_export.errors import GenerationError
from tide_export.runtime.decoding.sampling import Sampler
from tide_export.runtime.engine import Engine
from tide_export.runtime.segmented import cuda
from tide_export.runtime.segmented.backend import SegmentBackend
from tide_export.runtime.segmented.device import HostDevice
from tide_export.runtime.segmented.head import Head
from tide_export.runtime.network_spec import NetworkSpec, Tensor
from tide_export.runtime.sequence import Candidates

VOCABULARY, WIDTH, STATE_ROWS, SLOTS = 1000, 4, 40, 3


@pytest.fixture(scope="module", params=[VOCABULARY, 100])
def sessions(request, tmp_path_factory) -> dict[str, ort.InferenceSession]:
    folder: Path = tmp_path_factory.mktemp("choices")
    found = {}
    for name, model in compose_choices(request.param).items():
        ir.save(model, folder / f"{name}.onnx")
        found[name] = ort.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
    return found


def drawn(count: int, vocabulary: int) -> np.ndarray:
    """Logits with many equal ones, as of a head in bfloat16."""
    logits = np.random.default_rng(0).normal(0, 3, (count, vocabulary)).astype(np.float32)
    logits[0::3] = np.round(logits[0::3] * 8) / 8
    logits[1::3] = np.round(logits[1::3])
    logits[2:, 5] = -np.inf
    return logits


def test_the_networks_find_the_largest_logits_and_the_first_of_equal_ones(sessions) -> None:
    vocabulary = sessions[names.BEST].get_inputs()[0].shape[1]
    logits = drawn(30, vocabulary)
    tokens, best = sessions[names.BEST].run([names.BEST_TOKENS, names.BEST_LOGITS], {names.LOGITS: logits})
    np.testing.assert_array_equal(tokens, logits.argmax(1))
    np.testing.assert_array_equal(best, logits.max(1))
    values, ids = sessions[names.CANDIDATES].run(
        [names.CANDIDATE_LOGITS, names.CANDIDATE_TOKENS], {names.LOGITS: logits}
    )
    assert values.shape == (30, min(names.MAX_CANDIDATES, vocabulary))
    np.testing.assert_array_equal(values, -np.sort(-logits, axis=1)[:, : values.shape[1]])
    np.testing.assert_array_equal(np.take_along_axis(logits, ids, 1), values)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_is_seen(sessions, broken: float) -> None:
    logits = drawn(3, sessions[names.BEST].get_inputs()[0].shape[1])
    logits[1, 77] = broken
    (best,) = sessions[names.BEST].run([names.BEST_LOGITS], {names.LOGITS: logits})
    (values,) = sessions[names.CANDIDATES].run([names.CANDIDATE_LOGITS], {names.LOGITS: logits})
    assert np.isfinite(best).tolist() == np.isfinite(values[:, 0]).tolist() == [True, False, True]


class Played:
    """A network computed by NumPy, which gives equal logits in an order of its own."""

    def __init__(self, spec: NetworkSpec, logits: np.ndarray) -> None:
        self.spec, self.logits, self.runs = spec, logits, 0

    def view(self, addresses: Mapping[str, int], name: str, tokens: int) -> np.ndarray:
        tensor = self.spec.inputs.get(name, self.spec.outputs.get(name))
        assert tensor is not None
        memory = (ctypes.c_uint8 * tensor.size(tokens, SLOTS)).from_address(addresses[name])
        return np.frombuffer(memory, tensor.dtype).reshape(tensor.dims(tokens, SLOTS))

    def run(self, addresses: Mapping[str, int], tokens: int, batch_size: int = 1) -> None:
        self.runs += 1
        logits = self.view(addresses, names.LOGITS, tokens)
        if self.spec.name == names.HEAD:
            logits[:] = self.logits[self.view(addresses, names.ROWS, tokens)]
        elif self.spec.name == names.BEST:
            self.view(addresses, names.BEST_TOKENS, tokens)[:] = logits.argmax(1)
            self.view(addresses, names.BEST_LOGITS, tokens)[:] = logits.max(1)
        else:
            shuffled = np.random.default_rng(self.runs).permutation(VOCABULARY)
            order = shuffled[np.argsort(-logits[:, shuffled], axis=1, kind="stable")][:, : names.MAX_CANDIDATES]
            self.view(addresses, names.CANDIDATE_TOKENS, tokens)[:] = order
            self.view(addresses, names.CANDIDATE_LOGITS, tokens)[:] = np.take_along_axis(logits, order, 1)


class Counting(HostDevice):
    def __init__(self) -> None:
        self.downloaded = 0

    def download(self, target: np.ndarray, source: int) -> None:
        self.downloaded += target.nbytes
        super().download(target, source)


@pytest.fixture
def head(opened) -> tuple[Head, Counting, np.ndarray, dict[str, Played]]:
    logits = drawn(SLOTS * STATE_ROWS, VOCABULARY)
    tensors = {names.LOGITS: Tensor("float32", ("tokens", VOCABULARY))}
    most = ("tokens", names.MAX_CANDIDATES)
    exits = Tensor("float32", ("batch", 1, STATE_ROWS, WIDTH))
    specs = {
        names.HEAD: NetworkSpec(
            names.HEAD, {names.EXIT_STATES: exits, names.ROWS: Tensor("int64", ("tokens",))}, tensors
        ),
        names.BEST: NetworkSpec(
            names.BEST,
            tensors,
            {names.BEST_TOKENS: Tensor("int32", ("tokens",)), names.BEST_LOGITS: Tensor("float32", ("tokens",))},
        ),
        names.CANDIDATES: NetworkSpec(
            names.CANDIDATES,
            tensors,
            {names.CANDIDATE_LOGITS: Tensor("float32", most), names.CANDIDATE_TOKENS: Tensor("int64", most)},
        ),
    }
    networks = {name: Played(spec, logits) for name, spec in specs.items()}
    info = replace(opened.manifest.networks, max_logits=8, state_rows=STATE_ROWS)
    device = Counting()
    return Head(specs, networks, device, info, device.allocate(exits.size(1, SLOTS)), SLOTS), device, logits, networks


SAMPLERS = [
    {},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.3, "top_k": 127, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 128},
    {"temperature": 1.0, "top_p": 0.9},
    {"logprobs": 3},
]


@pytest.mark.parametrize("options", SAMPLERS)
def test_tokens_are_those_of_all_logits_however_equal_ones_are_ordered(head, options) -> None:
    run, _, logits, _ = head
    for row in range(SLOTS * STATE_ROWS):
        ours, theirs = Sampler(**options, seed=row), Sampler(**options, seed=row)
        count = run.count(ours.candidates)
        where = [divmod(row, STATE_ROWS)]
        whole, few = run.run([] if count else where, where if count else [], [count] if count else [])
        given = few[0] if count else whole[0]
        assert ours.draft(given) == theirs.draft(logits[row])
        assert [ours(given) for _ in range(5)] == [theirs(logits[row]) for _ in range(5)]


@pytest.mark.parametrize(("options", "count"), list(zip(SAMPLERS, [1, 1, 50, 127, 20, 0, 0, 0], strict=True)))
def test_samplers_say_how_many_they_choose_from(head, options, count: int) -> None:
    assert head[0].count(Sampler(**options).candidates) == count


def test_many_positions_of_all_kinds_in_one_call(head) -> None:
    """More than a run takes: some need all logits, some the best, some several."""
    run, _, logits, _ = head
    random = np.random.default_rng(5)
    for _ in range(50):
        whole, few = (
            [divmod(int(row), STATE_ROWS) for row in random.integers(0, 120, random.integers(0, 20))] for _ in "ab"
        )
        if not whole and not few:
            continue
        counts = random.choice([1, 2, 60], len(few)).tolist()
        found, candidates = run.run(whole, few, counts)
        np.testing.assert_array_equal(found, logits[[slot * STATE_ROWS + row for slot, row in whole]])
        for (slot, row), count, given in zip(few, counts, candidates, strict=True):
            expected, least = logits[slot * STATE_ROWS + row], np.sort(given.logits)[-count]
            np.testing.assert_array_equal(given.logits, expected[given.tokens])
            assert (np.diff(given.tokens) > 0).all()
            if count > 1:
                assert set(np.flatnonzero(expected >= least)) <= set(given.tokens)
            else:
                assert given.tokens == [expected.argmax()]


def test_what_crosses_to_the_host(head) -> None:
    run, device, logits, networks = head
    distinct = next(row for row in range(STATE_ROWS) if len(np.unique(logits[row])) > 900)

    def bytes_of(whole: int, counts: list[int]) -> int:
        device.downloaded = 0
        run.run([(0, distinct)] * whole, [(0, distinct)] * len(counts), counts)
        return device.downloaded

    assert bytes_of(1, []) == 4 * VOCABULARY
    assert bytes_of(0, [1]) <= 512  # a token and its logit, each in a part of its own
    assert (networks[names.BEST].runs, networks[names.CANDIDATES].runs) == (1, 0)
    assert bytes_of(0, [50] * 8) <= 12 * 8 * names.MAX_CANDIDATES + 1024 < 8 * 4 * VOCABULARY
    assert (networks[names.BEST].runs, networks[names.CANDIDATES].runs) == (1, 1)
    assert bytes_of(1, [1] * 7) <= 4 * VOCABULARY + 512


def test_equal_logits_beyond_what_was_found_are_fetched(head) -> None:
    run, _, logits, _ = head
    logits[0] = 1.0
    logits[0, 500] = 2.0
    (given,) = run.run([], [(0, 0)], [10])[1]
    assert len(given.tokens) == VOCABULARY
    sampler = Sampler(1.0, 10, seed=0)
    assert {sampler(given) for _ in range(300)} == {*range(9), 500}


def test_logits_that_are_not_finite_are_refused() -> None:
    for sampler in (Sampler(), Sampler(1.0, 2)):
        with pytest.raises(GenerationError, match="the model's logits are not finite"):
            sampler(Candidates(np.array([4, 9]), np.array([np.inf, 1.0], np.float32)))


REQUESTS = [
    {"mode": "full"},
    {"mode": "exit"},
    {"mode": "lossless"},
    {"mode": "exit", "temperature": 0.9, "top_k": 5, "seed": 3},
    {"mode": "lossless", "temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 3},
    {"mode": "full", "temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"mode": "exit", "logprobs": 2},
    {"mode": "exit", "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_generations_are_those_from_all_logits(engines, fake_gpu: Engine, monkeypatch, options) -> None:
    _, networks, thresholds = engines
    options = options | ({"threshold": thresholds} if options["mode"] == "exit" else {})
    prompts = [TEXT[:9], TEXT[20:61], TEXT[5:8]]

    def generated(engine: Engine):
        answers = [engine.generate(prompt, max_new_tokens=20, **options) for prompt in prompts]
        answers += engine.generate(prompts, max_new_tokens=20, **options)
        return [(answer.tokens, answer.stats.exit_layer, answer.logprobs) for answer in answers]

    few = [generated(networks), generated(fake_gpu)]
    monkeypatch.setattr(Sampler, "candidates", 0)
    assert few == [generated(networks), generated(fake_gpu)]


def test_requests_with_and_without_all_logits_share_a_step(engines, fake: FakeCudart, monkeypatch) -> None:
    """One run of the head serves them, and only the rows that need it cross."""
    _, networks, thresholds = engines
    copied: list[int] = []
    copy = fake.cudaMemcpyAsync
    monkeypatch.setattr(
        fake, "cudaMemcpyAsync", lambda *given: (copied.append(given[2] if given[3] == 2 else 0), copy(*given))[1]
    )
    device = FakeGpu(networks.backend, fake)
    info = replace(networks.backend._info, max_batch_size=8, max_slot_tokens=4, max_logits=8)
    backend = SegmentBackend(networks.manifest, info, networks.backend.specs, device.open_device, "cpu")
    assert isinstance(cuda.import_cudart(), FakeCudart)
    batch = backend.start_batch(1.0, 4)
    slots = [batch.join(thresholds, 4) for _ in range(4)]
    for slot, count in zip(slots, (1, 0, 5, 1), strict=True):
        batch.sequences[slot].candidates = count
    results = batch.step({slot: TEXT[slot : slot + 4] for slot in slots})
    whole = results[slots[1]]
    assert whole.logits.shape == (networks.manifest.model.vocab_size,)
    assert not whole.candidates
    for slot in (slots[0], slots[2], slots[3]):
        (given,) = results[slot].candidates
        assert results[slot].logits.size == 0
        alone = networks.start(thresholds, 4).step(TEXT[slot : slot + 4])
        np.testing.assert_allclose(given.logits, alone.logits[given.tokens], rtol=1e-5, atol=1e-5)
        assert int(given.tokens[given.logits.argmax()]) == int(alone.logits.argmax())
    size = 4 * networks.manifest.model.vocab_size
    assert copied.count(size) == 1
