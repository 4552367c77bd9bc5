"""Assessments made up for the report's tests: routers that know much, little or nothing of tokens of all kinds."""

from dataclasses import replace

import numpy as np

from tide_export.calibration.assessment import Assessment, Convergence, Costs, Evaluation, Example

WORDS = "def| f|(|x|):|\n|   | return| x| <| 3| &| x|\n|\n|print|(f|)|\n"


def make(
    n: int = 20000,
    depth: int = 12,
    checkpoints: tuple[int, ...] = (3, 6, 9),
    documents: int = 25,
    knowledge: float = 4.0,
    shift: float = 0.0,
    threshold: float = 0.85,
    seed: int = 0,
) -> Assessment:
    """A model of `depth` layers whose scores are probabilities.

    Args:
        n: tokens, of about equally long `documents`.
        knowledge: how far the routers tell tokens apart; 0: not at all.
        shift: log-odds that an exit leaves a token unchanged, added everywhere; -8: early exits change every token.
        threshold: of the bundle, at every checkpoint.
    """
    random = np.random.default_rng(seed)
    ease = random.normal(size=(n, 1))
    places = np.array(checkpoints) / depth
    seen = ease + 0.4 * random.normal(size=(n, len(places)))
    scores = 1 / (1 + np.exp(-(knowledge * seen + 9 * (places - 0.5) + shift)))
    # One number per token for all checkpoints, so that what is unchanged early mostly is later.
    unchanged = random.uniform(size=(n, 1)) < scores
    kl = np.where(unchanged, 0.03, 1.6) * random.gamma(2.0, 0.5, unchanged.shape) * (1.05 - places)
    changed = np.where(unchanged, 0.001, 0.95) * random.uniform(0.5, 1.0, unchanged.shape)
    added = np.where(unchanged, 0.001, 0.6) * random.gamma(2.0, 0.5, unchanged.shape)
    belongs = np.sort(random.integers(0, documents, n))
    evaluation = Evaluation(
        depth, checkpoints, scores.astype(np.float32), unchanged, unchanged, kl.astype(np.float32),
        changed.astype(np.float32), added.astype(np.float32), belongs, 0.8,
    )  # fmt: skip
    return Assessment(
        model="demo-llama",
        thresholds=(threshold,) * len(checkpoints),
        evaluation=evaluation,
        convergence=_convergence(depth, shift),
        examples=_examples(checkpoints, depth, random),
        costs=Costs(layer=3.5e6, head=8.4e6, router=5e4, lens=0.0),
        provenance={
            "dataset": "texts/*.jsonl",
            "dataset_sha256": "ab" * 32,
            "weights_sha256": "cd" * 32,
            "label": "unchanged",
            "documents": 300,
            "tokens": 812345,
            "test_fraction": 0.1,
            "split": "documents",
            "config": {"checkpoints": list(checkpoints), "seed": 0, "exit_strategy": "identity"},
            "versions": {"tide_export": "0.1.0", "torch": "2.13.0"},
            "report": {str(c): {"tokens": 9000, "precision": 0.94, "recall": None} for c in checkpoints},
        },
    )


def varied(assessment: Assessment, **fields: object) -> Assessment:
    """With other fields of its evaluation."""
    return replace(assessment, evaluation=replace(assessment.evaluation, **fields))


def _convergence(depth: int, shift: float) -> Convergence:
    layers = np.arange(1, depth + 1)
    changed = 1 / (1 + np.exp(10 * (layers / depth - 0.45) + shift / 2))
    changed[-1] = 0.0
    kl = 4.5 * changed
    cosine = 0.15 + 0.85 * (layers / depth) ** 2
    changed, kl, cosine = (tuple(values.tolist()) for values in (changed, kl, cosine))
    return Convergence(tuple(layers.tolist()), changed, kl, cosine, tokens=1500)


def _examples(checkpoints: tuple[int, ...], depth: int, random: np.random.Generator) -> tuple[Example, ...]:
    pieces = tuple(WORDS.split("|")) * 6
    where = random.choice([*checkpoints, depth], len(pieces))
    unchanged = (random.uniform(size=len(pieces)) < 0.95) | (where == depth)
    return (Example(pieces, (*pieces[1:], " #"), tuple(map(int, where)), tuple(map(bool, unchanged))),)
