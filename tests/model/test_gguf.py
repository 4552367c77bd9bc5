"""A GGUF file as source: read by transformers, with its own tokenizer, and checked like any other model."""

import json
import shutil
from pathlib import Path

import pytest
import tiers
import torch
from command_line import refused
from gguf_files import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig

from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.cli.main import main
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import ModelError
from tide_export.model.source import load_model
from tide_export.pipeline.flow import export
from tide_export.runtime.engine import load

IDS = torch.tensor([[5, 9, 2, 44, 17, 60, 3, 3]])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf", "Q8_0")


def hugging_face(path: Path):
    """The model as transformers reads the file without this package."""
    dense = GgufConfig(dequantize=True)
    options = {"dtype": torch.float32, "attn_implementation": "eager", "quantization_config": dense}
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options).eval()


@pytest.mark.parametrize("kind", tiers.exhaustive_beyond(1, ["Q4_0", "F32", "F16"]))
def test_the_numbers_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind)
    source, theirs = load_model(path), hugging_face(path)
    assert (source.num_layers, source.context_length, source.eos_token_ids) == (2, 64, (0,))
    assert all(parameter.dtype == torch.float32 for parameter in source.model.parameters())
    with torch.no_grad():
        assert torch.equal(source.run(IDS, []).logits, theirs(IDS).logits)


LAYOUTS = {
    "Q8_0": ("llama", "Q8_0", {}, 16),
    "Q4_0": ("llama", "Q4_0", {"output.": "Q8_0"}, 16),
    "mixed": ("llama", "Q4_0", {"attn_k": "Q8_0", "attn_v": "F16", "token_embd": "Q8_0", "output.": "Q4_1"}, 11),
    "LFM2": ("lfm2", "Q4_0", {"token_embd": "Q8_0"}, 13),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_integers_that_the_matmuls_hold_are_kept(tmp_path: Path, layout: str, caplog) -> None:
    """Every weight is transformers' to the bit; the exported model says what transformers' does with these."""
    architecture, kind, kinds, kept = LAYOUTS[layout]
    path = write_gguf(tmp_path / "tiny.gguf", kind, architecture, kinds)
    with caplog.at_level("INFO"):
        source = load_model(path, packed=True)
    theirs = hugging_face(path)
    assert f"integers are kept in {kept} matrices" in caplog.text
    assert source.quantized is not None
    assert len(source.quantized.blocks) == kept
    weights = dict(theirs.named_parameters())
    for name, matrix in source.quantized.blocks.items():
        assert torch.equal(torch.from_numpy(matrix.values()), weights[name]), name
    with torch.no_grad():
        assert torch.equal(source.run(IDS, []).logits, theirs(IDS).logits)
    config = TideConfig(checkpoints="none")
    bundle = export(str(path), tmp_path / "bundle", config=config, accuracy_level=0)  # level 4 rounds inputs to 8 bits
    tokens = load(bundle, threads=1).generate(IDS[0].tolist(), max_new_tokens=12, stop_token_ids=()).tokens
    with torch.no_grad():
        expected = theirs.generate(IDS, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert tokens == expected[0, IDS.shape[1] :].tolist()


def test_a_bundle_is_as_large_as_its_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_0")
    bundle = export(str(path), tmp_path / "bundle", config=TideConfig(checkpoints="none"))
    weights = sum(file.stat().st_size for file in bundle.rglob("*.data") if not file.is_symlink())
    assert weights < 1.12 * path.stat().st_size  # scales have 32 bits, where the file's have 16


def test_other_weights_than_auto_round_the_widened_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    assert load_model(path).quantized is None


def test_the_whole_chain(file: Path, tmp_path: Path, capsys) -> None:
    """Calibrate, export with its comparison, and generate; at full depth the tokens are those of transformers."""
    text = tmp_path / "text.jsonl"
    lines = [{"text": f"def f{n}(a, b):\n    return a * {n} + b\n"} for n in range(40)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bundle = str(tmp_path / "bundle")
    options = "--calibration-samples 24 --calibration-length 32 --router-epochs 1 --no-report -q"
    options += " --checkpoints 1 --min-layers 1"
    assert main(["export", str(file), "-o", bundle, "--dataset", str(text), *options.split()]) == 0
    manifest = open_bundle(bundle).manifest
    assert manifest.model.weights_sha256 == load_model(file).weights_sha256
    assert (manifest.model.name, manifest.remote_code) == (str(file), None)
    assert main(["generate", bundle, "--prompt", "def f(", "--max-new-tokens", "4", "-q"]) == 0
    assert all("the router at checkpoint 1 gives all" in line for line in capsys.readouterr().err.splitlines())
    engine, theirs = load(bundle, provider="cpu", threads=1), hugging_face(file)
    tokens = engine.generate(IDS[0].tolist(), max_new_tokens=12, mode="full", stop_token_ids=()).tokens
    with torch.no_grad():
        expected = theirs.generate(IDS, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert tokens == expected[0, IDS.shape[1] :].tolist()


def test_the_tokenizer_is_the_file_s_whatever_lies_beside_it(file: Path, tmp_path: Path, demo_model: Path) -> None:
    copied = tmp_path / "model.gguf"
    shutil.copy(file, copied)
    decoy = json.loads((demo_model / "tokenizer.json").read_text())
    decoy["model"] |= {"vocab": {"a": 0, "b": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(decoy))
    shutil.copy(demo_model / "tokenizer_config.json", tmp_path)
    text = "def f(x):\n    return x + 1\n"
    expected = AutoTokenizer.from_pretrained(demo_model)(text).input_ids
    assert load_tokenizer(copied)(text).input_ids == expected


def set_number(data: bytes, key: bytes, value: int) -> bytes:
    start = data.index(key) + len(key) + 4  # after the type
    return data[:start] + value.to_bytes(4, "little") + data[start + 4 :]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-1000], "cannot be read"),
        (lambda data: data[:1000], "cannot be read"),
        (lambda data: data[:3], "cannot be read"),
        (lambda data: b"", "cannot be read"),
        (lambda data: b"GGML" + data[4:], "not start with the GGUF magic"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "cannot be read"),  # number of tensors
        (lambda data: set_number(data, b"llama.block_count", 7 << 28), "asks for 1879048192 in num_hidden_layers"),
        (lambda data: set_number(data, b"llama.feed_forward_length", 7 << 28), "far more parameters"),
    ],
)
def test_a_damaged_file(file: Path, tmp_path: Path, capsys, change, says: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(change(file.read_bytes()))
    line = refused(capsys, "export", tmp_path / "bad.gguf", "-o", tmp_path / "out", "-q")
    assert str(tmp_path / "bad.gguf") in line
    assert says in line


def test_an_architecture_that_transformers_does_not_read(tmp_path: Path, capsys) -> None:
    write_gguf(tmp_path / "model.gguf", architecture="chatglm")
    line = refused(capsys, "export", tmp_path / "model.gguf", "-o", tmp_path / "out", "-q")
    assert "architecture chatglm is not supported" in line


def test_no_such_file(tmp_path: Path, capsys) -> None:
    line = refused(capsys, "calibrate", tmp_path / "model.gguf", "-o", tmp_path / "out.safetensors", "-q")
    assert f"no GGUF file at '{tmp_path / 'model.gguf'}'" in line


def test_the_package_is_missing(file: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_export.model.pretrained.is_gguf_available", lambda: False)
    line = refused(capsys, "export", file, "-o", tmp_path / "out", "-q")
    assert f"reading {file} needs the package 'gguf': pip install -e '.[gguf]' in the clone" in line


def test_layers_on_disk(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Disk offload is not supported for models loaded from GGUF files"):
        load_model(file, device_map={"": "disk"}, offload_folder=tmp_path)
