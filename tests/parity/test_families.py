"""Family by family against the oracle: exported, `full` equals Hugging Face and `exit` equals TIDE's rule.

There is one trace per family, which takes most of the time. Rows that together have every feature (`IN_ALL_FORMS`), and
in `make test-all` every row, are run in all forms: several thresholds, lists, drafts, segment networks, a drafter.
`make test` runs rows that have two features which those have not together (`BRIEFLY`) on one prompt with one exit.
`test_features.py` shows that the features of the rows matter to these prompts.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from drafters import random_drafter
from families import BRIEFLY, EXPORTED, FAMILIES, IN_ALL_FORMS, REFUSED, build
from tiny_engines import engine_of, lens_at_first, pieces_of, segments_of
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.drafting.bundle import write_drafter
from tide_export.drafting.files import embedding_of
from tide_export.errors import UnsupportedModelError
from tide_export.graph.rewriting import FLOAT, static_dim
from tide_export.model.source import SourceModel
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import load, open_engine
from tide_export.runtime.generation import Generation
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.trace.tracer import trace
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import check_exit, check_full, check_lossless
from tide_export.verify.step_graph import StepGraph

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]  # none, one and five windows long
ENDED = [9, 2, 7, 5, 2, 2, 11, 40]  # texts end within: n-grams do not go back beyond an end
NEW_TOKENS = 24
GRAPH_TOKENS = 6  # of model.onnx without the library, whose step takes longer

# The forms of routers: lens and shortlist for every family, the parts alone for a few.
LENS_AND_SHORTLIST = {"lens_rank": 8, "shortlist": 16}
SHORTLIST_ALONE = {"lens_rank": 0, "shortlist": 16}
AS_IN_TIDE = {"lens_rank": 0, "shortlist": 0}
LENS_AT_ONE = LENS_AND_SHORTLIST | {"seed": 1}  # checkpoint alone, as `exit_strategy="auto"` may decide
MORE_FORMS = {
    "llama (3.1)": (SHORTLIST_ALONE, AS_IN_TIDE, LENS_AT_ONE),
    "opt (350m)": (SHORTLIST_ALONE,),
    "gemma3 (text)": (AS_IN_TIDE,),
    "gpt2": (AS_IN_TIDE,),
}
# Models that number their tokens themselves: their segment networks run one sequence at a time.
COUNTING = ("llama4 (text)", "llama4", "bart", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small")
COUNTING += ("marian", "mbart", "mvp", "pegasus", "plbart", "roformer", "trocr")
WITHOUT_SHORTLIST = ("electra", "rembert", "roformer")  # whose head is more than one matrix
WITHOUT_NETWORKS = ("jetmoe",)  # what TensorRT does not take
# Models whose exits say what full depth says: none of their drafts is rejected.
ALL_ACCEPTED = ("zamba", "jetmoe")


@pytest.mark.parametrize("family", EXPORTED if tiers.ALL else IN_ALL_FORMS)
def test_every_form_of_a_family_is_equal(family: str, tmp_path: Path) -> None:
    source, checkpoints = build(family), FAMILIES[family].checkpoints
    pieces = pieces_of(source, checkpoints)
    recurrent = "recurrent states" in FAMILIES[family].features
    prompts = [*PROMPTS, ENDED] if "embeddings of n-grams" in FAMILIES[family].features else PROMPTS
    for number, form in enumerate((LENS_AND_SHORTLIST, *MORE_FORMS.get(family, ()))):
        routers = random_routers(source, checkpoints, PROMPTS[2], bottleneck=16, **form)
        if form is LENS_AT_ONE:
            routers = lens_at_first(routers)
        assert (routers.strategy == "lens") == (form["lens_rank"] > 0)
        shortened = form["shortlist"] > 0 and family not in WITHOUT_SHORTLIST
        assert (routers.routers[1].shortlist is not None) == shortened
        folder = tmp_path / f"bundle-{number}"
        batched = number == 0 or form is LENS_AT_ONE
        engine = engine_of(source, routers, folder, pieces)

        full = check_full(engine, source, prompts, NEW_TOKENS)
        assert full.holds, full.differences
        assert full.within_tolerance == 0
        assert full.max_error < 1e-3

        exits: set[int] = set()
        middle = dividing_thresholds(source, routers, PROMPTS[2])
        count = len(checkpoints)
        settings = [([0.3] * count, 1), ([0.7] * count, 4), (middle, 16)]
        settings += tiers.sized([], [(middle, 1)]) + [([NEVER_EXIT, *middle[1:]], 4)] * (count > 1)
        for thresholds, max_pending in settings:
            check = check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, thresholds, max_pending)
            assert check.holds, (thresholds, max_pending, check.differences)
            exits |= set(check.exits)
        assert exits == {*checkpoints, source.num_layers}, "every checkpoint must take part, and full depth too"
        if batched:
            check_batch(engine, middle)
        if number == 0:
            check_drafts(family, engine, source)
        check_graph(engine.bundle, source, routers, middle)
        if batched and not recurrent:
            check_segments(family, source, routers, folder, pieces, middle)
        if number == 0 and not recurrent:
            check_drafter(source, folder)


@pytest.mark.parametrize("family", BRIEFLY)
def test_one_prompt_and_one_exit_of_a_family_are_equal(family: str, tmp_path: Path) -> None:
    source, checkpoints, prompts = build(family), FAMILIES[family].checkpoints, PROMPTS[2:]
    routers = random_routers(source, checkpoints, PROMPTS[2], bottleneck=16, **LENS_AND_SHORTLIST)
    engine = engine_of(source, routers, tmp_path / "bundle", pieces_of(source, checkpoints))
    full = check_full(engine, source, prompts, NEW_TOKENS)
    assert full.holds, full.differences
    assert full.within_tolerance == 0
    middle = dividing_thresholds(source, routers, PROMPTS[2])
    exits = check_exit(engine, source, routers, prompts, NEW_TOKENS, middle, max_pending=4)
    assert exits.holds, exits.differences
    check_graph(engine.bundle, source, routers, middle)


def check_graph(bundle: Bundle, source: SourceModel, routers: RouterSet, thresholds: list[float]) -> None:
    """model.onnx, which no engine of ours opens, in ONNX Runtime without the library."""
    graph = StepGraph(bundle, threads=1)
    full = check_full(graph, source, PROMPTS[2:], GRAPH_TOKENS)
    assert full.holds, full.differences
    exits = check_exit(graph, source, routers, PROMPTS[2:], GRAPH_TOKENS, thresholds, max_pending=2)
    assert exits.holds, exits.differences


def check_batch(engine, thresholds: list[float], modes: int = 2) -> None:
    """Batched prompts of different lengths give what each gives alone, which was compared with the oracle."""
    for options in ({"threshold": thresholds, "max_pending": 4, "min_layers": 0}, {"mode": "full"})[:modes]:
        alone = [engine.generate(prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=[], **options) for prompt in PROMPTS]
        batched = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS, stop_token_ids=[], **options)
        for one, other in zip(batched, alone, strict=True):
            assert (one.tokens, one.stats.exit_layer) == (other.tokens, other.stats.exit_layer)
        check_handover(engine, options, alone[-1])
        if "threshold" not in options:
            assert {layers for one in batched for layers in one.stats.exit_layer} == {engine.manifest.model.num_layers}


def check_handover(engine, options: dict[str, Any], expected: Generation) -> None:
    """A request that is alone, then one of several, then alone again, on the same K/V pages."""
    scheduler = engine.scheduler(SchedulerLimits(slots=len(PROMPTS)))
    options = options | {"stop_token_ids": []}
    handle = scheduler.submit(PROMPTS[-1], max_new_tokens=NEW_TOKENS, **options)
    for _ in range(7):
        scheduler.step()
    others = [scheduler.submit(prompt, max_new_tokens=7, **options) for prompt in PROMPTS[:-1]]
    found = handle.result()
    assert (found.tokens, found.stats.exit_layer) == (expected.tokens, expected.stats.exit_layer)
    assert all(other.finish_reason == "length" for other in others)


def check_drafts(family: str, engine, source) -> None:
    """Every token of lossless mode is Hugging Face's choice after the same tokens, with every token drafted."""
    check = check_lossless(engine, source, PROMPTS, NEW_TOKENS, threshold=0.0, max_pending=3)
    assert check.holds, check.differences
    assert check.drafted > 0
    if family in IN_ALL_FORMS and family not in ALL_ACCEPTED:
        assert check.drafted > check.accepted, "no draft was rejected, so nothing was taken back"


def check_segments(family: str, source, routers, folder: Path, pieces, thresholds: list[float]) -> None:
    """The networks of one segment each, as ONNX Runtime runs them, against the same references."""
    if family in WITHOUT_NETWORKS:
        with pytest.raises(UnsupportedModelError, match="which TensorRT does not take"):
            segments_of(source, routers, folder, pieces)
        return
    engine = open_engine(segments_of(source, routers, folder, pieces), "cpu-networks", threads=1)
    assert (family in COUNTING) == (engine.manifest.networks.max_batch_size == 1)
    if family not in COUNTING:
        check_batch(engine, thresholds, modes=1)
    check_drafts(family, engine, source)
    full = check_full(engine, source, PROMPTS, NEW_TOKENS)
    assert full.holds, full.differences
    for max_pending in tiers.sized((16,), (1, 16)):
        check = check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, thresholds, max_pending)
        assert check.holds, (max_pending, check.differences)


def check_drafter(source, folder: Path) -> None:
    """A drafter with random weights finds the model's embedding, and costs no token."""
    manifest = open_bundle(folder).manifest
    width = static_dim(embedding_of(folder / GRAPH_FILE, FLOAT).graph.outputs[0], -1)
    tokens = np.arange(0, source.vocab_size, 2)
    write_drafter(
        folder, random_drafter(source.normalized_size, width, tokens, weights_sha256=manifest.model.weights_sha256)
    )
    count = len(manifest.checkpoints)
    free = Drafting((1.0,) * count, 0, 0, (1.0,) * count, (0.0,) * 5, {}, 3, 0.0)
    for provider in ("cpu", "cpu-networks") if manifest.networks else ("cpu",):
        engine = load(folder, provider=provider, threads=1).drafting_as(free)
        for prompt, temperature in zip(PROMPTS[1:], (0.8, 0.0), strict=True):
            options = {"temperature": temperature, "seed": 4, "max_new_tokens": NEW_TOKENS, "stop_token_ids": []}
            full = engine.generate(prompt, mode="full", **options)
            found = engine.generate(prompt, mode="lossless", **options)
            assert found.tokens == full.tokens
            assert found.stats.learned_drafted > 0


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_be_exported_is_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=FAMILIES[family].refused) as caught:
        trace(build(family), FAMILIES[family].checkpoints)
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[FAMILIES[family].config().model_type] in str(caught.value)
    assert "\n" not in str(caught.value)
