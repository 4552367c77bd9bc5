"""Bundles' graphs in an ONNX Runtime without our library, against PyTorch: what the functions define is the model."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiers
from families import build
from plain_graphs import Batch
from tiny_configs import CHECKPOINTS
from tiny_engines import bundle_of, pieces_of

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.bundle.manifest import FLOAT32_KV, INT8_KV
from tide_export.bundle.opened import Bundle
from tide_export.model.source import SourceModel
from tide_export.names import batch_networks as names
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.verify.int8_kv import rounded_kv
from tide_export.verify.oracle import oracle
from tide_export.verify.references import full_reference
from tide_export.verify.step_graph import StepGraph

# By what they have that attention must get right.
FAMILIES = {
    "llama": "grouped queries, projections packed",
    "mpt": "ALiBi without a power of two",
    "gpt_oss": "sinks and a window",
    "gemma3n (text)": "keys and values of earlier layers",
    "gptj": "an interleaved rotation of a part",
}
FURTHER = {
    "gpt2": "no rotation",
    "mistral": "a sliding window",
    "bloom": "ALiBi",
    "cohere": "an interleaved rotation",
    "gemma2": "softcaps: of segment networks in test_tensorrt",
}
IDS = (np.arange(3 * 40) * 37 % 500 + 3).reshape(3, -1).tolist()
RUNS = [[13, 1, 0], [1, 6, 5], [0, 1, 1], [9, 0, 17]]  # new tokens of three sequences


class Made:
    """A family's bundle and what it was made of."""

    def __init__(self, family: str, folder: Path, kv_cache: str = FLOAT32_KV) -> None:
        self.source: SourceModel = build(family)
        self.routers: RouterSet = random_routers(self.source, CHECKPOINTS, IDS[0], bottleneck=16, lens_rank=4)
        made_of = self.source, self.routers, folder / "bundle", pieces_of(self.source, CHECKPOINTS)
        self.bundle: Bundle = bundle_of(*made_of, kv_cache=kv_cache)

    def full(self, ids: list[int]) -> np.ndarray:
        with rounded_kv(self.source, self.bundle.manifest):
            return full_reference(self.source, ids, 1).logits


@pytest.fixture(scope="module", params=tiers.exhaustive_but(FAMILIES, [*FAMILIES, *FURTHER]))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made("llama", tmp_path_factory.mktemp("int8"), kv_cache=INT8_KV)


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max(initial=1))


def check_full_depth(made: Made, tolerance: float = 1e-4) -> None:
    """A prompt, single tokens, several at once."""
    graph, ids = StepGraph(made.bundle).start([2.0, 2.0], 0), IDS[0]
    parts = (ids[:11], ids[11:12], ids[12:13], ids[13:20], ids[20:])
    logits = [graph.step(part, len(part)).position_logits for part in parts]
    close(np.concatenate(logits), made.full(ids), tolerance)


def check_exits(made: Made) -> None:
    """Token by token after a prompt, by thresholds that some tokens pass at either checkpoint."""
    ids, prompt = IDS[1], 10
    scores = oracle(made.source, made.routers, ids, [2.0, 2.0]).scores[prompt:].numpy()
    thresholds = [dividing(scores[:, k], share) for k, share in enumerate((0.7, 0.5))]
    expected = oracle(made.source, made.routers, ids, thresholds)
    graph = StepGraph(made.bundle).start(thresholds, 3)
    graph.step(ids[:prompt], full=True)
    steps = [graph.step([token]) for token in ids[prompt:]]
    layers = [step.exit_layer for step in steps]
    assert layers == expected.exit_layers[prompt:].tolist()
    assert set(layers) == {*CHECKPOINTS, made.source.num_layers}
    close(np.stack([step.logits for step in steps]), expected.logits[prompt:].detach().numpy())


def dividing(scores: np.ndarray, share: float) -> float:
    """In the middle of the widest gap between the scores around this share of them."""
    ordered = np.sort(scores)
    middle = int(share * len(ordered))
    gaps = np.diff(ordered[middle - 4 : middle + 4])
    at = middle - 4 + int(gaps.argmax())
    return float(ordered[at : at + 2].mean())


def check_batch(made: Made, tolerance: float = 1e-4) -> None:
    """Three sequences with other numbers of new tokens in every run, against each alone."""
    batch, at = Batch(made.bundle, 3), [0, 0, 0]
    found: list[list[np.ndarray]] = [[], [], []]
    for counts in RUNS:
        new = [ids[start : start + count] for ids, start, count in zip(IDS, at, counts, strict=True)]
        at = [start + count for start, count in zip(at, counts, strict=True)]
        for logits, each in zip(batch.full(new), found, strict=True):
            each.append(logits)
    for ids, length, logits in zip(IDS, at, found, strict=True):
        close(np.concatenate(logits), made.full(ids[:length]), tolerance)


def test_the_step_graph_is_the_model_at_full_depth(made: Made) -> None:
    check_full_depth(made)


def test_the_step_graph_exits_by_the_rule(made: Made) -> None:
    check_exits(made)


def test_a_batch_of_ragged_sequences_is_the_model(made: Made) -> None:
    check_batch(made)


def test_the_graphs_are_valid(made: Made) -> None:
    for file in (GRAPH_FILE, *(name for name in made.bundle.manifest.files if name.startswith("batch/"))):
        beside_its_weights = made.bundle.path / "checked.onnx"
        shutil.copyfile(made.bundle.path / file, beside_its_weights)
        onnx.checker.check_model(str(beside_its_weights), full_check=True)


def test_pending_tokens_of_several_runs_go_through_the_next_segment_at_once(made: Made) -> None:
    """Each sequence has another number of them; scores and exits at the checkpoint are the rule's."""
    batch, runs = Batch(made.bundle, 3), [[4, 1, 7], [1, 0, 2]]
    waiting: list[list[np.ndarray]] = [[], [], []]
    at = [0, 0, 0]
    for counts in runs:
        new = [ids[start : start + count] for ids, start, count in zip(IDS, at, counts, strict=True)]
        at = [start + count for start, count in zip(at, counts, strict=True)]
        outputs = batch.through(new, range(1))
        logits = batch.head(batch.pool, {names.HEAD_STATES: outputs[names.EXIT_STATES][None]})[names.LOGITS][0]
        ends = np.cumsum(counts)
        for r, (ids, end) in enumerate(zip(IDS, ends, strict=True)):
            place, rows = slice(at[r] - counts[r], at[r]), slice(end - counts[r], end)
            rule = oracle(made.source, made.routers, ids[: at[r]], [-1.0, -1.0])
            close(outputs[names.ROUTER_SCORE][rows, 0], rule.scores[place, 0].numpy())
            close(logits[rows], rule.logits[place].detach().numpy())
            waiting[r].append(outputs[names.NEW_HIDDEN_STATES][0, rows])
    batch.lengths = [0, 0, 0]
    feeds = batch.places([ids[:length] for ids, length in zip(IDS, at, strict=True)])
    feeds[names.HIDDEN_STATES] = np.concatenate([states for each in waiting for states in each])[None]
    feeds[names.LAST_TOKENS], feeds[names.SLOT_THRESHOLDS] = np.arange(sum(at)), np.zeros((sum(at), 1), np.float32)
    for segment in batch.segments[1:]:
        outputs = segment(batch.pool, feeds)
        feeds[names.HIDDEN_STATES] = outputs.get(names.NEW_HIDDEN_STATES, feeds[names.HIDDEN_STATES])
    logits = batch.head(batch.pool, {names.HEAD_STATES: outputs[names.EXIT_STATES][None]})[names.LOGITS][0]
    for ids, length, rows in zip(IDS, at, np.split(logits, np.cumsum(at)[:-1]), strict=True):
        close(rows, made.full(ids[:length]))


def test_int8_pages(int8: Made) -> None:
    check_full_depth(int8, 2e-3)  # a number on the edge may be rounded to either side
    check_batch(int8, 2e-3)
