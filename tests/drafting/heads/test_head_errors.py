"""Heads that cannot be read, or are not for the model, are refused in one sentence before the model is traced."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from random_heads import DEPTH, VOCABULARY, WIDTH, Eagle3, prompt, target

from tide_export.cli.main import main
from tide_export.drafting.heads.eagle3 import read_eagle3
from tide_export.errors import ConfigError, DraftError
from tide_export.model.source import SourceModel, load_model
from tide_export.pipeline import pieces
from tide_export.pipeline.request import ExportRequest
from tide_export.routers.random_routers import random_routers


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    return load_model(str(target(tmp_path_factory.mktemp("models") / "target")))


def config(**fields: object) -> Callable[[Eagle3], None]:
    return lambda head: head.config.update(fields)


def weight(key: str, value: torch.Tensor | None) -> Callable[[Eagle3], None]:
    def change(head: Eagle3) -> None:
        head.weights.pop(key, None)
        if value is not None:
            head.weights[key] = value

    return change


REFUSED = {
    "no fc": (weight("fc.weight", None), r"must have a weight fc.weight of \[64, 192\], and has none"),
    "an fc of two states": (weight("fc.weight", torch.ones(WIDTH, 2 * WIDTH)), r"and has one of \[64, 128\]"),
    "an fc bias": (weight("fc.bias", torch.ones(WIDTH)), "has an unknown weight fc.bias: it is no EAGLE-3 head of a"),
    "no norm": (weight("norm.weight", None), "has no weight norm.weight"),
    "a second layer": (weight("layers.1.mlp.up_proj.weight", torch.ones(4, 4)), "an unknown weight layers.1.mlp"),
    "two layers": (config(num_hidden_layers=2), "has 2 layers, and only heads of one are read"),
    "another width": (config(hidden_size=128), "is not for this model: its hidden size is 128, the model's 64"),
    "another target's width": (config(target_hidden_size=32), "is not for this model: its hidden size"),
    "another vocabulary": (config(vocab_size=99), "its vocabulary has 99 tokens, the model's 97"),
    "another vocabulary, told apart": (config(target_vocab_size=98), "its vocabulary has 98 tokens, the model's 97"),
    "other heads": (config(num_attention_heads=2), r"weight midlayer.self_attn.\w_proj.weight is \[.*as its config"),
    "quantized by an unknown method": (
        config(quantization_config={"quant_method": "modelopt"}),
        "is quantized with modelopt, which cannot be read: give it as it was before",
    ),
    "damaged integers": (
        config(quantization_config={"quant_method": "gptq", "bits": 4}, hidden_size=64),
        "weight midlayer.self_attn.q_proj has a qweight but no qzeros",
    ),
    "a norm that its config does not know": (
        weight("input_norm.weight", torch.ones(3 * WIDTH)),
        "must have a weight input_norm.weight of .192. where its config.json says norm_before_fc, and only there",
    ),
    "one state": (config(eagle_config={"use_aux_hidden_state": False}), "reads one hidden state of the model, not"),
    "layers that are not there": (
        config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, DEPTH]}),
        "reads hidden states after layers 1, 4, 8, and the model has 7",
    ),
    "layers that are no numbers": (
        config(eagle_config={"eagle_aux_hidden_state_layer_ids": ["a"]}),
        "has no usable eagle_aux_hidden_state_layer_ids",
    ),
    "an activation that is not there": (config(hidden_act="abacus"), "config.json of draft head '.*' cannot be used"),
    "tokens that are not there": (
        weight("d2t", torch.full((40,), VOCABULARY)),
        "proposes tokens that the model does not have: d2t is not for it",
    ),
    "a token twice": (weight("d2t", -torch.arange(40)), "has several rows for one token: its d2t is damaged"),
    "no output head": (
        weight("lm_head.weight", None),
        "must have a weight lm_head.weight, and a number of d2t",
    ),
    "d2t of another length": (
        weight("d2t", torch.zeros(39, dtype=torch.long)),
        "a number of d2t for each row",
    ),
    "NaN": (weight("norm.weight", torch.full((WIDTH,), torch.nan)), "weight norm.weight holds NaN or infinity"),
    "NaN before its layer": (
        weight("fc.weight", torch.full((WIDTH, 3 * WIDTH), torch.nan)),
        "weight fc.weight holds NaN",
    ),
    "an embedding of its own": (
        weight("embed_tokens.weight", torch.ones(VOCABULARY, WIDTH)),
        "has an embedding of its own, which is not the model's: such heads are not read",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_layouts_and_other_models_heads_are_refused(case: str, source: SourceModel, tmp_path: Path) -> None:
    change, says = REFUSED[case]
    head = Eagle3.random()
    change(head)
    if case == "damaged integers":
        head.weights["midlayer.self_attn.q_proj.qweight"] = head.weights.pop("midlayer.self_attn.q_proj.weight").int()
    folder = head.write(tmp_path / "head")
    with pytest.raises(DraftError, match=says) as refused:
        read_eagle3(str(folder), source)
    assert repr(str(folder)) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_folders_that_hold_no_head_are_refused(source: SourceModel, tmp_path: Path) -> None:
    with pytest.raises(DraftError, match=r"no draft head '.*/missing': no such folder, and the hub does not have it"):
        read_eagle3(str(tmp_path / "missing"), source)
    folder = Eagle3.random().write(tmp_path / "head")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DraftError, match=r"the weights of draft head '.*/head' cannot be read"):
        read_eagle3(str(folder), source)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DraftError, match=r"has no weights: neither \*.safetensors nor \*.bin"):
        read_eagle3(str(folder), source)
    (folder / "config.json").write_text("{")
    with pytest.raises(DraftError, match=r"the config.json of draft head '.*/head' cannot be read"):
        read_eagle3(str(folder), source)


def test_export_refuses_a_head_before_it_traces(
    source: SourceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pieces, "trace", lambda *args, **options: pytest.fail("it traces"))
    routers = tmp_path / "routers.safetensors"
    random_routers(source, (3,), prompt(VOCABULARY, 40), bottleneck=16).save(routers)
    head = Eagle3.random()
    head.config["hidden_size"] = 32
    given = ["--routers", str(routers), "--draft-head", str(head.write(tmp_path / "head"))]
    assert main(["export", source.name, "-o", str(tmp_path / "out"), *given]) == 2
    assert "is not for this model: its hidden size is 32, the model's 64" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_has_no_hidden_states_is_refused_at_once(source: SourceModel, tmp_path: Path) -> None:
    head = str(Eagle3.random().write(tmp_path / "head"))
    with pytest.raises(ConfigError, match="a published head as draft_head is for target onnxruntime alone"):
        ExportRequest(source.name, "out", draft_head=head, targets=("tensorrt",), engines=False)
    own = ExportRequest(source.name, "out", draft_head=f"{source.name}/", targets=("tensorrt",), engines=False)
    assert own.reads_own_head
