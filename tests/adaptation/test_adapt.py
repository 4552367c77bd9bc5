"""Early-exit training on a tiny model: what it learns and keeps, what it writes, how it goes on after a kill."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiers
import torch
from tiny_configs import small_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tide_export.adaptation import flow, training
from tide_export.adaptation.config import AdaptConfig
from tide_export.adaptation.flow import _read, adapt
from tide_export.adaptation.output import check_space
from tide_export.adaptation.snapshot import Snapshot
from tide_export.calibration.config import TideConfig
from tide_export.calibration.distributed import Processes
from tide_export.common.changed_tokens import changed_tokens
from tide_export.data.documents import Documents
from tide_export.data.sequences import load_tokenizer
from tide_export.errors import AdaptError, ConfigError, TideError
from tide_export.model.source import load_model
from tide_export.pipeline.flow import export
from tide_export.runtime.engine import load

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LAYERS = 4
STEPS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A random Llama whose layers matter, in bfloat16, with the demo model's tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = small_llama(4096, 32, LAYERS, 64)
        config.initializer_range = 0.3
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder / name)
    # As Llama 2's: a temperature that greedy generation ignores, which transformers refuses in a config of its own.
    generation = json.loads((demo_model / "generation_config.json").read_text()) | {
        "temperature": 0.9,
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    lines = (ROOT / "calibration" / "text" / "python-stdlib.jsonl").read_text().splitlines()[:8]
    rows = [{"text": json.loads(line)["text"][:1500]} for line in lines]
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def config(text: str, **options) -> AdaptConfig:
    given = {"tokens": STEPS * 4 * 32, "length": 32, "checkpoints": (1, 2), "held_out_tokens": 128, "save_minutes": 0.0}
    return AdaptConfig(dataset=text, **{**given, "precision": "fp32", "original_weight": 2.0, **options})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int) -> list[tuple[int, bool]]:
    """Interrupts a training where it begins its step `at`, counted from 1; of every step its index and `bf16`."""
    original, steps = training.Trainer._step, list[tuple[int, bool]]()

    def step(trainer: training.Trainer) -> str:
        steps.append((trainer.step, trainer.bf16))
        if len(steps) == at:
            raise KeyboardInterrupt
        return original(trainer)

    monkeypatch.setattr(training.Trainer, "_step", step)
    return steps


@pytest.fixture(scope="module")
def trained(model: Path, text: str, tmp_path_factory: pytest.TempPathFactory):
    output = tmp_path_factory.mktemp("trained") / "model"
    report = adapt(str(model), output, config(text, layer_dropout=0.1, micro_batch=3))
    assert report is not None
    return report, output


def test_early_layers_learn_and_full_depth_stays(demo_model: Path, tmp_path: Path) -> None:
    text = str(ROOT / "calibration" / "text" / "python-stdlib.jsonl")
    steps, length, measured, gains = tiers.sized((15, 32, 256, (0.0, 0.1)), (25, 64, 512, (0.03, 0.03)))
    given = {"tokens": steps * 4 * length, "length": length, "held_out_tokens": measured}
    report = adapt(str(demo_model), tmp_path / "out", config(text, **given, save_minutes=5.0))
    assert report is not None
    for before, after, gain in zip(report.before.changed, report.after.changed, gains, strict=False):
        assert after < before - gain
    assert report.greedy_change.changed < 0.25
    assert report.after.perplexity < 1.2 * report.before.perplexity


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_what_full_depth_changed_is_measured_against_the_original(
    model: Path, text: str, tmp_path: Path, lora_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    measure = flow.measure_change
    monkeypatch.setattr(flow, "measure_change", lambda *given: measured.append(given[2]) or measure(*given))
    settings = config(text, lora_rank=lora_rank, tokens=2 * 4 * 32)
    report = adapt(str(model), tmp_path / "out", settings)
    assert report is not None
    original, adapted = (load_model(str(folder)) for folder in (model, tmp_path / "out"))
    expected: dict[float, list[float]] = {0.8: [], 0.0: []}
    for batch in measured[0]:
        for ids, length in zip(batch.ids, batch.lengths.tolist(), strict=True):
            with torch.no_grad():
                full, now = (source.model(ids[None, :length]).logits[0].numpy() for source in (original, adapted))
            for temperature, values in expected.items():
                values += changed_tokens(full, now, temperature).tolist()
    for made in (report.change, report.greedy_change):
        assert made.tokens == report.after.tokens == len(expected[made.temperature])
        assert made.changed == pytest.approx(np.mean(expected[made.temperature]), abs=1e-3)
    assert 0 < report.change.changed < 1
    stored = json.loads((tmp_path / "out" / "adapt.json").read_text())
    assert stored["full_depth_change"]["changed"] == report.change.changed
    assert stored["full_depth_change_greedy"]["temperature"] == 0


def test_the_original_holds_full_depth(demo_model: Path, tmp_path: Path) -> None:
    """Its divergence is a term of the loss: more of it changes fewer tokens, and less perplexity."""
    text, changes = str(ROOT / "calibration" / "text" / "python-stdlib.jsonl"), []
    for weight in (0.0, 4.0):
        given = {"tokens": 10 * 4 * 32, "held_out_tokens": 256, "label_weight": 1.0, "original_weight": weight}
        report = adapt(str(demo_model), tmp_path / f"out{weight}", config(text, **given, save_minutes=5.0))
        assert report is not None
        changes.append(report.change)
    free, held = changes
    assert held.changed < 0.7 * free.changed
    assert held.perplexity < 0.7 * free.perplexity


def test_the_output_is_a_plain_model(trained, model: Path) -> None:
    report, output = trained
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, output))
    assert after == before
    assert weights(output).keys() == weights(model).keys()
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"
    before, after = (json.loads((folder / "generation_config.json").read_text()) for folder in (model, output))
    assert after == before
    assert json.loads((output / "adapt.json").read_text()) == json.loads(json.dumps(report.as_dict()))
    assert (output / "adapt.png").stat().st_size > 1000
    assert {file.stat().st_mode & 0o777 for file in output.iterdir()} == {
        (output / "config.json").stat().st_mode & 0o777
    }
    assert [entry.name for entry in output.parent.iterdir()] == ["model"]  # the snapshot is gone
    assert "changed tokens if all exit after 2 layers, greedy" in report.render()
    assert "full depth against the original, temperature 0.8: change of perplexity" in report.render()


def test_measured_on_text_of_its_own(model: Path, text: str, tmp_path: Path) -> None:
    rows = [json.dumps({"text": "def f(x):\n    return x\n" * 40})] * 2
    (tmp_path / "other.jsonl").write_text("\n".join(rows))
    settings = config(text, tokens=2 * 4 * 32, held_out=str(tmp_path / "other.jsonl"), held_out_tokens=64)
    report = adapt(str(model), tmp_path / "out", settings)
    assert report is not None
    assert report.before.tokens == 64
    assert report.settings["held_out_text"] != report.settings["text"]


def test_short_documents_are_read_until_there_are_enough_tokens(model: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"x = {number}\n"}) for number in range(2000)]
    (tmp_path / "short.jsonl").write_text("\n".join(rows))
    settings = config(str(tmp_path / "short.jsonl"), tokens=1500, held_out_tokens=128)
    source, tokenizer = load_model(str(model)), load_tokenizer(str(model))
    texts, held_out = _read(Documents(settings.dataset), None, source, tokenizer, settings)
    read, measured = (sum(len(one.ids) for one in part) for part in (texts, held_out))
    assert max(len(one.ids) for one in texts) < 10
    assert 1500 <= read < 2400
    assert 128 <= measured < 138


@pytest.mark.parametrize("fast", [torch.bfloat16, None])
def test_automatic_precision_stays_what_it_was(
    fast, model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = interrupted(monkeypatch, 2)
    monkeypatch.setattr(training, "fast_dtype", lambda device: fast)
    settings = config(text, tokens=4 * 4 * 32, precision="auto")
    with pytest.raises(KeyboardInterrupt):
        adapt(str(model), tmp_path / "out", settings)
    monkeypatch.setattr(training, "fast_dtype", lambda device: None if fast else torch.bfloat16)
    assert adapt(str(model), tmp_path / "out", settings) is not None
    assert [bf16 for _, bf16 in steps] == [fast is torch.bfloat16] * 5


@pytest.mark.exhaustive  # docs/guide/looped-and-trained.md calibrates such an output in make test
def test_the_output_exports(trained, text: str, tmp_path: Path) -> None:
    settings = {"checkpoints": (1, 2), "min_layers": 1, "calibration_samples": 12, "calibration_length": 32}
    given = TideConfig(**settings, calibration_dataset=text, router_epochs=1, router_bottleneck_dim=8)
    made = export(str(trained[1]), tmp_path / "bundle", config=given, report=False, validate=False, max_length=64)
    assert load(made).generate([5, 6, 7], max_new_tokens=4).tokens


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(
    trained, model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = interrupted(monkeypatch, 6)
    settings = config(text, layer_dropout=0.1, micro_batch=3)
    with pytest.raises(KeyboardInterrupt):
        adapt(str(model), tmp_path / "out", settings)
    assert [entry.name for entry in tmp_path.iterdir()] == [".out.adapt"]
    with pytest.raises(AdaptError, match=r"training with seed 0, not 7: give the same settings"):
        adapt(str(model), tmp_path / "out", settings.model_copy(update={"seed": 7}))
    report = adapt(str(model), tmp_path / "out", settings)
    assert [step for step, _ in steps[:7]] == [0, 1, 2, 3, 4, 5, 5]
    assert report is not None
    assert report.before == trained[0].before
    expected, found = weights(trained[1]), weights(tmp_path / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert any(not torch.equal(found[name], before) for name, before in weights(model).items())


def test_lora_is_merged(model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tide_export.adaptation.lora import Lora

    merge, seen = Lora.merge, {}
    ids = torch.arange(8)[None]

    def compared(lora):
        inner = lora._model.base_model.model
        with torch.no_grad(), lora.original():
            seen["original"] = inner(ids).logits
        with torch.no_grad():
            seen["unmerged"] = inner(ids).logits
            merge(lora)
            seen["merged"] = inner(ids).logits

    monkeypatch.setattr(Lora, "merge", compared)
    assert adapt(str(model), tmp_path / "out", config(text, lora_rank=4)) is not None
    torch.testing.assert_close(seen["merged"], seen["unmerged"], atol=1e-4, rtol=1e-4)
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(seen["original"], before(ids).logits, atol=1e-4, rtol=1e-4)
    assert (seen["merged"] - seen["original"]).abs().max() > 1e-3
    assert weights(tmp_path / "out").keys() == weights(model).keys()


def test_lora_without_peft(model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(AdaptError, match=r"needs the package peft: pip install -e '\.\[adapt\]' in the clone"):
        adapt(str(model), tmp_path / "out", config(text, lora_rank=4))


def test_two_processes_sum_to_the_gradient_of_one(
    model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients: list[list[torch.Tensor]] = []

    def stop(trainer):
        gradients.append([parameter.grad.clone() for parameter in trainer.parameters])
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "_share_gradients", stop)
    for rank, count in ((0, 1), (0, 2), (1, 2)):
        monkeypatch.setattr(training.Processes, "current", lambda rank=rank, count=count: Processes(rank, count))
        with pytest.raises(KeyboardInterrupt):
            adapt(str(model), tmp_path / "out", config(text, micro_batch=3))
    for whole, first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first + second, whole, atol=1e-5, rtol=1e-3)


class TestRefusals:
    def test_output_exists(self, model: Path, text: str, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        with pytest.raises(AdaptError, match=r"out' already exists: choose another name or delete it"):
            adapt(str(model), tmp_path / "out", config(text))

    def test_output_cannot_be_written(self, model: Path, text: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(AdaptError, match=r"cannot write to .*file: "):
            adapt(str(model), tmp_path / "file" / "out", config(text))
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]

    def test_full_disk(self, model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(
            AdaptError, match=r"no space left on the disk for the model in .*: it takes .* and 1.0 kB are"
        ):
            adapt(str(model), tmp_path / "out", config(text))
        assert list(tmp_path.iterdir()) == []

    def test_disk_fills_while_training(
        self, model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(state, file):
            Path(file).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(AdaptError, match=r"cannot save the training to .*training.pt: no space left on the disk"):
            adapt(str(model), tmp_path / "out", config(text))
        assert list(tmp_path.iterdir()) == []

    def test_the_old_snapshot_is_one_of_the_two_that_need_room(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, snapshot = load_model(str(model)), Snapshot(tmp_path / "cache", {})
        snapshot.folder.mkdir()
        parameters = source.model.num_parameters()
        usage = shutil.disk_usage(tmp_path)._replace(free=13 * parameters)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
        given = source, tmp_path / "out", snapshot, torch.bfloat16, parameters
        with pytest.raises(AdaptError, match="no space left on the disk for the snapshot to resume from"):
            check_space(*given)
        snapshot.file.write_bytes(bytes(12 * parameters))
        check_space(*given)

    def test_a_cache_in_use(self, model: Path, text: str, tmp_path: Path) -> None:
        with (
            Snapshot(tmp_path / "cache", {}).locked(),
            pytest.raises(
                AdaptError, match="cache is in use by another run: wait for its end, or give another --cache"
            ),
        ):
            adapt(str(model), tmp_path / "out", config(text), cache=tmp_path / "cache")
        assert list(tmp_path.iterdir()) == []

    def test_quantized_model(self, model: Path, text: str, tmp_path: Path) -> None:
        shutil.copytree(model, tmp_path / "gptq")
        described = json.loads((model / "config.json").read_text())
        described["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        (tmp_path / "gptq" / "config.json").write_text(json.dumps(described))
        for name, what in ((str(tmp_path / "gptq"), "GPTQ, 4 bits"), (str(tmp_path / "model.gguf"), "GGUF")):
            with pytest.raises(AdaptError, match=rf"is quantized \({what}\): train the model it was made from"):
                adapt(name, tmp_path / "out", config(text))

    def test_text_too_short(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "short.jsonl").write_text('{"text": "import os"}\n')
        with pytest.raises(AdaptError, match=r"short.jsonl' is too short: it gives 1 sequences to train on"):
            adapt(str(model), tmp_path / "out", config(str(tmp_path / "short.jsonl")))

    def test_nothing_to_measure_on(self, model: Path, text: str, tmp_path: Path) -> None:
        (tmp_path / "blank.jsonl").write_text('{"text": "a"}\n')
        with pytest.raises(AdaptError, match=r"blank.jsonl' is too short: it gives .* and 0 of other documents to"):
            adapt(str(model), tmp_path / "out", config(text, held_out=str(tmp_path / "blank.jsonl")))

    def test_missing_text_to_measure_on(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(TideError, match=r"missing\.jsonl"):
            adapt("/nowhere", tmp_path / "out", config(text, held_out=str(tmp_path / "missing.jsonl")))

    def test_loss_not_finite(self, model: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The state before is kept, and a smaller learning rate goes on from it."""
        monkeypatch.setattr(training, "learning_rate", lambda step, *_: float("nan") if step == 3 else 1e-3)
        with pytest.raises(AdaptError) as raised:
            adapt(str(model), tmp_path / "out", config(text))
        assert str(raised.value).startswith(f"the training diverged after 4 of {STEPS} steps, a loss or weight is not")
        assert str(raised.value).endswith(f"the last good snapshot is in {tmp_path}/.out.adapt/training.pt")
        monkeypatch.undo()
        assert adapt(str(model), tmp_path / "out", config(text, learning_rate=1e-4)) is not None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"checkpoints": (4,)}, r"checkpoints must lie in 1..3"),
            ({"checkpoint_interval": 9, "checkpoints": None}, "9 leaves"),
        ],
    )
    def test_no_such_checkpoint(self, model: Path, text: str, tmp_path: Path, options, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            adapt(str(model), tmp_path / "out", config(text, **options))

    def test_option_out_of_range(self) -> None:
        with pytest.raises(ConfigError, match="tokens must be greater than or equal to 1, not 0"):
            AdaptConfig.from_options(tokens=0)

    def test_damaged_state(self, model: Path, text: str, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "training.pt").write_bytes(b"PK\x03\x04 half")
        with pytest.raises(AdaptError, match=r"training.pt is damaged \(.*\): delete it to begin anew"):
            adapt(str(model), tmp_path / "out", config(text), cache=tmp_path / "cache")
