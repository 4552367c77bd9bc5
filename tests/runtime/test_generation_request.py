"""Every option in every mode: it changes something, or it is refused by name."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_model import TinyModel

from tide_export.bundle.opened import open_bundle
from tide_export.errors import ConfigError, GenerationError, ProviderError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load, open_engine
from tide_export.thresholds.resolve import MODES
from tide_export.verify.validate import validate

GIVEN = {"threshold": 0.9, "min_layers": 4, "max_pending": 1, "compaction_threshold": 0.0}
REFUSED = {  # option -> mode -> what is said
    "threshold": {"full": "threshold is for modes 'exit' and 'lossless', not 'full'"},
    "min_layers": {"full": "min_layers is for modes 'exit' and 'lossless', not 'full'"},
    "max_pending": {"full": "max_pending is for modes 'exit' and 'lossless', not 'full'"},
    "compaction_threshold": {"full": "compaction_threshold is for modes 'exit' and 'lossless', not 'full'"},
    "prompt_lookup": dict.fromkeys(("auto", "full", "exit"), "prompt_lookup is for mode 'lossless'"),
    "top_k": dict.fromkeys(MODES, "top_k is for a temperature above 0"),
    "top_p": dict.fromkeys(MODES, "top_p is for a temperature above 0"),
    "min_p": dict.fromkeys(MODES, "min_p is for a temperature above 0"),
}
VALUES = {**GIVEN, "prompt_lookup": 3, "top_k": 2, "top_p": 0.5, "min_p": 0.1}


@pytest.mark.parametrize(("option", "mode"), list(product(REFUSED, MODES)))
def test_an_option_counts_or_is_refused(tiny_engine: Engine, option: str, mode: str) -> None:
    given = {"mode": mode, option: VALUES[option]}
    reason = REFUSED[option].get(mode)
    if option == "compaction_threshold":
        with pytest.raises(GenerationError, match="compaction_threshold is for a list of prompts"):
            tiny_engine.generate([1, 2], max_new_tokens=4, **given)
    elif reason is None:
        assert len(tiny_engine.generate([1, 2], max_new_tokens=4, **given).tokens) == 4
    else:
        with pytest.raises(GenerationError, match=reason):
            tiny_engine.stream([1, 2], max_new_tokens=4, **given)
    if reason is not None:
        with pytest.raises(GenerationError, match=reason):
            tiny_engine.generate([[1, 2], [3]], max_new_tokens=4, **given)
    if option in ("top_k", "top_p", "min_p"):
        assert tiny_engine.generate([1, 2], max_new_tokens=4, temperature=0.5, **given).tokens


@pytest.mark.parametrize("option", GIVEN)
@pytest.mark.parametrize("mode", ["exit", "lossless"])
def test_without_checkpoints_no_token_leaves(tmp_path: Path, mode: str, option: str) -> None:
    engine = load(TinyModel(checkpoints=()).write(tmp_path / "b"), threads=1)
    engine.resolved(GenerationConfig(mode=mode))
    prompts = 2 if option == "compaction_threshold" else None
    with pytest.raises(GenerationError, match=f"{option} is for checkpoints, and bundle .* has none"):
        engine.resolved(GenerationConfig(mode=mode, **{option: GIVEN[option]}), prompts)


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "tensorrt-rtx"])
def test_threads_are_for_the_cpu(tiny_bundle: Path, provider: str) -> None:
    with pytest.raises(ProviderError, match=f"threads are for the CPU, and provider '{provider}' runs on the GPU"):
        load(tiny_bundle, provider=provider, threads=2)


def test_plugins_are_for_tensorrt(demo_bundle: Path) -> None:
    bundle = open_bundle(demo_bundle, verify=False)
    built = replace(bundle, manifest=replace(bundle.manifest, engines=SimpleNamespace(plugins=object())))
    for provider in ("cpu", "cuda"):
        with pytest.raises(ProviderError, match=f"provider '{provider}' runs no plan that could hold plugins"):
            open_engine(built, provider, plugins="x.so")
    for provider in (None, "cpu"):
        with pytest.raises(ConfigError, match="plugins are for TensorRT plans"):
            validate(bundle.path, "no-model", "no-text", provider=provider, plugins="x.so")
