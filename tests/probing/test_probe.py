"""`tide-export probe` from end to end, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import refused
from probe_models import DEMO, write_llama

from tide_export.cli.main import main
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import ProbeError
from tide_export.model.source import load_model
from tide_export.probing import answers, memory, steps
from tide_export.probing.flow import probe


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs in an empty folder and checks that no file is left there or among temporary files."""
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    for folder in (temporary, here):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.chdir(here)
    yield
    assert [*temporary.iterdir(), *here.iterdir()] == []


@pytest.mark.slow
def test_the_table_has_each_mode_for_each_type_of_weights(tmp_path, nothing_left, monkeypatch, capsys):
    monkeypatch.setattr(answers, "PROMPTS", 8)
    monkeypatch.setattr(steps, "ROUNDS", 2)
    monkeypatch.setattr(steps, "TIMED_PARAMETERS", 1)  # two of the five layers
    model = write_llama(tmp_path / "model", early=False, layers=5)
    before = {file.name: file.stat().st_mtime_ns for file in model.iterdir()}
    assert main(["probe", str(model)]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines[1:])) <= 125
    assert lines[1].startswith("Exits ")
    assert "A drafter" in lines[1]
    (header,) = [line for line in lines if "weights" in line and "RAM" in line]
    for column in ("full, tokens/s", "exit", "lossless, exits", "lossless, drafter", "RAM", "disk"):
        assert column in header
    for weights in ("float32", "bfloat16", "int4"):
        assert [line for line in lines if line.strip().startswith(weights)], weights
    assert "changed tokens if all exit after     4\n" in text
    assert "calibrate " in text
    assert "draft " in text
    assert "export " in text
    assert "the model has no chat template" in text
    assert "steps of the first 2 layers" in text
    assert {file.name: file.stat().st_mtime_ns for file in model.iterdir()} == before


@pytest.mark.slow
def test_json_has_the_numbers(early_model, nothing_left, monkeypatch, capsys):
    monkeypatch.setattr(answers, "PROMPTS", 8)
    monkeypatch.setattr(steps, "ROUNDS", 2)
    assert main(["probe", str(early_model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction"] is True
    assert found["layers"] == found["timed_layers"] == 8
    assert found["changed"] == pytest.approx([0.0], abs=0.02)
    assert [mode["weights"] for mode in found["modes"]] == ["fp32", "bf16", "int4"]
    for mode in found["modes"]:
        for name in ("tokens_per_second", "lossless", "drafter"):
            assert 0 < mode[name]["low"] <= mode[name]["expected"] <= mode[name]["high"], name
        assert mode["memory"] > mode["disk"] > 0
        assert len(mode["verify_costs"]) == 5
    # fp32 stores 4 bytes of a weight, bf16 half of it.
    wide, half, int4 = (mode["disk"] for mode in found["modes"])
    assert wide > 1.3 * half
    assert half > int4
    assert found["minutes"]["calibrate"] > 0


def test_a_chat_template_is_used(random_model, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "PROMPTS", 4)
    source, tokenizer = load_model(random_model), load_tokenizer(random_model)
    plain = answers.sample(source, tokenizer, 0.8)
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m.content }}\nA:{% endfor %}"
    chat = answers.sample(source, tokenizer, 0.8)
    assert (plain.chat, chat.chat) == (False, True)
    assert tokenizer.decode(chat.prompts[0]).startswith("Q: ")
    tokenizer.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(Exception, match="the chat template refuses the prompt"):
        answers.sample(source, tokenizer, 0.8)


def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(random_model, monkeypatch, capsys):
    monkeypatch.setattr(memory, "memory_left", lambda: 10**8)
    monkeypatch.setattr("tide_export.probing.flow.load_model", None)
    message = refused(capsys, "probe", random_model)
    assert "needs about" in message
    assert "100.0 MB are free" in message
    assert "--device-map auto" in message


def test_the_memory_that_is_needed_is_counted_without_the_weights(random_model):
    counted = memory.check_memory(str(random_model), False)
    assert counted == load_model(random_model).model.num_parameters()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path, "the folder does not exist"),
        (lambda path: path.mkdir() or path, "it is not a Hugging Face model"),
        (lambda path: path.with_suffix(".gguf"), "no GGUF file at"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, capsys, make, says):
    assert says in refused(capsys, "probe", make(tmp_path / "model"))


def test_a_gguf_file_of_an_unknown_type_is_refused(tmp_path, capsys):
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(file), "abacus")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert f"GGUF file '{file}' cannot be read" in refused(capsys, "probe", file)


def test_a_model_without_tokenizer_is_refused(random_model, tmp_path, capsys):
    folder = Path(shutil.copytree(random_model, tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    assert "tokenizer" in refused(capsys, "probe", folder)


def test_a_model_that_answers_nothing_is_refused(random_model, monkeypatch):
    monkeypatch.setattr(answers, "sample_answers", lambda source, prompts, *rest: [[0] for _ in prompts])
    with pytest.raises(ProbeError, match="answers 32 prompts with 32 tokens, too few"):
        answers.sample(load_model(random_model), load_tokenizer(random_model), 0.8)


def test_a_model_whose_first_layers_do_not_run_alone_is_refused():
    source = load_model(DEMO)
    source.text_config.layer_types = ["full_attention"] * source.num_layers
    assert steps.first_layers(source, 3).num_layers == 3
    other = load_model(DEMO)
    other.model.model.forward = lambda *args, **options: other.model.model.layers[11]  # reads a layer that is gone
    with pytest.raises(ProbeError, match="does not run with its first 3 layers alone"):
        steps.first_layers(other, 3)


def test_probe_is_in_python_too(random_model, monkeypatch):
    import tide_export

    assert tide_export.probe is probe
