"""A model whose code lies in its folder: refused without `--trust-remote-code`, and with it like any other model."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command_line import refused
from looped_models import own_code
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import ModelError, UnsupportedModelError
from tide_export.model.source import load_model
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet

CODE = Path(__file__).parent / "custom_code"
AUTO_MAP = {
    "AutoConfig": "configuration_custom.CustomConfig",
    "AutoModelForCausalLM": "modeling_custom.CustomForCausalLM",
}
REFUSED = "needs Python code of its own .* --trust-remote-code"


def make_model(folder: Path, tokenizer: Path) -> Path:
    shutil.copytree(CODE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = {"model_type": "tide_custom", "auto_map": AUTO_MAP, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    shutil.copy(tokenizer / "tokenizer.json", folder)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": [None, "tokenization_custom.CustomTokenizerFast"]}
    settings |= {"tokenizer_class": "CustomTokenizerFast", "auto_map": auto_map}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True)
    weights = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory):
    """Copies of the code go to a folder of the test."""
    with own_code(tmp_path_factory.mktemp("modules")):
        yield


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    return make_model(tmp_path_factory.mktemp("custom") / "model", demo_model)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    lines = [f"def f{n}(a, b):\n    return a * {n} + b\n" * 4 for n in range(12)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return tmp_path / "text.jsonl"


def test_without_the_option_no_code_runs(custom: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.get_class_in_module", lambda *_, **__: pytest.fail("ran the code")
    )
    for command in (["calibrate", custom, "-o", custom / "r.safetensors"], ["export", custom, "-o", custom / "out"]):
        line = refused(capsys, *command, "-q")
        assert f"model '{custom}' needs Python code of its own (auto_map)" in line
        assert "--trust-remote-code" in line
    with pytest.raises(ModelError, match=REFUSED):
        load_tokenizer(custom)


def test_a_known_architecture_with_a_model_class_of_its_own(tmp_path: Path, custom: Path) -> None:
    """The config is transformers', the causal LM is not."""
    shutil.copytree(custom, tmp_path / "model")
    config = {"model_type": "albert", "auto_map": {"AutoModelForCausalLM": "modeling_custom.CustomForCausalLM"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        load_model(tmp_path / "model")


def test_the_whole_chain(tmp_path: Path, demo_model: Path, text: Path, capsys) -> None:
    """`validate` compares with the model's own code; what is saved says that it ran, and holds none of it."""
    model = str(make_model(tmp_path / "model", demo_model))
    routers, bundle = str(tmp_path / "r.safetensors"), str(tmp_path / "bundle")
    trust, data = "--trust-remote-code", ["--dataset", str(text)]
    sizes = "--calibration-samples 12 --calibration-length 32 --router-epochs 1 --checkpoints 1"
    assert main(["calibrate", model, "-o", routers, "-q", trust, *data, *sizes.split()]) == 0
    assert RouterSet.load(routers).provenance["remote_code"] is True
    assert main(["export", model, "-o", bundle, "-q", "--routers", routers, "--min-layers", "1", trust]) == 0
    assert open_bundle(bundle).manifest.remote_code is True
    assert not list(Path(bundle).rglob("*.py"))
    checked = "--prompts 2 --longest-prompt 8 --new-tokens 4 --threads 1"
    assert main(["validate", bundle, "--model", model, "-q", trust, *checked.split()]) == 0
    assert main(["generate", bundle, "--prompt", "def f(", "--max-new-tokens", "4", "-q"]) == 0
    capsys.readouterr()
    assert main(["inspect", bundle]) == 0
    assert "CustomForCausalLM, 2 layers" in (shown := capsys.readouterr().out)
    assert "code of its own" in shown
    tuning = ["tune", bundle, "--model", model, "-q", "--dry-run", *data, "--epsilon", "0.5", "--delta", "0.5"]
    assert "--trust-remote-code" in refused(capsys, *tuning)
    assert "that the routers have not seen are needed" in refused(capsys, *tuning, trust)


def test_routers_of_tide_for_such_a_model(tmp_path: Path, custom: Path) -> None:
    source = load_model(custom, trust_remote_code=True)
    state = random_routers(source, (1,), [1, 2, 3], bottleneck=4, shortlist=0).routers[1].state_dict()
    torch.save(
        {"router_layers": {0: {key: state[key] for key in ("down.weight", "up.weight")}}}, tmp_path / "router.pt"
    )
    arguments = ["calibrate", str(custom), "-o", str(tmp_path / "r.safetensors"), "-q"]
    arguments += ["--from-tide", str(tmp_path / "router.pt")]
    assert main(arguments) == 2
    assert main([*arguments, "--trust-remote-code"]) == 0
    assert RouterSet.load(tmp_path / "r.safetensors").provenance["remote_code"] is True


def test_the_option_alone_is_not_recorded(demo_model: Path) -> None:
    assert not load_model(demo_model, trust_remote_code=True).remote_code


def test_code_that_fails_is_one_sentence(tmp_path: Path, custom: Path, capsys) -> None:
    shutil.copytree(custom, tmp_path / "model")
    path = tmp_path / "model" / "configuration_custom.py"
    for code, says in (("def (", "invalid syntax"), ("import no_such_package", "no_such_package"), ("1 / 0", "zero")):
        path.write_text(code)
        arguments = ["calibrate", tmp_path / "model", "-o", tmp_path / "r.safetensors", "-q", "--trust-remote-code"]
        assert says in refused(capsys, *arguments)


def test_a_folder_for_the_code_that_cannot_be_written(
    tmp_path: Path, custom: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a read-only home; a file in its place is refused to the superuser too."""
    (tmp_path / "file").write_text("")
    copies = tmp_path / "file" / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(copies))
    monkeypatch.setattr(sys, "path", [*sys.path])
    line = refused(capsys, "calibrate", custom, "-o", tmp_path / "r.safetensors", "-q", "--trust-remote-code")
    assert f"cannot be copied to {copies} (Not a directory)" in line
    assert "set HF_MODULES_CACHE to a folder that can be written" in line
