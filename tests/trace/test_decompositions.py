"""Graphs that need no decomposition skip torch's and equal what it makes; torch and onnxscript need each patch."""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import onnx_ir as ir
import pytest
import tiers
import torch
from onnx.reference import ReferenceEvaluator
from tiny_configs import GPT
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry
from transformers import GPT2Config, GPT2LMHeadModel

from tide_export.model.source import wrap_model
from tide_export.trace import tracer
from tide_export.trace.exporter import complex_ops
from tide_export.trace.exporter.decompositions import minimal_decompositions
from tide_export.trace.exporter.exact_constants import exact_constants


def decompositions(monkeypatch: pytest.MonkeyPatch) -> list:
    """The programs that torch decomposes from now on."""
    calls, real = [], _fx_passes.decompose_with_registry
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", lambda *args: calls.append(args) or real(*args))
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


def test_the_graph_is_the_one_torch_would_make(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = decompositions(monkeypatch)
    torch.manual_seed(0)
    source = wrap_model(GPT2LMHeadModel(GPT2Config(**GPT | {"n_layer": 1})), "gpt2")
    minimal = tracer.trace(source, ()).model
    assert not calls, "nothing of it needs decomposing"
    monkeypatch.setattr(tracer, "minimal_decompositions", nullcontext)
    assert structure(minimal) == structure(tracer.trace(source, ()).model)
    assert len(calls) == 1


def cast_and_reshaped(states: torch.Tensor) -> torch.Tensor:
    wide = states.to(torch.float32).transpose(0, 1)
    return wide.to(torch.float32).reshape(-1).max(states.sum().float())


def flattened(states: torch.Tensor) -> torch.Tensor:
    return states.transpose(0, 1)[None].flatten(1).flatten()


def differences(states: torch.Tensor) -> torch.Tensor:
    return torch.diff(states, n=2, dim=0, prepend=states[:1] * 2, append=states[1:2])


def transposed_and_joined(states: torch.Tensor) -> torch.Tensor:
    return torch.where((states.T > 2) & (states.T < 9), states.T, 0.5)


def promoted(states: torch.Tensor) -> torch.Tensor:
    whole = torch.arange(3) / 2 + states.sum().to(torch.int32)
    return torch.where(states > 5, states * whole, whole.to(torch.float64)) - 1


def written_in_place(states: torch.Tensor) -> torch.Tensor:
    doubled = states * 2
    before = doubled + 1
    doubled += before
    doubled.mul_(3)
    best, places = doubled.topk(2)
    best /= best.sum(-1, keepdim=True)
    scattered = torch.zeros_like(doubled).scatter_(1, places, best)
    return torch.cat([doubled, before, scattered]).detach_()


def written_through_a_view(states: torch.Tensor) -> torch.Tensor:
    doubled = states * 2
    doubled[0] += 1
    return doubled


def seen_through_a_view(states: torch.Tensor) -> torch.Tensor:
    doubled = states * 2
    rows = doubled.view(-1).view(-1, 3).transpose(0, 1)
    doubled += 1
    return rows


def a_view_written_into(states: torch.Tensor) -> torch.Tensor:
    doubled = states * 2
    doubled.transpose(0, 1).add_(1)
    return doubled


def seen_under_its_first_name(states: torch.Tensor) -> torch.Tensor:
    doubled = states * 2
    tripled = doubled.add_(states)
    rows = doubled.transpose(0, 1)
    tripled.mul_(2)
    return rows


def half_of_a_split(states: torch.Tensor) -> torch.Tensor:
    doubled = states * 2
    doubled.split(2)[0].add_(1)
    return doubled


def without_promotion(states: torch.Tensor) -> torch.Tensor:
    doubled = states * 2
    doubled += states.float() / 3
    return doubled


TRANSLATED = (cast_and_reshaped, transposed_and_joined, promoted, written_in_place)
BY_OTHER_SIZES = (flattened, differences)  # sizes are read off other tensors than torch takes
DECOMPOSED = (
    written_through_a_view,
    seen_through_a_view,
    a_view_written_into,
    seen_under_its_first_name,
    half_of_a_split,
    without_promotion,
)


class Norm(torch.nn.Module):
    """Helium's epsilon, and a root written as a power."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * torch.pow(states.pow(2).mean(-1, keepdim=True) + 1e-8, -0.5) * self.weight


class RootNorm(Norm):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-8) * self.weight


class Threshold(torch.nn.Module):
    """Gemma 3n's activation sparsity: the inverse error function of a constant."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * torch.special.erfinv(torch.tensor(0.9))


STATES = torch.tensor([[[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]])  # zeros: without its epsilon, the norm gives NaN


def exported(module: torch.nn.Module, states: torch.Tensor = STATES):
    return torch.onnx.export(module.eval(), (states,), dynamo=True, opset_version=23)


@pytest.mark.parametrize("norm", [Norm, RootNorm])
def test_a_norm_keeps_a_small_epsilon(norm: type[Norm]) -> None:
    with minimal_decompositions(), exact_constants():
        program = exported(norm())
    assert [node.op_type for node in program.model.graph] == ["RMSNormalization"]
    np.testing.assert_allclose(program(STATES)[0], norm()(STATES).detach(), rtol=1e-6)


def test_a_number_the_exporter_cannot_compute_is_folded() -> None:
    with minimal_decompositions():
        program = exported(Threshold())
    np.testing.assert_allclose(program(STATES)[0], Threshold()(STATES), rtol=1e-6)


# --- fails when upstream has mended it: then remove the patch ---------------------------------------------------------


def test_onnxscript_still_takes_a_small_epsilon_for_zero() -> None:
    """Needs `exact_constants`."""
    with minimal_decompositions():
        program = exported(RootNorm())
    assert np.isnan(program(STATES)[0].numpy()).any()


def test_the_exporter_still_knows_no_norm_by_a_power() -> None:
    """Needs `_write_roots`."""
    with exact_constants():
        program = exported(Norm())
    assert "RMSNormalization" not in [node.op_type for node in program.model.graph]


def test_the_exporter_still_lacks_the_inverse_error_function() -> None:
    """Needs `_fold_numbers`."""
    with pytest.raises(torch.onnx.errors.OnnxExporterError):
        exported(Threshold())


def test_the_exporter_still_lacks_unsqueeze_of_complex_tensors() -> None:
    """Needs `complex_ops`."""
    metas = ONNXRegistry.from_torchlib(opset_version=23).get_decomps(torch.ops.aten.unsqueeze.default)
    assert [meta.onnx_function.name for meta in metas if meta.is_complex] == [complex_ops.aten_unsqueeze_complex.name]


TOGETHER = [((*TRANSLATED, *BY_OTHER_SIZES), 0), *(((function,), 1) for function in DECOMPOSED)]
APART = [((function,), 0) for function in (*TRANSLATED, *BY_OTHER_SIZES)]


def called(value: object) -> str | None:
    """The functions' names; nothing for a number."""
    return "-".join(function.__name__ for function in value) if isinstance(value, tuple) else None


@pytest.mark.parametrize(("functions", "decomposed"), tiers.exhaustive_but(TOGETHER, [*TOGETHER, *APART]), ids=called)
def test_what_is_decomposed(
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...], decomposed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = decompositions(monkeypatch)
    states = torch.arange(12, dtype=torch.float16).reshape(4, 3)

    class Model(torch.nn.Module):
        def __init__(self, functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...]) -> None:
            super().__init__()
            self.functions = functions

        def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(function(states) for function in self.functions)

    def export(functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...]) -> ir.Model:
        dynamic = ({0: torch.export.Dim.DYNAMIC},)
        options = {"dynamo": True, "opset_version": 23, "dynamic_shapes": dynamic}
        return torch.onnx.export(Model(functions).eval(), (states,), **options).model

    with minimal_decompositions():
        exported = export(functions)
    assert len(calls) == decomposed
    model = ReferenceEvaluator(ir.to_proto(exported))
    found = model.run(None, {model.input_names[0]: states.numpy()})
    for function, array in zip(functions, found, strict=True):
        np.testing.assert_array_equal(array, function(states).numpy(), err_msg=function.__name__)
    alike = tuple(function for function in functions if function not in BY_OTHER_SIZES)
    if alike and (tiers.ALL or not decomposed):
        with minimal_decompositions():
            ours = exported if alike == functions else export(alike)
        assert structure(ours) == structure(export(alike))
