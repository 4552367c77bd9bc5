"""Engines on a GPU: each against ONNX Runtime, generation against the branched graph, token for token."""

import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

from tide_export.bundle.opened import Bundle
from tide_export.errors import ProviderError
from tide_export.plans.rebuild import rebuild
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.tensorrt.flavours import FLAVOURS, import_library
from tide_export.runtime.tensorrt.gpu import compute_capability
from tide_export.runtime.tensorrt.plugins import find_plugins

ROOT = Path(__file__).parents[2]


WITH_PLUGINS = "tensorrt-plugins"


@pytest.fixture(scope="session", params=[*sorted(FLAVOURS), WITH_PLUGINS])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A copy of the demo bundle with engines of a flavour, built here; for plugins set TIDE_PLUGINS."""
    flavour = FLAVOURS[request.param.removesuffix("-plugins")]
    if compute_capability() is None:
        pytest.skip("no NVIDIA GPU, or no driver for it")
    try:
        import_library(flavour)
    except ProviderError as error:
        pytest.skip(str(error))
    plugins = find_plugins(None) if request.param == WITH_PLUGINS else None
    if request.param == WITH_PLUGINS and plugins is None:
        pytest.skip("no plugin library here: TIDE_PLUGINS names none")
    bundle = tmp_path_factory.mktemp("gpu") / request.param
    demo: Path = request.getfixturevalue("demo_bundle")
    shutil.copytree(demo, bundle)
    built = rebuild(bundle, flavour.name, plugins="none" if plugins is None else plugins.path)
    assert built.manifest.engines is not None
    assert (built.manifest.engines.plugins is not None) == (request.param == WITH_PLUGINS)
    return built


def test_every_engine_equals_onnx_runtime(engines: Bundle) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "checks" / "plans.py"))
    assert tool["main"](str(engines.path)) == 0


@pytest.fixture(params=["engines", "cuda"])
def on_gpu(engines: Bundle, request: pytest.FixtureRequest) -> Engine:
    assert engines.manifest.engines is not None
    provider = engines.manifest.engines.flavour if request.param == "engines" else "cuda"
    try:
        return load(engines.path, provider=provider, verify=False)
    except ProviderError as error:
        if provider != "cuda":
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("max_pending", [1, 4, 16])
def test_tokens_and_exits_equal_the_branched_graph(engines: Bundle, on_gpu: Engine, demo_text_ids, max_pending) -> None:
    """Steps of one token, of many, verified and wound back, in one sequence; each shape often enough to be replayed."""
    one = load(engines.path, provider="cpu", verify=False).start([0.6, 0.7, 0.8], max_pending)
    other = on_gpu.start([0.6, 0.7, 0.8], max_pending)
    at = 0
    for number, size in enumerate([30, *[1] * 60, 3, 7, 1, 1, 3, 7, 1, 40, *[1] * 20]):
        ids = demo_text_ids[at : at + size]
        full, keep = number % 7 == 6, 1 + number % 3 * 4
        a, b = one.step(ids, logits_to_keep=keep, full=full), other.step(ids, logits_to_keep=keep, full=full)
        assert (b.exit_layer, b.segments_run) == (a.exit_layer, a.segments_run)
        np.testing.assert_allclose(b.position_logits, a.position_logits[-len(b.position_logits) :], atol=2e-2)
        at += size
        if number % 11 == 10:
            at -= 1
            one.rewind(at)
            other.rewind(at)
        assert other.lengths == one.lengths


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_several_prompts_get_what_each_gets_alone(engines: Bundle, on_gpu: Engine, demo_text_ids, share: float) -> None:
    """More than there are places, of many lengths; often enough that runs over several sequences are replayed."""
    on_cpu = load(engines.path, provider="cpu", verify=False)
    prompts = [
        demo_text_ids[70 * number : 70 * number + length] for number, length in enumerate([1, 37, 2, 150, 18] * 2)
    ]
    exits = {"threshold": [0.6, 0.7, 0.8], "min_layers": 0, "max_pending": 4}
    for options, along in (({"mode": "full"}, {}), (exits, {"compaction_threshold": share})):
        alone = [on_cpu.generate(prompt, max_new_tokens=48, stop_token_ids=[], **options) for prompt in prompts]
        together = on_gpu.generate(prompts, max_new_tokens=48, stop_token_ids=[], **options, **along)
        for one, other in zip(together, alone, strict=True):
            assert (one.tokens, one.stats.exit_layer) == (other.tokens, other.stats.exit_layer)
    drafts = {"mode": "lossless", "threshold": [0.3, 0.4, 0.5], "max_pending": 4, "compaction_threshold": share}
    full = [on_cpu.generate(prompt, max_new_tokens=48, mode="full", stop_token_ids=[]).tokens for prompt in prompts]
    assert [one.tokens for one in on_gpu.generate(prompts, max_new_tokens=48, stop_token_ids=[], **drafts)] == full


def test_generation_is_that_of_the_cpu(engines: Bundle, on_gpu: Engine, demo_text_ids) -> None:
    on_cpu = load(engines.path, provider="cpu", verify=False)
    for mode in ("full", "exit"):
        expected = on_cpu.generate(demo_text_ids[:40], max_new_tokens=64, mode=mode)
        found = on_gpu.generate(demo_text_ids[:40], max_new_tokens=64, mode=mode)
        assert found.tokens == expected.tokens
        assert found.stats.exit_layer == expected.stats.exit_layer
