"""What a drafter reads of its model: heads with and without bias, factors and soft caps; heads of several layers."""

import pytest
import torch
from families import build

from tide_export.drafting.target import Target
from tide_export.errors import DraftError


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "granite", "cohere"])
def test_logits_are_products_with_the_head(family: str) -> None:
    source = build(family)
    target = Target.of(source)
    states = torch.randn(1, 5, source.normalized_size)
    logits = torch.nn.functional.linear(states[0], target.head, target.bias)
    torch.testing.assert_close(logits, source.head(states)[0], atol=1e-4, rtol=1e-3)
    assert target.weights_sha256 == source.weights_sha256
    table = source.model.get_input_embeddings().weight.clone()
    source.release()
    assert torch.equal(target.embeddings, table)


def test_a_soft_cap_is_left_out() -> None:
    source = build("gemma2")
    target = Target.of(source)
    torch.testing.assert_close(target.head, source.head_rows())


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_a_head_of_several_layers_is_refused(family: str) -> None:
    with pytest.raises(DraftError, match="has no single matrix as embedding and as head: no drafter can read it"):
        Target.of(build(family))
