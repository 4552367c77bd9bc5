"""The page holds the numbers that were found, shows text as text, and needs nothing but itself."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import report_data
import tiers
from matplotlib.figure import Figure
from matplotlib.image import imread
from report_reader import read

from tide_export.calibration.assessment import Example
from tide_export.report import plots
from tide_export.report.findings import halves, investigate
from tide_export.report.html_tables import lens_reports
from tide_export.report.plots import learning_panel
from tide_export.report.theme import LIGHT
from tide_export.report.write import write_report

NASTY = "<script>alert('1')</script> & \"x\"</span></div>"


def test_the_quality_table_is_what_was_measured(assessment, page):
    _, measured, _ = halves(assessment.evaluation)
    bounds = ["0.5 %", "1.0 %", "2.0 %", "5.0 %", "10.0 %"]
    assert page.column(0, "at most, of both") == ["no exits", *bounds]
    assert page.row(0, "no exits") == ["-", "-", "12.00", "1.00x"]
    assert page.row(1, "at most, of both") == bounds
    for number, choice in enumerate(investigate(assessment).choices):
        outcome = measured.outcome(choice.outcome.thresholds)
        flops = assessment.costs.per_token(outcome, (3, 6, 9))
        change = outcome.change
        assert page.row(0, bounds[number]) == [
            f"{100 * change.changed:.1f} % ± {100 * change.changed_error:.1f} %",
            f"{100 * change.perplexity:+.1f} % ± {100 * change.perplexity_error:.1f} %",
            f"{outcome.layers:.2f}",
            f"{50.4e6 / flops:.2f}x",
        ]

        def cell(name, number=number):
            return page.row(1, name)[number]

        for k, checkpoint in enumerate((3, 6, 9)):
            share, shown = cell(f"leave after {checkpoint}, threshold").split(", ")
            assert share == f"{100 * outcome.exit_shares[k]:.1f} %"
            assert float(shown.replace("off", "1")) == pytest.approx(choice.outcome.thresholds[k], abs=6e-4)
        assert cell("run all 12") == f"{100 * (1 - sum(outcome.exit_shares)):.1f} %"
        assert cell("layers saved") == f"{100 * (1 - outcome.layers / 12):.1f} %"
        assert cell("router efficiency") == f"{100 * choice.efficiency:.0f} %"
        assert cell("compute per token") == f"{flops / 1e6:.3g} MFLOP"
        assert cell("mean KL, nats") == f"{outcome.kl:.4f}"


def test_the_routers_table(assessment, page):
    evaluation = assessment.evaluation
    assert page.row(2, "checkpoint") == ["after 3", "after 6", "after 9"]
    for k in range(3):
        left, may = evaluation.scores[:, k] > 0.85, evaluation.labels[:, k]
        assert page.row(2, "precision there")[k] == f"{100 * may[left].mean():.1f} %"
        assert page.row(2, "recall there")[k] == f"{100 * left[may].mean():.1f} %"
        assert page.row(2, "may leave (label)")[k] == f"{100 * may.mean():.1f} %"
        share = evaluation.outcome(assessment.thresholds).exit_shares[k]
        assert page.row(2, "tokens that leave here")[k] == f"{100 * share:.1f} %"


def test_the_record_is_all_there(assessment, page):
    text = page.text
    for value in ("ab" * 32, "cd" * 32, "texts/*.jsonl", "812,345", "2.13.0", "exit strategy"):
        assert value in text


def test_documents_or_tokens_are_said(assessment, page, unpictured, tmp_path):
    assert "one half of the held-out documents" in page.text
    one = report_data.varied(assessment, documents=np.zeros(4000, np.int64))
    write_report(one, tmp_path / "one.html")
    text = read(tmp_path / "one.html").text
    assert "only one document" in text
    assert "one half of the held-out documents" not in text


def test_nothing_comes_from_elsewhere(page):
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    sources = page.values("img", "src") + page.values("source", "srcset")
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not page.values("a", "href")
    assert any("default-src 'none'" in value for value in page.values("meta", "content"))
    assert "width=device-width, initial-scale=1" in page.values("meta", "content")
    assert all(page.values("img", "alt"))


def test_every_picture_is_one_and_the_dark_ones_are_dark(page):
    light, dark = page.values("img", "src"), page.values("source", "srcset")
    assert len(light) == len(dark) == 1 + 4 + 3 + 4
    for sources, is_light in ((light, True), (dark, False)):
        for source in sources:
            picture = imread(io.BytesIO(base64.b64decode(source.split(",")[1])), format="png")
            assert picture.shape[0] > 300
            assert (picture[2, 2, :3].mean() > 0.5) == is_light
            assert len(np.unique(picture[::5, ::5, :3].reshape(-1, 3), axis=0)) > 12  # something is drawn


def test_the_overview_beside_it(written):
    picture = imread(written.with_suffix(".png"))
    assert picture.shape[1] > 1500


def test_passages_keep_their_text_and_say_where_tokens_left(assessment, page):
    (example,), (passage,) = assessment.examples, page.passages
    assert "".join(token.text for token in passage) == "".join(example.pieces)
    for token, layers, unchanged in zip(passage, example.exit_layers, example.unchanged, strict=True):
        assert token.classes[0] == {3: "c0", 6: "c1", 9: "c2", 12: "full"}[layers]
        assert ("wrong" in token.classes) == (not unchanged)
        assert (f"layer {layers} of 12" if layers < 12 else "all 12") in token.title
    assert passage[0].title.startswith("next: ␣f from")
    assert any("next: ⏎" in token.title for token in passage)


def test_text_is_shown_and_never_obeyed(assessment, unpictured, tmp_path):
    pieces = (NASTY, "\r", "\x00", "\ud800", "\n\n    x")
    example = Example(pieces, (NASTY,) * 5, (3, 6, 9, 12, 3), (True, False, True, True, True))
    provenance = {**assessment.provenance, "dataset": NASTY, "config": {NASTY: NASTY}}
    nasty = replace(assessment, model=NASTY, examples=(example,), provenance=provenance)
    write_report(nasty, tmp_path / "nasty.html")
    found = read(tmp_path / "nasty.html")
    assert "script" not in found.tags
    (passage,) = found.passages
    assert [token.text for token in passage] == [NASTY, "␍", "␀", "\ufffd", "\n\n    x"]
    assert "alert('1')" in passage[0].title
    assert found.text.count(NASTY) >= 5  # title, heading, sentence, record


def test_a_router_that_cannot_tell_tokens_apart_is_named(assessment, page, unpictured, tmp_path):
    scores = assessment.evaluation.scores.copy()
    scores[:, 1] = 0.25
    write_report(report_data.varied(assessment, scores=scores), tmp_path / "r.html")
    found = read(tmp_path / "r.html").text
    assert "Warning: the router at checkpoint 6 gives all 4000 tokens the score 0.250" in found
    assert (found.count("Warning"), page.text.count("Warning")) == (1, 0)


DEGENERATE = {
    "nothing may leave": lambda a: report_data.varied(
        a, labels=np.zeros((600, 3), bool), unchanged=np.zeros((600, 3), bool), scores=np.zeros((600, 3), np.float32)
    ),
    "everything may": lambda a: report_data.varied(
        a,
        labels=np.ones((600, 3), bool),
        unchanged=np.ones((600, 3), bool),
        scores=np.ones((600, 3), np.float32),
        changed=np.zeros((600, 3), np.float32),
        added=np.zeros((600, 3), np.float32),
    ),
    "no exits by default": lambda a: replace(a, thresholds=(1.0, 1.0, 1.0)),
    "no examples, no record": lambda a: replace(a, examples=(), provenance={}),
    "an empty example": lambda a: replace(a, examples=(Example((), (), (), ()),)),
    "one checkpoint": lambda a: report_data.make(n=600, checkpoints=(5,)),
    "many checkpoints": lambda a: report_data.make(n=600, depth=48, checkpoints=tuple(range(4, 48, 4))),
    "two tokens": lambda a: report_data.make(n=2, documents=1),
}


DRAWN = tiers.sized({"two tokens"}, {case for case in DEGENERATE if "example" not in case})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_cases_are_written(case, tmp_path, monkeypatch, request):
    if case not in DRAWN:  # no picture shows examples
        request.getfixturevalue("unpictured")
    drawn = plots.pngs  # in one theme: they differ in colours alone, and `written` has both
    monkeypatch.setattr(plots, "pngs", lambda panel, light, *others: drawn(panel, light) * (1 + len(others)))
    monkeypatch.setattr(plots, "DPI", 40)
    assessment = DEGENERATE[case](report_data.make(n=600))
    write_report(assessment, tmp_path / "r.html")
    found = read(tmp_path / "r.html")
    text = found.text.replace("\u202f", " ")
    assert "nan" not in text.lower()
    assert "inf" not in text.lower().split()
    says = {
        "nothing may leave": "saves none of its 12 layers",
        "everything may": "runs 3.0 of 12 layers per token (75 % fewer)",
        "no exits by default": "lets no token leave early",
        "no examples, no record": "No passage was kept",
        "an empty example": "No passage was kept",
        "two tokens": "Measured on 1 token only",
    }
    assert says.get(case, "At equal quality") in text
    checkpoints = len(assessment.evaluation.checkpoints)
    assert len(found.values("img", "src")) == 1 + 4 + 3 + 1 + checkpoints


def test_the_exit_histogram_never_counts_the_last_layer(assessment):
    from matplotlib.figure import Figure

    from tide_export.report.plots import exits_panel
    from tide_export.report.theme import LIGHT

    axes = Figure().add_subplot()
    exits_panel(assessment, investigate(assessment))(axes, LIGHT)
    shares = assessment.evaluation.outcome(assessment.thresholds).exit_shares
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == pytest.approx([*shares, 1 - sum(shares)])
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["3", "6", "9", "all 12\n(no exit)"]


def test_what_lenses_learned_is_drawn_where_there_are_some(assessment, page, unpictured, tmp_path):
    assert "What the lenses learned" not in page.text
    curve = {"tokens": [0, 500, 1000], "kl": [4.0, 2.0, 1.5], "may_exit": [0.1, 0.2, 0.25]}

    def written(used):
        report = {str(c): {"lens": {"used": c in used, "curve": curve}} for c in (3, 6, 9)}
        with_lenses = replace(assessment, provenance=assessment.provenance | {"report": report})
        write_report(with_lenses, tmp_path / "r.html")
        return with_lenses, read(tmp_path / "r.html")

    _, unused = written(())
    assert "No lens gained enough" in unused.text
    assert len(unused.values("img", "src")) == len(page.values("img", "src")), "flat curves show nothing"
    with_lenses, found = written((3, 6))
    assert "What the lenses learned" in found.text
    assert len(found.values("img", "src")) == len(page.values("img", "src")) + 2
    axes = Figure().add_subplot()
    learning_panel(lens_reports(with_lenses), "kl")(axes, LIGHT)
    assert [line.get_ydata().tolist() for line in axes.lines] == [curve["kl"]] * 3
    assert [line.get_linestyle() for line in axes.lines] == ["-", "-", "--"]
