"""Calibration from end to end on the demo model: the record it leaves, what it reports, what it refuses."""

import json
import logging
from pathlib import Path

import pytest
import tiers
import torch

import tide_export
from tide_export.calibration import flow
from tide_export.calibration.config import TideConfig
from tide_export.calibration.fit_checkpoints import fit_checkpoints
from tide_export.calibration.flow import calibrate
from tide_export.calibration.split import split_sequences
from tide_export.data.documents import document_hash
from tide_export.data.sequences import read_sequences
from tide_export.errors import CalibrationError, ConfigError, DatasetError
from tide_export.routers.router_set import RouterSet
from tide_export.thresholds.resolve import MAX_THRESHOLD

pytestmark = pytest.mark.usefixtures("compared_once")
TEXT = Path(__file__).parents[2] / "calibration" / "text" / "python-stdlib-validation.jsonl"


def config(**options):
    given = {
        "calibration_dataset": str(TEXT),
        "checkpoints": (3, 9),
        "calibration_samples": 16,
        "calibration_length": 64,
        "router_epochs": 2,
        "exit_strategy": "identity",
        "router_bottleneck_dim": 8,
    }
    return TideConfig.from_options(**(given | options))


LENSES = {"exit_strategy": "lens", "lens_rank": 4, "lens_epochs": 1}


@pytest.fixture(scope="module")
def calibration(demo, tokenizer):
    return calibrate(demo, tokenizer, config())


@pytest.fixture(scope="module")
def made(calibration):
    return calibration.routers


@pytest.fixture(scope="module")
def lensed(demo, tokenizer):
    return calibrate(demo, tokenizer, config(**LENSES))


def same_weights(one, other):
    found, expected = one.tensors(), other.tensors()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_one_router_per_checkpoint(made, demo):
    assert made.checkpoints == (3, 9)
    assert made.hidden_size == demo.normalized_size
    assert made.lenses == {}
    made.check(demo, "in memory")


def test_provenance(made, demo):
    found = made.provenance
    assert found["model"] == demo.name
    assert found["weights_sha256"] == demo.weights_sha256
    assert (found["num_layers"], found["hidden_size"]) == (12, 128)
    assert found["dataset"] == str(TEXT)
    assert len(found["dataset_sha256"]) == 64
    assert (found["documents"], found["sequences"], found["split"]) == (10, 16, "documents")
    assert found["tokens"] == 16 * 64
    assert (found["label"], found["exit_strategy"]) == ("unchanged", "identity")
    assert TideConfig.from_options(**found["config"]) == config()
    assert set(found["versions"]) == {"tide_export", "torch", "transformers", "datasets"}
    assert found["versions"]["tide_export"] == tide_export.__version__
    json.dumps(found)
    report = found["report"]
    assert set(report) == {"3", "9"}
    assert report["3"]["positive_rate"] < report["9"]["positive_rate"]


def test_every_document_read_is_recorded_so_that_tune_can_tell_them(made):
    texts = [json.loads(line)["text"] for line in TEXT.read_text().splitlines()]
    assert made.provenance["document_hashes"] == [document_hash(text) for text in texts[:10]]


def test_the_report_is_of_the_test_split_alone(made, calibration, demo, tokenizer):
    """Which neither fitting nor scaling has seen."""
    sequences = list(read_sequences(str(TEXT), tokenizer, 64, 16))
    split = split_sequences(sequences, config().validation_fraction, config().test_fraction, config().seed)
    tested = {sequence.document for sequence in split.test}
    assert set(calibration.assessment.evaluation.documents) == tested
    assert not tested & {sequence.document for sequence in split.train + split.validation}
    for record in made.provenance["report"].values():
        assert record["tokens"] == sum(len(s.ids) for s in split.test) == len(calibration.assessment.evaluation.scores)
        assert record["train_tokens"] == sum(len(s.ids) for s in split.train)


def test_the_assessment_is_of_these_routers(calibration, demo):
    assessment = calibration.assessment
    assert assessment.model == "demo-llama"  # a folder's own name, without the path to it
    assert assessment.evaluation.checkpoints == (3, 9)
    assert assessment.thresholds == (MAX_THRESHOLD, 0.85)  # min_layers is 8
    assert assessment.convergence.layers == tuple(range(1, 13))
    assert assessment.convergence.changed[-1] == 0.0
    assert len(assessment.examples) == 1  # one document is tested on
    assert assessment.provenance == calibration.routers.provenance
    for k, record in enumerate(calibration.routers.provenance["report"].values()):
        assert record["positive_rate"] == pytest.approx(assessment.evaluation.labels[:, k].mean(), abs=1e-6)
        assert record["mean_score"] == pytest.approx(assessment.evaluation.scores[:, k].mean(), abs=1e-5)


def test_the_shortlist_is_what_the_model_says_most(demo, tokenizer):
    made = calibrate(demo, tokenizer, config(router_shortlist=5)).routers
    sequences = list(read_sequences(str(TEXT), tokenizer, 64, 16))
    counts = torch.zeros(demo.vocab_size)
    for sequence in split_sequences(sequences, 0.15, 0.15, 0).train:
        logits = demo.run(torch.from_numpy(sequence.ids).long()[None], []).logits[0]
        counts += torch.bincount(logits.argmax(-1), minlength=demo.vocab_size)
    rows = made.routers[3].shortlist
    said = [int((demo.head_rows() == row).all(-1).nonzero()[0]) for row in rows]
    assert sorted(counts[said].tolist(), reverse=True) == counts.sort(descending=True).values[:5].tolist()
    assert made.routers[9].shortlist is rows


@pytest.mark.parametrize(("asked", "rows"), [(0, None), (1, 2), (10**6, 4096)])
def test_the_shortlist_may_be_none_or_all(demo, tokenizer, asked, rows):
    """Of two at least: a second best is asked for."""
    made = calibrate(demo, tokenizer, config(router_shortlist=asked, router_epochs=1, checkpoints=(9,))).routers
    shortlist = made.routers[9].shortlist
    assert (None if shortlist is None else len(shortlist)) == rows


def test_a_head_that_is_no_matrix_gets_routers_without_a_shortlist(demo, tokenizer, caplog, monkeypatch):
    monkeypatch.setattr(type(demo), "head_rows", lambda self: None)
    with caplog.at_level(logging.WARNING, logger="tide_export"):
        made = calibrate(demo, tokenizer, config()).routers
    assert made.routers[3].shortlist is None
    assert "is not a matrix" in caplog.text


def test_survives_the_file(made, tmp_path):
    made.save(tmp_path / "routers.safetensors")
    loaded = RouterSet.load(tmp_path / "routers.safetensors")
    assert loaded.provenance == made.provenance
    assert same_weights(loaded, made)


@pytest.mark.parametrize(("first", "options"), [("calibration", {}), ("lensed", LENSES)])
def test_repeats_exactly(demo, tokenizer, request, first, options):
    first, again = request.getfixturevalue(first).routers, calibrate(demo, tokenizer, config(**options)).routers
    assert again.provenance == first.provenance
    assert same_weights(again, first)


@pytest.mark.parametrize("strategy", ["lens", "auto"])
def test_lenses_are_fitted_to_the_training_split_and_reported(demo, tokenizer, lensed, strategy):
    made = lensed if strategy == "lens" else calibrate(demo, tokenizer, config(**LENSES | {"exit_strategy": strategy}))
    routers = made.routers
    reports = {int(layers): record["lens"] for layers, record in routers.provenance["report"].items()}
    assert set(routers.lenses) == {layers for layers, report in reports.items() if report["used"]}
    kept = strategy == "lens"  # the model was trained to exit: with "auto" a lens gains too little
    assert (9 in routers.lenses) == kept
    assert routers.provenance["exit_strategy"] == ("lens" if kept else "identity")
    assert routers.provenance["config"]["exit_strategy"] == strategy
    assert made.assessment.costs.lens == 2 * 2 * 128 * 4 * len(routers.lenses) / 2
    trained = sum(
        len(s.ids) for s in split_sequences(list(read_sequences(str(TEXT), tokenizer, 64, 16)), 0.15, 0.15, 0).train
    )
    for report in reports.values():
        assert report["rank"] == 4
        assert report["tokens"] == trained if kept else 0 < report["tokens"] <= trained  # one that is given up: fewer
        assert min(report["curve"]["kl"]) <= report["curve"]["kl"][0]


def test_a_cache_gives_the_same_routers_and_is_read_instead_of_running_the_model(
    made, demo, tokenizer, tmp_path, monkeypatch
):
    runs = []
    raw_hidden = type(demo).raw_hidden
    monkeypatch.setattr(
        type(demo),
        "raw_hidden",
        lambda self, ids, layers, *more: runs.append(list(layers)) or raw_hidden(self, ids, layers, *more),
    )
    first = calibrate(demo, tokenizer, config(), tmp_path / "cache").routers
    assert [3, 9, 12] in runs
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["test", "train", "validation"]
    runs.clear()
    # As after a kill while fitting: nothing but the report's look at every layer, and its examples, runs the model.
    again = calibrate(demo, tokenizer, config(), tmp_path / "cache").routers
    assert runs.count([3, 9, 12]) == len(calibrate_examples(runs))
    assert same_weights(first, made)
    assert same_weights(again, made)
    assert again.provenance == made.provenance
    with pytest.raises(CalibrationError, match="belongs to another calibration"):
        calibrate(demo, tokenizer, config(checkpoints=(3, 6)), tmp_path / "cache")


def calibrate_examples(runs):
    """The passes at the end, one per example of the report."""
    return [layers for layers in runs[-2:] if layers == [3, 9, 12]]


def test_one_document_is_split_by_sequence_and_said_so(demo, tokenizer, tmp_path, caplog):
    path = tmp_path / "one.txt"
    path.write_text("".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(200)))
    with caplog.at_level(logging.WARNING, logger="tide_export"):
        made = calibrate(demo, tokenizer, config(calibration_dataset=str(path)))
    assert made.routers.provenance["split"] == "sequences"
    assert "too few documents" in caplog.text


def test_a_router_that_learned_nothing_is_named(demo, tokenizer, caplog, monkeypatch):
    def fit(*arguments):
        routers, reports = fit_checkpoints(*arguments)
        routers.routers[3].up.weight.data.zero_()
        return routers, reports

    monkeypatch.setattr(flow, "fit_checkpoints", fit)
    with caplog.at_level(logging.WARNING, logger="tide_export"):
        calibrate(demo, tokenizer, config())
    assert "the router at checkpoint 3 gives all" in caplog.text
    assert "the router at checkpoint 9 gives all" not in caplog.text


@pytest.mark.parametrize("options", tiers.exhaustive_beyond(1, [LENSES, {}]))
def test_a_checkpoint_with_labels_of_one_class_is_dropped_with_a_warning(demo, tokenizer, caplog, options):
    cosine = config(label="cosine", checkpoints=(1, 9), convergence_threshold=0.975, **options)
    with caplog.at_level(logging.WARNING, logger="tide_export"):
        made = calibrate(demo, tokenizer, cosine)
    assert made.routers.checkpoints == made.assessment.evaluation.checkpoints == (9,)
    assert set(made.routers.lenses) <= {9}
    assert set(made.routers.provenance["report"]) == {"9"}
    assert "checkpoint 1 is dropped: no token" in caplog.text
    assert "checkpoint 9" not in caplog.text


def test_every_token_may_leave_is_one_class_too(demo, tokenizer, caplog):
    with (
        caplog.at_level(logging.WARNING, logger="tide_export"),
        pytest.raises(CalibrationError, match="no checkpoint of 3, 9 is left: by the kl label"),
    ):
        calibrate(demo, tokenizer, config(label="kl", kl_bound=1000.0))
    assert "checkpoint 3 is dropped: every token" in caplog.text
    assert "checkpoint 9 is dropped: every token" in caplog.text


def test_no_checkpoint_left_is_an_error(demo, tokenizer):
    with pytest.raises(CalibrationError, match="no checkpoint of 1 is left: by the cosine label"):
        calibrate(demo, tokenizer, config(label="cosine", checkpoints=(1,), convergence_threshold=0.99))


def test_checkpoints_auto_are_few_and_not_before_min_layers(demo, tokenizer, caplog):
    with caplog.at_level(logging.INFO, logger="tide_export"):
        made = calibrate(demo, tokenizer, config(checkpoints="auto", min_layers=8)).routers
    assert 1 <= len(made.checkpoints) <= 4
    assert min(made.checkpoints) >= 8
    assert f"checkpoints auto: after {', '.join(map(str, made.checkpoints))} of 12 layers" in caplog.text


def test_checkpoints_auto_where_none_pays(demo, tokenizer, monkeypatch):
    monkeypatch.setattr("tide_export.calibration.placement.RECALL", 0.0)
    with pytest.raises(CalibrationError, match="no checkpoint from layer 11 on saves more than it costs"):
        calibrate(demo, tokenizer, config(checkpoints="auto", min_layers=11))


def test_sequences_fit_the_models_context(demo, tokenizer):
    made = calibrate(demo, tokenizer, config(calibration_samples=3, calibration_length=4000))
    assert made.routers.provenance["tokens"] <= 3 * demo.context_length == 3072


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"checkpoints": (12,)}, ConfigError, r"checkpoints must lie in 1\.\.11"),
        ({"calibration_dataset": "./none.txt"}, DatasetError, "no such file"),
        ({"checkpoints": "auto", "min_layers": 12}, ConfigError, "12 layers has none from layer 12 on: lower --min-la"),
    ],
)
def test_refusals(demo, tokenizer, options, error, reason):
    with pytest.raises(error, match=reason):
        calibrate(demo, tokenizer, config(**options))


def test_too_little_text(demo, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("x = 1\n")
    with pytest.raises(CalibrationError, match="at least 3"):
        calibrate(demo, tokenizer, config(calibration_dataset=str(tmp_path / "a.txt")))
