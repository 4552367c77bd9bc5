"""The reference is eager attention, or the default of an architecture that computes attention itself."""

from pathlib import Path

import pytest
import torch
import transformers as tf
from families import FAMILIES, build

from tide_export.model.attention import reference_attention
from tide_export.model.source import load_model


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "eager"), ("gpt2", "eager"), ("gptj", None), ("bloom", None), ("falcon", None)]
)
def test_the_default_is_taken_where_the_interface_is_not_used(family: str, attention: str | None) -> None:
    assert reference_attention(FAMILIES[family].config()) == attention


def test_falcon_with_alibi_is_loaded_as_its_users_run_it(tmp_path: Path) -> None:
    build("falcon (ALiBi)").model.save_pretrained(tmp_path)
    ids = torch.arange(3, 30)[None]
    found = load_model(tmp_path).run(ids, []).logits
    logits = {
        attention: tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()(ids).logits
        for attention in (None, "eager")
    }
    assert torch.equal(found, logits[None])
    # If this fails, transformers has fixed its eager Falcon, which added ALiBi twice.
    assert not torch.allclose(found, logits["eager"], atol=1e-3)


@pytest.mark.parametrize(("family", "length"), [("mpt", 256), ("falcon", 256), ("bloom", None)])
def test_the_context_is_what_the_config_bounds_it_to(family: str, length: int | None) -> None:
    assert build(family).context_length == length
