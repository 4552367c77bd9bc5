"""Lists of prompts in the C++ runtime: tokens, exit layers and all counts equal those of Python's lists, and those of
one prompt at a time where no sequence catches up with others."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundles import without
from cpp_builds import CppBuild
from cpp_engine import CppEngine, facts, prompts_of, words

from tide_export import names
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest
from tide_export.errors import BundleError, GenerationError
from tide_export.runtime.generation import Generation
from tide_export.runtime.engine import Engine, load
from tide_export.thresholds.resolve import MAX_THRESHOLD

Both = tuple[Engine, CppEngine]
LENGTHS = (1, 37, 100, 2, 18, 130)
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def both(demo_bundle: Path, open_cpp: Callable[..., CppEngine]) -> Both:
    return load(demo_bundle, threads=1), open_cpp(demo_bundle)


@pytest.fixture(scope="module")
def propagating(propagating_bundle: Path, open_cpp: Callable[..., CppEngine]) -> Both:
    return load(propagating_bundle, threads=1), open_cpp(propagating_bundle)


@pytest.fixture(scope="module")
def prompts(demo_text_ids: list[int]) -> list[list[int]]:
    return [demo_text_ids[150 * number : 150 * number + length] for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def mixed(both: Both, demo_text_ids: list[int]) -> list[float]:
    """Thresholds that about half of the scores at each checkpoint exceed."""
    state = both[0].start([MAX_THRESHOLD] * 3)
    scores = np.array([state.step([token]).scores.copy() for token in demo_text_ids[600:700]])
    return np.clip(np.quantile(scores, 0.5, axis=0), 0.0, 1.0).tolist()


def decisions(generation: Generation) -> tuple[list[int], str, list[int]]:
    """What does not depend on the other sequences of the batch."""
    return generation.tokens, generation.finish_reason, generation.stats.exit_layer


def assert_same(both: Both, prompts: list[list[int]], count: int = NEW_TOKENS, **options: Any) -> list[Generation]:
    python, started = both[0].generate(prompts, max_new_tokens=count, **options), time.perf_counter()
    cpp, seconds = both[1].generate_batch(prompts, max_new_tokens=count, **options), time.perf_counter() - started
    assert [facts(one) for one in cpp] == [facts(one) for one in python]
    assert all(one.stats.prefill_seconds > 0 for one in cpp)
    assert all(one.stats.prefill_seconds + one.stats.decode_seconds < seconds for one in cpp)
    return cpp


def alone(both: Both, prompts: list[list[int]], count: int = NEW_TOKENS, **options: Any) -> list[Generation]:
    return [both[1].generate(prompt, max_new_tokens=count, **options) for prompt in prompts]


@pytest.mark.parametrize("count", [0, 1, 2, 6])
def test_full_depth(both: Both, prompts: list[list[int]], count: int) -> None:
    batch = both[1].generate_batch(prompts[:count], max_new_tokens=NEW_TOKENS, mode="full")
    assert [facts(one) for one in batch] == [facts(one) for one in alone(both, prompts[:count], mode="full")]
    if count:
        assert_same(both, prompts[:count], mode="full")


@pytest.mark.parametrize("max_pending", [1, 4, 16])
def test_exits(both: Both, prompts: list[list[int]], mixed: list[float], max_pending: int) -> None:
    options = {"threshold": mixed, "min_layers": 0, "max_pending": max_pending, "stop_token_ids": []}
    expected = alone(both, prompts, **options)
    exits = {layers for one in expected for layers in one.stats.exit_layer}
    assert exits > {3, 12}, "some leave early, some later, some never"
    assert [facts(one) for one in assert_same(both, prompts, **options)] == [facts(one) for one in expected]
    computed = {}
    for share in (0.0, 0.5, 1.0):
        batch = assert_same(both, prompts, compaction_threshold=share, **options)
        assert [decisions(one) for one in batch] == [decisions(one) for one in expected]
        computed[share] = sum(one.stats.layer_tokens_run for one in batch)
    assert computed[0.0] > computed[1.0], "sequences with pending tokens caught up too"


@pytest.mark.parametrize("options", [{}, {"prompt_lookup": 0}, {"prompt_lookup": 7, "max_pending": 1}])
@pytest.mark.parametrize("share", [None, 1.0])
def test_lossless(
    both: Both, prompts: list[list[int]], mixed: list[float], share: float | None, options: dict[str, int]
) -> None:
    repeated = [prompt * 2 for prompt in prompts]  # so that prompt lookup drafts
    options = {"max_pending": 4, "threshold": mixed, "stop_token_ids": [], "mode": "lossless"} | options
    batch = assert_same(both, repeated, compaction_threshold=share, **options)
    full = alone(both, repeated, mode="full", stop_token_ids=[])
    assert [one.tokens for one in batch] == [one.tokens for one in full]
    accepted, drafted = (sum(getattr(one.stats, name) for one in batch) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted
    if share == 1.0:
        assert [facts(one) for one in batch] == [facts(one) for one in alone(both, repeated, **options)]


def test_lossless_draws_what_full_depth_draws_with_the_same_seeds(
    both: Both, prompts: list[list[int]], mixed: list[float]
) -> None:
    options = {"seed": [3, 1, 4, 1, 5, 9][: len(prompts)], "temperature": 0.8, "top_p": 0.95, "stop_token_ids": []}
    options["max_new_tokens"] = NEW_TOKENS
    full = both[1].generate_batch(prompts, mode="full", **options)
    batch = both[1].generate_batch(prompts, mode="lossless", threshold=mixed, **options)
    assert [one.tokens for one in batch] == [one.tokens for one in full]
    assert 0 < sum(one.stats.accepted for one in batch) < sum(one.stats.drafted for one in batch)


def test_a_cache_that_propagates(propagating: Both, prompts: list[list[int]], mixed: list[float]) -> None:
    for options in ({"mode": "full"}, {"threshold": mixed, "min_layers": 0}, {"threshold": 0.0, "min_layers": 0}):
        batch = assert_same(propagating, prompts, stop_token_ids=[], **options)
        expected = alone(propagating, prompts, stop_token_ids=[], **options)
        assert [facts(one) for one in batch] == [facts(one) for one in expected]
        exits = {layers for one in batch for layers in one.stats.exit_layer}
        assert len(exits) > (2 if options.get("threshold") == mixed else 0)
    for name, value in (("compaction_threshold", 0.5), ("max_pending", 4)):
        with pytest.raises(GenerationError, match=f"{name} is for an exact K/V cache: .* propagates, so that nothing"):
            propagating[1].generate_batch([[5], [6]], max_new_tokens=2, **{name: value})
    with pytest.raises(GenerationError, match="propagates: export it with kv_cache_strategy exact"):
        propagating[1].generate_batch([[5], [6]], max_new_tokens=2, mode="lossless")


@pytest.mark.parametrize("kind", ["exact", "propagate"])
def test_more_prompts_than_slots(
    both: Both, propagating: Both, prompts: list[list[int]], demo_text_ids: list[int], mixed: list[float], kind: str
) -> None:
    """33 short and 6 longer prompts in at most 32 slots; stop tokens end some early, and buffers grow."""
    engines = both if kind == "exact" else propagating
    many = [demo_text_ids[7 * number : 7 * number + 1 + number % 5] for number in range(33)] + prompts
    options = {"threshold": mixed, "min_layers": 0}
    free = engines[0].generate(many[:3], max_new_tokens=12, stop_token_ids=[], **options)
    stops = [one.tokens[4] for one in free]
    batch = assert_same(engines, many, 12, stop_token_ids=stops, **options)
    assert {one.finish_reason for one in batch} == {"stop", "length"}
    assert len({len(one.tokens) for one in batch}) > 3
    expected = alone(engines, many, 12, stop_token_ids=stops, **options)
    assert [facts(one) for one in batch] == [facts(one) for one in expected]


def test_buffers_that_grow(both: Both, prompts: list[list[int]], mixed: list[float]) -> None:
    options = {"threshold": mixed, "min_layers": 0, "stop_token_ids": []}
    batch = both[1].generate_batch(prompts[:2], max_new_tokens=150, **options)
    assert [decisions(one) for one in batch] == [decisions(one) for one in alone(both, prompts[:2], 150, **options)]


@pytest.mark.parametrize("mode", ["full", "lossless"])
def test_the_end_of_the_context(both: Both, demo_text_ids: list[int], mode: str) -> None:
    """A prompt so long that no other joins its step, and one that continues after its end."""
    context = both[0].manifest.model.context_length
    assert context is not None
    long = (demo_text_ids * (1 + context // len(demo_text_ids)))[: context - 3]
    drafts = {"threshold": 0.0, "prompt_lookup": 6} if mode == "lossless" else {}
    one, other = assert_same(both, [long, demo_text_ids[:5]], 8, mode=mode, stop_token_ids=[], **drafts)
    assert (len(one.tokens), one.finish_reason) == (4, "context")
    assert (len(other.tokens), other.finish_reason) == (8, "length")


@pytest.mark.parametrize("mode", ["exit", "lossless"])
def test_seeds(both: Both, prompts: list[list[int]], mixed: list[float], mode: str) -> None:
    """Each sequence draws the random numbers that it draws alone; when its drafts are verified depends on others."""

    def seen(one: Generation) -> Any:
        return one.tokens if mode == "lossless" else facts(one)

    options = {"mode": mode, "threshold": mixed, "temperature": 0.9, "top_p": 0.95, "max_pending": 3}
    options |= {"stop_token_ids": []}
    cpp, seeds = both[1], [3, 1, 4, 1, 5, 9]
    batch = cpp.generate_batch(prompts, max_new_tokens=NEW_TOKENS, seed=seeds, **options)
    apart = [
        cpp.generate(ids, max_new_tokens=NEW_TOKENS, seed=seed, **options)
        for ids, seed in zip(prompts, seeds, strict=True)
    ]
    assert [seen(one) for one in batch] == [seen(one) for one in apart]
    one_for_all = cpp.generate_batch(prompts, max_new_tokens=NEW_TOKENS, seed=7, **options)
    assert [seen(one) for one in one_for_all] == [seen(one) for one in alone(both, prompts, seed=7, **options)]
    assert [one.tokens for one in one_for_all] != [one.tokens for one in batch]
    drawn = [
        [one.tokens for one in cpp.generate_batch(prompts[1:3], max_new_tokens=NEW_TOKENS, **options)] for _ in range(2)
    ]
    assert drawn[0] != drawn[1]


def test_tokens_are_streamed(both: Both, prompts: list[list[int]], mixed: list[float]) -> None:
    options = {"threshold": mixed, "min_layers": 0, "stop_token_ids": []}
    arguments = [*prompts_of(prompts[:4]), *words(max_new_tokens=12, **options)]
    expected = alone(both, prompts[:4], 12, **options)
    answer = both[1].call("stream_batch", "2", "5", *arguments)
    batch = [both[1].generation(one) for one in answer["generations"]]
    assert answer["taken"] == [one.tokens for one in batch]
    for number, (one, other) in enumerate(zip(batch, expected, strict=True)):
        count = 5 if number == 2 else 12
        assert one.tokens == other.tokens[:count]
        assert one.finish_reason == ("cancelled" if number == 2 else "length")


def test_lists_in_threads_are_independent(both: Both, prompts: list[list[int]], mixed: list[float]) -> None:
    """Lists of several lengths at once."""
    options = {"threshold": mixed, "min_layers": 0, "stop_token_ids": []}
    arguments = [*prompts_of(prompts[:5]), *words(max_new_tokens=12, **options)]
    expected = [facts(one) for one in alone(both, prompts[:5], 12, **options)]
    for omitted, answer in enumerate(both[1].call("batches_at_once", "4", *arguments)):
        assert [facts(both[1].generation(one)) for one in answer] == expected[: len(expected) - omitted]


def test_networks_are_opened_again_while_others_run(
    demo_bundle: Path, open_cpp: Callable[..., CppEngine], both: Both, prompts: list[list[int]]
) -> None:
    """Threads that need 4 and 8 slots at once, of an engine that has no batch networks open."""
    cpp = open_cpp(demo_bundle)
    arguments = [*prompts_of(prompts[:6]), *words(max_new_tokens=6, mode="full", stop_token_ids=[])]
    expected = [facts(one) for one in alone(both, prompts, 6, mode="full", stop_token_ids=[])]
    for omitted, answer in enumerate(cpp.call("batches_at_once", "5", *arguments)):
        assert [facts(cpp.generation(one)) for one in answer] == expected[: 6 - omitted]


REFUSED: list[tuple[list[list[int]], dict[str, Any], str]] = [
    ([[1], []], {}, "prompt 2 is empty: give at least one token"),
    ([[1], [10**7]], {}, "prompt 2 holds token id 10000000, outside the vocabulary"),
    ([[1] * 5000, [1]], {}, "prompt 1 has 5000 tokens but the model's context holds"),
    ([[1], [2]], {"prompt_lookup": 3}, "prompt_lookup is for mode 'lossless', not 'auto'"),
    ([[1], [2]], {"mode": "lossless", "prompt_lookup": -1}, "prompt_lookup must be a whole number, 0 or more"),
    ([[1], [2]], {"mode": "full", "max_pending": 1}, "max_pending is for modes 'exit' and 'lossless', not 'full'"),
    (
        [[1], [2]],
        {"mode": "full", "compaction_threshold": 0.5},
        "compaction_threshold is for modes 'exit' and 'lossless', not 'full'",
    ),
    ([[1], [2]], {"temperature": 1.0, "seed": [1, 2, 3]}, "there are 3 seeds for 2 prompts: give one for each, or"),
    ([[1], [2]], {"temperature": 1.0, "seed": [1, -1]}, "seed must be a whole number, 0 or more, not -1"),
    ([[1], [2]], {"temperature": -1.0}, "temperature must be 0 or more, not -1.0"),
    ([[1], [2]], {"top_k": 3}, "top_k is for a temperature above 0"),
    ([[1], [2]], {"compaction_threshold": 1.5}, r"compaction_threshold must lie in \[0, 1\], not 1.5"),
    ([[1], [2]], {"compaction_threshold": float("nan")}, "compaction_threshold must be a number, not nan"),
    ([[1], [2]], {"max_new_tokens": 0}, "max_new_tokens must be a whole number, 1 or more, not 0"),
]


@pytest.mark.parametrize(("ids", "options", "sentence"), REFUSED)
def test_lists_are_refused(both: Both, ids: list[list[int]], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GenerationError, match=sentence):
        both[0].generate(ids, **options)
    with pytest.raises(GenerationError, match=sentence):
        both[1].generate_batch(ids, **options)


def test_options_of_lists_are_refused_for_one_prompt(both: Both) -> None:
    for options, sentence in (
        ({"compaction_threshold": 0.5}, "compaction_threshold is for a list of prompts: one prompt has nothing to be"),
        ({"temperature": 1.0, "seed": [1, 2]}, r"seed must be a whole number, 0 or more, not \[1, 2\]"),
    ):
        for engine in both:
            with pytest.raises(GenerationError, match=sentence):
                engine.generate([1, 2], **options)


def test_missing_or_different_networks(demo_bundle: Path, tmp_path: Path, open_cpp: Callable[..., CppEngine]) -> None:
    old = open_cpp(without(demo_bundle, tmp_path / "old", "batch/"))
    assert old.max_batch_size == 1
    assert len(old.generate([5], max_new_tokens=2).tokens) == 2
    with pytest.raises(GenerationError, match=r"holds no networks for batches .*: give one prompt at a time"):
        old.generate_batch([[5], [6]], max_new_tokens=2)
    folder = without(demo_bundle, tmp_path / "mixed", "batch/slots_08_")
    for file in demo_bundle.glob("batch/slots_16_*"):
        shutil.copyfile(file, folder / names.BATCH_FOLDER / file.name.replace("_16_", "_08_"))
    (folder / names.BATCH_FOLDER / "slots_16_segment_02.onnx").write_bytes(b"no network")
    write_manifest(folder, Manifest.from_json((folder / names.MANIFEST_FILE).read_text()))
    mixed = open_cpp(folder)
    assert mixed.max_batch_size == 32
    with pytest.raises(
        BundleError, match=r"slots_08_segment_00\.onnx' has the input .*\.slot_\d+, which its manifest does"
    ):
        mixed.generate_batch([[5], [6]], max_new_tokens=2)
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot load '.*slots_16_segment_02\.onnx': "):
        mixed.generate_batch([[5]] * 9, max_new_tokens=2)
    assert len(mixed.generate_batch([[5]] * 17, max_new_tokens=2)) == 17  # uses the next larger networks
    assert len(mixed.generate_batch([[5]] * 5, max_new_tokens=2)) == 5  # they serve smaller batches from then on


def test_logits_that_are_not_finite(demo_bundle: Path, tmp_path: Path, open_cpp: Callable[..., CppEngine]) -> None:
    """Several lists fail at their first token."""
    folder = without(demo_bundle, tmp_path / "broken", "batch/slots_16_")
    head = onnx.load(folder / names.batch_file(names.HEAD), load_external_data=False)
    tensors = [{entry.key: entry.value for entry in one.external_data} for one in head.graph.initializer]
    largest = max((entry for entry in tensors if entry), key=lambda entry: int(entry["length"]))
    with (folder / largest["location"]).open("r+b") as weights:
        weights.seek(int(largest["offset"]))
        weights.write(np.full(100, np.nan, np.float32).tobytes())
    write_manifest(folder, Manifest.from_json((folder / names.MANIFEST_FILE).read_text()))
    cpp = open_cpp(folder)
    for mode in ("full", "exit", "lossless", "exit"):
        with pytest.raises(GenerationError, match="the model's logits are not finite"):
            cpp.generate_batch([[5, 6], [7]], max_new_tokens=3, mode=mode)


def test_the_example_program(cpp: CppBuild, demo_bundle: Path, both: Both, demo_text_ids: list[int], tmp_path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("\n".join(map(str, demo_text_ids[:30])))
    arguments = [
        "--ids",
        "5,17,3",
        "--ids-file",
        file,
        *words(max_new_tokens=8, threads=1, seed=[1, 2], temperature=0.7),
    ]
    done = subprocess.run([cpp.program, demo_bundle, *arguments], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    options = {"seed": [1, 2], "temperature": 0.7}
    expected = both[1].generate_batch([[5, 17, 3], demo_text_ids[:30]], max_new_tokens=8, **options)
    assert [facts(CppEngine.generation(one)) for one in answer["sequences"]] == [facts(one) for one in expected]
    assert answer["total_tokens"] == sum(len(one.tokens) for one in expected)
    assert answer["tokens_per_second"] == pytest.approx(answer["total_tokens"] / answer["seconds"], rel=0.01)
