"""What needs no decomposition is not run through torch's again, and comes out the same."""

from contextlib import nullcontext

import onnx_ir as ir
import pytest
from families import build
from torch.onnx._internal.exporter import _fx_passes

from tide_export.trace import tracer


def decompositions(monkeypatch: pytest.MonkeyPatch) -> list:
    """The programs that torch decomposes from now on."""
    calls, real = [], _fx_passes.decompose_with_registry
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", lambda *given: calls.append(given) or real(*given))
    return calls


def structure(model: ir.Model) -> list:
    """The graph without the names of what it computes; constants and weights by their contents."""
    places: dict[ir.Value, int] = {}

    def known(value: ir.Value | None):
        if value is None or value.is_graph_input():
            return value and value.name
        if value.const_value is not None:
            array = value.const_value.numpy()
            return str(array.dtype), array.shape, array.tobytes()
        return places.setdefault(value, len(places))

    nodes = [
        (n.domain, n.op_type, n.attributes, [known(i) for i in n.inputs], [known(o) for o in n.outputs])
        for n in model.graph
    ]
    return [*nodes, [known(output) for output in model.graph.outputs]]


# Rotary positions and casts to float32; positions that are learned, one projection for three.
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_graph_is_the_one_torch_would_have_made(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = decompositions(monkeypatch)
    spared = tracer.trace(build(family), (1,)).model
    assert not calls, "nothing of it needs decomposing"
    monkeypatch.setattr(tracer, "spared_decompositions", nullcontext)
    assert structure(spared) == structure(tracer.trace(build(family), (1,)).model)
    assert len(calls) == 1


def test_a_model_that_writes_into_its_tensors_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = decompositions(monkeypatch)
    tracer.trace(build("gptj"), (1,))
    assert len(calls) == 1
