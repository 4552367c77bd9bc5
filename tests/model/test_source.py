"""Loading: any architecture's parts are found, and what cannot be used is one sentence that says why."""

import copy
import itertools
import json

import pytest
import tiers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, RwkvConfig, RwkvForCausalLM

from tide_export.errors import ConfigError, ModelError, UnsupportedModelError
from tide_export.model.source import load_model, wrap_model

LLAMA_LIKE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GEMMA_LIKE = LLAMA_LIKE | {"head_dim": 8}
ARCHITECTURES = {
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE | {"head_dim": 8},
    "mistral": LLAMA_LIKE | {"sliding_window": 4},
    "gemma": GEMMA_LIKE,
    "gemma2": GEMMA_LIKE | {"sliding_window": 4, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": GEMMA_LIKE | {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "gpt_neox": {key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"},
    "opt": {
        "vocab_size": 61,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 16,
    },
    "phi": LLAMA_LIKE,
    "cohere": LLAMA_LIKE | {"logit_scale": 0.25},
    "granite": LLAMA_LIKE | {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
}
IDS = torch.tensor([[5, 9, 2, 44, 17, 60, 3, 3, 21, 8], [7, 6, 5, 4, 3, 2, 1, 8, 9, 10]])


def tiny(kind, seed=0):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **ARCHITECTURES[kind])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, 1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():  # norms that are all ones would hide one applied twice or not at all
        parameter.data += 0.1 * torch.randn_like(parameter)
    return wrap_model(model, f"tiny-{kind}")


@pytest.fixture(params=ARCHITECTURES)
def source(request):
    return tiny(request.param)


def test_head_of_the_normed_last_state_is_the_model(source):
    states = source.run(IDS, [source.num_layers])
    normalized = source.normalize(states.raw[source.num_layers])
    assert normalized.shape == (*IDS.shape, source.normalized_size)
    assert torch.allclose(source.head(normalized), states.logits, atol=1e-5)
    assert source.head(normalized).shape == (*IDS.shape, source.vocab_size)


def test_the_heads_rows_are_its_logits_up_to_what_the_model_does_to_all_of_them(source):
    """Scaling and soft capping keep the order, so a shortlist of rows can stand for the head."""
    rows = source.head_rows()
    assert (rows.shape, rows.dtype) == ((61, source.normalized_size), torch.float32)
    assert not rows.requires_grad
    normalized = source.normalize(source.run(IDS, [2]).raw[2])
    products, logits = (normalized @ rows.T).flatten(0, 1), source.head(normalized).flatten(0, 1)
    bias = getattr(source.model.get_output_embeddings(), "bias", None)
    if bias is None:
        assert torch.equal(products.argsort(dim=-1, stable=True)[:, -3:], logits.argsort(dim=-1, stable=True)[:, -3:])
    else:
        assert torch.allclose(products + bias, logits, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_heads_rows_are_the_embedding_where_they_are_tied(tied):
    torch.manual_seed(0)
    source = wrap_model(LlamaForCausalLM(LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=tied)), "tiny")
    assert torch.equal(source.head_rows(), source.model.lm_head.weight)
    assert torch.equal(source.head_rows(), source.model.model.embed_tokens.weight) is tied


def test_a_head_that_is_no_matrix_has_no_rows():
    source = tiny("llama")
    source.model.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 61))
    assert source.head_rows() is None
    source.model.lm_head = torch.nn.Linear(32, 60)
    assert source.head_rows() is None


def test_raw_states_are_the_residual_stream(source):
    """They equal Hugging Face's own record (whose last entry alone is behind the final norm)."""
    with torch.no_grad():
        expected = source.model(input_ids=IDS, output_hidden_states=True).hidden_states
    found = source.run(IDS, [1, 2, 3]).raw
    for layers in (1, 2, 3):
        assert torch.allclose(found[layers], expected[layers], atol=1e-6)


def test_early_heads_differ_from_the_full_model(source):
    """Otherwise the comparison above could not fail."""
    states = source.run(IDS, [2])
    assert (source.head(source.normalize(states.raw[2])) - states.logits).abs().max() > 1e-3


def test_raw_states_without_logits_are_the_same(source):
    layers = [1, 3, source.num_layers]
    expected = source.run(IDS, layers).raw
    found = source.raw_hidden(IDS, layers)
    assert list(found) == layers
    assert all(torch.equal(found[count], expected[count]) for count in layers)
    assert source.run(IDS, []).logits.shape[1] == IDS.shape[1]  # and no hook stays behind


def test_padding_on_the_right_changes_nothing(source):
    mask = torch.ones_like(IDS)
    mask[0, 6:] = 0
    padded = source.raw_hidden(IDS * mask, [2, source.num_layers], mask)
    alone = source.raw_hidden(IDS[:1, :6], [2, source.num_layers])
    for layers in (2, source.num_layers):
        assert torch.allclose(padded[layers][0, :6], alone[layers][0], atol=1e-5)
        assert torch.isfinite(padded[layers][mask.bool()]).all()


def test_identity():
    assert tiny("llama").weights_sha256 == tiny("llama").weights_sha256
    assert tiny("llama").weights_sha256 != tiny("llama", seed=1).weights_sha256
    assert tiny("llama").context_length == 64
    assert tiny("llama").eos_token_ids == (1,)


def test_every_end_of_sequence_id_counts():
    source = tiny("llama")
    source.model.generation_config.eos_token_id = [7, 3]
    assert source.eos_token_ids == (1, 3, 7)


def test_layers_that_cannot_be_found():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA_LIKE | {"num_hidden_layers": 1}))
    model.config.num_hidden_layers = 5
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no list of 5 decoder layers"):
        wrap_model(model, "tiny")


def test_a_model_without_layers():
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .* 0 decoder layers"):
        wrap_model(LlamaForCausalLM(LlamaConfig(**LLAMA_LIKE | {"num_hidden_layers": 0})), "tiny")


def test_work_between_norm_and_head_outside_any_module():
    model = LlamaForCausalLM(LlamaConfig(**LLAMA_LIKE))
    backbone_forward = model.model.forward

    def doubled(*args, **kwargs):
        output = backbone_forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    model.model.forward = doubled
    with pytest.raises(UnsupportedModelError, match="outside any module"):
        wrap_model(model, "tiny")


@pytest.fixture
def folder(tmp_path):
    tiny("llama").model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_folder_loads(folder):
    source = load_model(folder)
    assert (source.num_layers, source.hidden_size, source.vocab_size) == (4, 32, 61)
    assert source.architecture == "LlamaForCausalLM"
    assert next(source.model.parameters()).dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in source.model.parameters())
    assert source.weights_sha256 == tiny("llama").weights_sha256


def on_disk(*names):
    """The tiny Llama on the CPU, but for the modules whose names start with one of `names`."""
    modules = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"]
    modules += [f"model.layers.{n}" for n in range(4)]
    return {module: "disk" if module.startswith(names) else "cpu" for module in modules}


OFFLOADS = {
    "some layers": on_disk("model.layers.1", "model.layers.3"),
    "all layers and the norm": on_disk("model.layers", "model.norm"),
    "embedding and head": on_disk("model.embed_tokens", "lm_head"),
    "all": {"": "disk"},
    "the backbone whole": {"model": "disk", "lm_head": "disk"},
}


@pytest.mark.parametrize(
    ("placement", "tied"),
    tiers.exhaustive_but(
        [("some layers", False), ("all layers and the norm", True), ("embedding and head", True), ("all", False)],
        itertools.product(OFFLOADS, [False, True]),
    ),
)
def test_offloaded_weights_change_nothing(tmp_path, placement, tied):
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=tied)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    plain = load_model(tmp_path / "model")
    source = load_model(tmp_path / "model", device_map=OFFLOADS[placement], offload_folder=tmp_path / "offload")
    assert any(parameter.is_meta for parameter in source.model.parameters())
    assert source.weights_sha256 == plain.weights_sha256
    assert source.device == torch.device("cpu")
    assert source.normalized_size == 32
    assert torch.equal(source.head_rows(), plain.head_rows())

    mask = torch.ones_like(IDS)
    mask[0, 6:] = 0
    layers = [1, 2, 4]
    expected, found = (s.raw_hidden(IDS, layers, mask, keep=lambda state: state[:, 2:6]) for s in (plain, source))
    assert found[1].shape == (2, 4, 32)
    assert all(torch.equal(found[count], expected[count]) for count in layers)
    states = source.run(IDS, layers)
    assert torch.equal(states.logits, plain.run(IDS, layers).logits)
    for count in layers:
        normalized = source.normalize(states.raw[count])
        assert torch.equal(normalized, plain.normalize(states.raw[count]))
        assert torch.equal(source.head(normalized), plain.head(normalized))
    assert torch.equal(source.run(IDS, layers).logits, states.logits)  # the head left the backbone as it was
    assert any(parameter.is_meta for parameter in source.model.parameters())


def test_offloaded_weight_that_is_no_number(folder):
    edit_weights(folder, lambda weights: weights["model.layers.2.mlp.up_proj.weight"][3, 4].fill_(float("nan")))
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight holds NaN or infinity"):
        load_model(folder, device_map=on_disk("model.layers.2"))


def test_offloaded_weight_that_is_missing(folder):
    edit_weights(folder, lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"no usable weight for model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(folder, device_map=on_disk("model.layers.2"))


def test_automatic_placement_of_a_model_that_fits(folder):
    source = load_model(folder, device_map="auto")
    assert source.weights_sha256 == load_model(folder).weights_sha256
    assert not any(parameter.is_meta for parameter in source.model.parameters())


def test_device_map_with_an_unknown_device(folder):
    with pytest.raises(ModelError, match="cannot load the weights") as caught:
        load_model(folder, device_map={"": "attic"})
    assert "\n" not in str(caught.value)


def test_device_and_device_map(folder):
    with pytest.raises(ConfigError, match="device 'cuda' and a device_map: give one of them"):
        load_model(folder, device="cuda", device_map="auto")


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_no_number(folder, value):
    edit_weights(folder, lambda weights: weights["model.layers.2.mlp.up_proj.weight"][3, 4].fill_(value))
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.up_proj\.weight holds NaN or infinity"):
        load_model(folder)


def test_missing_weight(folder):
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"no usable weight for model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_weight_of_another_shape(folder):
    edit_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(33)}))
    with pytest.raises(ModelError, match=r"no usable weight for model\.norm\.weight:"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 1000, -1])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="cannot load the weights") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot load the weights"):
        load_model(folder)


@pytest.mark.parametrize("name", ["./none", "/no/such/model", "a/b/c"])
def test_unknown_path(name):
    with pytest.raises(ModelError, match="the folder does not exist"):
        load_model(name)


def test_file_instead_of_a_folder(folder):
    with pytest.raises(ModelError, match="is a file"):
        load_model(folder / "config.json")


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", ["{ broken", "[]", "{}", '{"model_type": "no_such_thing"}'])
def test_unusable_config(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_architecture_without_a_causal_lm(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "num_layers": 2}))
    with pytest.raises(ModelError, match=r"T5|t5"):
        load_model(folder)


def test_release_frees_the_weights_and_the_model_no_longer_runs():
    source = tiny("llama")
    weight = source.model.lm_head.weight
    source.release()
    assert weight.numel() == 0
    with pytest.raises(ModelError, match="was released"):
        source.run(IDS, [1])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_hidden_layers", 2**40, "asks for 1099511627776 in num_hidden_layers: at most 10000 are read"),
        ("hidden_size", 2**40, "far more parameters than its [0-9]+ bytes of weights"),
        ("intermediate_size", 2**30, "far more parameters than its [0-9]+ bytes of weights"),
        ("vocab_size", 2**40, "far more parameters than its [0-9]+ bytes of weights"),
        ("hidden_size", "wide", "cannot be read: .*hidden_size"),
        ("use_cache", [], "cannot be read: .*use_cache"),
        ("rope_parameters", 7, "cannot be read"),
        ("dtype", "x", "cannot be read"),
    ],
)
def test_config_with_absurd_values(folder, field, value, says):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelError, match=says) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_config_nested_without_end(folder):
    (folder / "config.json").write_text('{"model_type": ' + "[" * 100_000)
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(folder)


@torch.no_grad()
def test_rwkv_is_read_without_what_it_does_for_float16(tmp_path) -> None:
    """It divides weights when it first runs, so what is saved afterwards is wrong, and halves hidden states."""
    model = RwkvForCausalLM(RwkvConfig(vocab_size=61, hidden_size=32, num_hidden_layers=4, rescale_every=2)).eval()
    model.save_pretrained(tmp_path / "model")
    weight = model.rwkv.blocks[3].attention.output.weight.clone()
    expected = model(IDS, use_cache=False).logits
    torch.testing.assert_close(model.rwkv.blocks[3].attention.output.weight, weight / 2)
    sources = load_model(str(tmp_path / "model")), wrap_model(model, "rescaled")
    for source in sources:
        assert torch.equal(source.model.rwkv.blocks[3].attention.output.weight, weight)
        assert torch.equal(source.model(IDS, use_cache=False).logits, expected)
    assert sources[0].weights_sha256 == sources[1].weights_sha256
    again = wrap_model(copy.deepcopy(sources[0].model), "again")
    assert torch.equal(again.model(IDS, use_cache=False).logits, expected)
