"""Adapters of a bundle that `export --lora-rank` made: by `generate --adapter`, as models of a server, and what is
refused."""

import copy
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from running_server import Running
from safetensors.numpy import load_file, save_file
from shallow_demo import first_layers

from tide_export.bundle.file_names import ROUTERS_FILE
from tide_export.cli.main import main
from tide_export.errors import ConfigError, GenerationError, ProviderError
from tide_export.model.source import SourceModel, load_model
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import Engine, load, open_engine
from tide_export.serving.config import ServerConfig
from tide_export.serving.service import Service

LAYERS = 2
PROMPT = "def read_lines(path):"
ASKED: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "extra_body": {"mode": "full"}}


def adapter_at(folder: Path, model: torch.nn.Module, seed: int, **config: Any) -> Any:
    """Writes a random adapter; returns peft's model."""
    torch.manual_seed(seed)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**config))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_layers(demo_model, LAYERS, tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="module")
def source(model: Path) -> SourceModel:
    return load_model(str(model))


@pytest.fixture(scope="module")
def folder(model: Path, source: SourceModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, and two adapters."""
    made = tmp_path_factory.mktemp("adapters")
    random_routers(source, (1,), list(range(5, 45)), bottleneck=16).save(made / ROUTERS_FILE)
    options = ["--routers", str(made / ROUTERS_FILE), "--lora-rank", "4", "--epsilon", "0", "-q"]
    assert main(["export", str(model), "-o", str(made / "bundle"), *options]) == 0
    adapter_at(made / "one", source.model, 1, r=4, lora_alpha=4, target_modules="all-linear")
    adapter_at(made / "two", source.model, 2, r=2, lora_alpha=8, target_modules=["v_proj"])
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return load(folder / "bundle", threads=1, adapters={name: folder / name for name in ("one", "two")})


def test_the_bundle_says_what_it_has_room_for(engine: Engine, capsys) -> None:
    lora = engine.manifest.model.lora
    assert lora is not None
    assert (lora.rank, len(lora.targets)) == (4, 7 * LAYERS)
    assert engine.adapters == ("one", "two")
    assert main(["inspect", str(engine.bundle.path)]) == 0
    assert "room for adapters (LoRA) up to rank 4 of 14 linear layers" in capsys.readouterr().out


def test_generate_and_embed(engine: Engine, folder: Path, source: SourceModel, capsys) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    adapted = adapter_at(folder / "one", source.model, 1, r=4, lora_alpha=4, target_modules="all-linear")
    with torch.no_grad():
        expected = adapted.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
    made = engine.generate(ids, mode="full", max_new_tokens=12, adapter="one")
    assert made.tokens == expected[len(ids) :].tolist()
    arguments = ["--adapter", str(folder / "one"), "--mode", "full", "--max-new-tokens", "12", "--json"]
    assert main(["generate", str(folder / "bundle"), "--prompt", PROMPT, *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == made.tokens
    one, two, none = (engine.embed(ids, adapter=name) for name in ("one", "two", None))
    assert min(np.abs(one - two).max(), np.abs(one - none).max(), np.abs(two - none).max()) > 1e-3
    with pytest.raises(GenerationError, match="adapter 'three' is none of those that the bundle was loaded with"):
        engine.generate(ids, adapter="three")
    with pytest.raises(GenerationError, match="adapter must be the name of an adapter, not 3"):
        engine.generate(ids, adapter=3)  # type: ignore[arg-type]


def test_clients_name_adapters_as_models(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("running_server.load", lambda *_, **__: engine)
    running = Running(engine.bundle.path)
    try:
        models = running.openai.models.list().data
        assert [(model.id, (model.model_extra or {}).get("parent")) for model in models] == [
            ("demo", None), ("one", "demo"), ("two", "demo")]  # fmt: skip
        ids = engine.tokenizer.encode(PROMPT)
        for name, adapter in (("demo", None), ("one", "one"), ("two", "two")):
            done = running.openai.completions.create(model=name, **ASKED)
            alone = engine.generate(ids, mode="full", max_new_tokens=12, adapter=adapter, detokenize=True)
            assert (done.choices[0].text, done.model) == (alone.text, name)
            vector = (
                running.openai.embeddings.create(model=name, input=PROMPT, encoding_format="float").data[0].embedding
            )
            np.testing.assert_allclose(vector, engine.embed(ids, adapter=adapter), atol=1e-5)
        with pytest.raises(openai.NotFoundError, match="there is no model 'three' here, but 'demo', 'one', 'two'"):
            running.openai.completions.create(model="three", **ASKED)
    finally:
        running.stop()
    with pytest.raises(ConfigError, match="the model and an adapter are both named 'one': give another --model-name"):
        Service(engine, ServerConfig(model_name="one"))


def config(**changes: Any) -> Callable[[Path], None]:
    """Changes the adapter's config."""

    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    """Changes the adapter's matrices."""

    def changed(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        arrays = load_file(path)
        change(arrays)
        save_file(arrays, path)

    return changed


def renamed(arrays: dict[str, np.ndarray], to: str) -> None:
    arrays[to] = arrays.pop(next(name for name in arrays if name.endswith("layers.0.self_attn.v_proj.lora_A.weight")))


KEY = "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda at: (at / "adapter_config.json").unlink(), "adapter_config.json is missing or cannot be read"),
    "no weights": (lambda at: (at / "adapter_model.safetensors").unlink(), "safetensors is missing or cannot be read"),
    "folder": (lambda at: made_folder(at / "adapter_config.json"), "adapter_config.json is missing or cannot be read"),
    "config": (lambda at: (at / "adapter_config.json").write_text("[]"), "adapter_config.json is not a JSON object"),
    "weights": (lambda at: (at / "adapter_model.safetensors").write_bytes(b"\xff" * 40), "is no safetensors file"),
    "cut": (lambda at: cut(at / "adapter_model.safetensors"), "adapter_model.safetensors is damaged at base_model"),
    "kind": (config(peft_type="IA3"), "its peft_type is not LORA"),
    "dora": (config(use_dora=True), "it has use_dora"),
    "biases": (config(bias="all"), "it changes biases"),
    "modules": (config(modules_to_save=["lm_head"]), "it has modules_to_save"),
    "pissa": (config(init_lora_weights="pissa_niter_4"), "init_lora_weights pissa_niter_4 changes the model itself"),
    "alpha": (config(lora_alpha="8"), "its lora_alpha is no number"),
    "pattern": (config(alpha_pattern={".*v_proj": 4}), "alpha_pattern has an expression"),
    "rank": (
        tensors(lambda all_: all_.update({name: of_rank_9(name, array) for name, array in all_.items()})),
        "it has rank 9 and the bundle room for 4: export it with --lora-rank 9",
    ),
    "model": (tensors(lambda all_: all_.update({KEY: np.zeros((2, 7), np.float32)})), "which is of another model"),
    "halves": (tensors(lambda all_: all_.pop(KEY)), "it has no base_model.model.model.layers.0.self_attn"),
    "type": (tensors(lambda all_: all_.update({KEY: all_[KEY].astype(np.int32)})), "has type I32, none of F32, F16"),
    "head": (
        tensors(lambda all_: renamed(all_, "base_model.model.lm_head.lora_A.weight")),
        "it changes lm_head, for which the bundle has no room: it has for the linear layers of decoder layers",
    ),
    "embedding": (tensors(lambda all_: renamed(all_, "base_model.model.embed.lora_embedding_A")), "is no matrix of"),
}  # fmt: skip


def of_rank_9(name: str, array: np.ndarray) -> np.ndarray:
    return np.zeros((9, array.shape[1]) if "lora_A" in name else (array.shape[0], 9), np.float32)


def made_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_adapter_of_the_bundle_is_refused(case: str, folder: Path, tmp_path: Path) -> None:
    change, sentence = BROKEN[case]
    shutil.copytree(folder / "two", tmp_path / "a")
    change(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"adapter 'a' in '.*' cannot be used: .*{sentence}"):
        load(folder / "bundle", threads=1, adapters={"a": tmp_path / "a"})


def test_types_patterns_and_where_adapters_run(engine: Engine, folder: Path, demo_bundle: Path, tmp_path: Path) -> None:
    """Half precision and patterns of alphas are read; a bundle without room and other providers refuse adapters."""
    ids = engine.tokenizer.encode(PROMPT)
    shutil.copytree(folder / "two", tmp_path / "half")
    tensors(lambda all_: all_.update({name: array.astype(np.float16) for name, array in all_.items()}))(
        tmp_path / "half"
    )
    shutil.copytree(folder / "two", tmp_path / "less")
    config(lora_alpha=2, alpha_pattern={"self_attn.v_proj": 8, "v_proj": 1})(tmp_path / "less")
    loaded = load(folder / "bundle", threads=1, adapters={name: tmp_path / name for name in ("half", "less")})
    two = engine.embed(ids, adapter="two")
    np.testing.assert_allclose(loaded.embed(ids, adapter="half"), two, atol=2e-3)
    np.testing.assert_array_equal(loaded.embed(ids, adapter="less"), two)
    for provider in ("auto", "cpu", "tensorrt"):
        with pytest.raises(ConfigError, match="has no room for adapters: export it with --lora-rank"):
            load(demo_bundle, provider=provider, adapters={"two": folder / "two"})
    with pytest.raises(ProviderError, match="adapters are for provider 'cpu', not 'cpu-networks'"):
        open_engine(engine.bundle, "cpu-networks", adapters={"two": folder / "two"})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--lora-rank", "-1"], "lora_rank must be a whole number, 0 or more, not -1"),
        (["--lora-rank", "4", "--target", "tensorrt", "--no-engines"], "lora_rank is for target onnxruntime alone"),
    ],
)
def test_room_that_no_runtime_reads(options: list[str], sentence: str, demo_model: Path, tmp_path: Path, capsys):
    assert main(["export", str(demo_model), "-o", str(tmp_path / "out"), *options]) == 2
    assert sentence in capsys.readouterr().err


def test_the_benchmark_times_every_adapter(
    folder: Path, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools" / "benchmarks"))
    benchmark = importlib.import_module("adapters")
    monkeypatch.setattr(benchmark, "NEW_TOKENS", 3)
    arguments = [str(demo_bundle), *(str(folder / name) for name in ("bundle", "one", "two")), "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["adapters", *arguments])
    assert benchmark.main() == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["no", "room,", "one", "two"]
    assert all(row.count("x") == 3 for row in rows)
