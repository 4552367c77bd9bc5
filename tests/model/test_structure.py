"""Parts that cannot be found by watching: an adapter tells them, and is not believed blindly."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf
from families import build
from tiny_configs import CONTEXT, SIZES
from tiny_engines import engine_of
from transformers.modeling_outputs import CausalLMOutput

import tide_export
from tide_export.errors import UnsupportedModelError
from tide_export.model.source import SourceModel, wrap_model
from tide_export.routers.random_routers import random_routers
from tide_export.verify.parity import check_exit, check_full

NAME = "LoudForCausalLM"
MLLAMA = tf.MllamaConfig(
    text_config={**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 3, "cross_attention_layers": [1]},
    vision_config={
        **{"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2},
        **{"intermediate_size": 32, "vision_output_dim": 64, "image_size": 28, "patch_size": 14},
        "intermediate_layers_indices": [0],
    },
    image_token_index=3,
)
PROMPT = [(i * 37) % 500 + 3 for i in range(12)]


@pytest.fixture(scope="module")
def example() -> dict:
    """What the example of docs/guide/your-own-model.md defines, run as it stands there."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "your-own-model.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict = {"__name__": __name__}
    exec(code, scope)
    tide_export.register_adapter(NAME, None)
    return scope


@pytest.fixture
def adapter(example: dict) -> Iterator[dict]:
    tide_export.register_adapter(NAME, example["loud_structure"])
    yield example
    tide_export.register_adapter(NAME, None)


def loud(example: dict) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.LlamaConfig(**{**SIZES, "num_hidden_layers": 2})
    model = example[NAME]._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def test_without_the_adapter_the_model_is_refused(example: dict) -> None:
    with pytest.raises(UnsupportedModelError, match=r"outside any module.*register_adapter"):
        wrap_model(loud(example), "loud")


def test_layers_and_head_in_one_module_are_refused() -> None:
    class Flat(tf.PreTrainedModel):
        def __init__(self, config: tf.LlamaConfig):
            super().__init__(config)
            self.embedding, self.head = torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embedding

        def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
            hidden = self.embedding(input_ids)
            for layer in self.layers:
                hidden = layer(hidden)
            return CausalLMOutput(logits=self.head(hidden))

    with pytest.raises(UnsupportedModelError, match="Flat has its layers and its head in one module"):
        wrap_model(Flat(tf.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=16)), "flat")


def test_with_the_adapter_of_the_documentation_it_exports(adapter: dict, tmp_path: Path) -> None:
    source: SourceModel = wrap_model(loud(adapter), "loud")
    assert len(source.structure.final_modules) == 2
    routers = random_routers(source, (1,), PROMPT * 3, bottleneck=8)
    engine = engine_of(source, routers, tmp_path / "bundle")
    full = check_full(engine, source, [PROMPT], 12)
    exits = check_exit(engine, source, routers, [PROMPT], 24, [0.5])
    assert full.holds, full.differences
    assert exits.holds, exits.differences
    assert set(exits.exits) == {1, 2}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            lambda right: replace(right, final_modules=right.final_modules[:1]),
            "final modules that do not lead from its",
        ),
        (lambda right: replace(right, layers=torch.nn.ModuleList([torch.nn.Identity()])), "1 layers that ran 0 times"),
        (lambda right: replace(right, backbone=torch.nn.Identity()), "its Identity gives no last_hidden_state"),
    ],
)
def test_an_adapter_that_is_wrong_is_refused(example: dict, wrong, says: str) -> None:
    tide_export.register_adapter(NAME, lambda model: wrong(example["loud_structure"](model)))
    try:
        with pytest.raises(UnsupportedModelError, match=says):
            wrap_model(loud(example), "loud")
    finally:
        tide_export.register_adapter(NAME, None)


def test_the_head_takes_more_tokens_than_the_context_holds() -> None:
    source = build("bert")
    states = torch.randn(2, CONTEXT, 64)
    logits = source.head(states.flatten(0, 1)[None])
    torch.testing.assert_close(logits[0].unflatten(0, (2, CONTEXT)), source.head(states))


def test_an_adapter_serves_subclasses(adapter: dict) -> None:
    class Louder(adapter[NAME]):  # type: ignore[misc, name-defined]
        pass

    assert len(wrap_model(loud({NAME: Louder}), "louder").structure.final_modules) == 2


@pytest.mark.parametrize(("family", "axis"), [("gemma3n (text)", 0), ("hy_v4", 2)])
def test_several_hidden_states_of_a_token_are_one_row(family: str, axis: int) -> None:
    source = build(family)
    structure, ids = source.structure, torch.tensor([PROMPT])
    assert structure.stream_axis == axis
    assert structure.streams is not None
    with torch.no_grad(), structure.captured([source.num_layers]) as raw:
        states = structure.backbone(input_ids=ids, use_cache=False)[0]
    last = raw[source.num_layers]
    assert last.shape == (*ids.shape, source.hidden_size)
    assert torch.allclose(structure.normalize(last), states, atol=1e-5)
    assert torch.equal(structure.by_token(structure.by_stream(last)), last)


def test_a_module_after_the_last_layer_is_taken_whole_and_may_narrow_the_states() -> None:
    source = build("qwen4_exp (text)")
    (mixer,) = source.structure.final_modules
    assert mixer is source.model.model.hyper_connection_mixer  # its first norm reads the same states
    assert (source.hidden_size, source.normalized_size) == (128, 64)


def test_layers_that_do_not_run_on_text_are_left_out() -> None:
    model = tf.MllamaForConditionalGeneration(MLLAMA)
    source = wrap_model(model.eval(), "mllama")
    assert source.num_layers == source.text_config.num_hidden_layers - 1
    assert [layer.layer_idx for layer in source.structure.layers] == [0, 2]
