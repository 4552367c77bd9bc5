"""Layers that run in loops are found by watching: each loop's run is a layer, and its end is where tokens exit."""

from pathlib import Path

import pytest
import torch
from families import build
from looped_models import LAYERS, LOOPS, make_looped, own_code, reference

from tide_export.calibration.config import TideConfig
from tide_export.calibration.evaluate import count_costs
from tide_export.errors import TideError, UnsupportedModelError
from tide_export.model.source import SourceModel, load_model
from tide_export.pipeline.flow import export
from tide_export.pipeline.preflight import loop_defaults
from tide_export.routers.model_gate import gate_routers, gate_threshold

IDS = torch.tensor([[5, 9, 40, 3]])


@pytest.fixture(scope="module", autouse=True)
def _code(tmp_path_factory: pytest.TempPathFactory):
    with own_code(tmp_path_factory.mktemp("modules")):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_looped(tmp_path_factory.mktemp("looped") / "model")


@pytest.fixture(scope="module")
def source(folder: Path) -> SourceModel:
    return load_model(folder, trust_remote_code=True)


def test_each_loop_s_run_of_a_layer_is_a_layer(source: SourceModel, folder: Path) -> None:
    assert (source.num_layers, source.loops) == (LAYERS * LOOPS, LOOPS)
    model, states = reference(folder), source.run(IDS, range(1, LAYERS * LOOPS + 1))
    for loop in range(LOOPS):
        exited = source.head(source.normalize(states.raw[(loop + 1) * LAYERS]))
        torch.testing.assert_close(exited, model(IDS, exit_at_step=loop).logits)
    torch.testing.assert_close(source.run(IDS, []).logits, model(IDS, exit_at_step=LOOPS - 1).logits)
    assert (model(IDS).logits - states.logits).abs().max() > 0.1, "of itself it exits by its gate"
    assert source.raw_hidden(IDS, [3])[3].shape == (1, 4, source.hidden_size)
    again = load_model(folder, trust_remote_code=True)
    assert torch.equal(again.run(IDS, []).logits, states.logits)


def test_checkpoints_default_to_the_ends_of_loops(source: SourceModel) -> None:
    config = loop_defaults(source, TideConfig())
    assert (config.resolve_checkpoints(source.num_layers), config.min_layers) == ((2, 4, 6), 0)
    given = loop_defaults(source, TideConfig(checkpoints=(3,), min_layers=4))
    assert (given.resolve_checkpoints(source.num_layers), given.min_layers) == ((3,), 4)
    assert loop_defaults(build("llama"), TideConfig()) == TideConfig()
    assert (build("llama").loops, build("hrm_text").loops) == (1, 2)
    one = sum(parameter.numel() for parameter in source.structure.layers[0].parameters())
    assert count_costs(source, TideConfig()).layer == 2 * one, "a layer costs as much in each loop"


def test_the_gate_as_routers(source: SourceModel, tmp_path: Path) -> None:
    routers, gate = gate_routers(source), source.model.model.early_exit_gate
    assert (routers.checkpoints, routers.cumulative, gate_threshold(source)) == ((2, 4, 6), True, 0.6)
    states = torch.randn(7, source.hidden_size) * 3
    for router in routers.routers.values():
        torch.testing.assert_close(router(states), torch.sigmoid(gate(states))[:, 0])
    routers.save(tmp_path / "r.safetensors")
    loaded = type(routers).load(tmp_path / "r.safetensors")
    assert (loaded.checkpoints, loaded.cumulative, loaded.provenance) == ((2, 4, 6), True, routers.provenance)


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        ({"early_exit_threshold": 1.5}, {}, r"early_exit_threshold in its config.json must lie in 0\.\.1, not 1.5"),
        ({"early_exit_threshold": "half"}, {}, "must lie in 0..1, not 'half': give --exit-threshold"),
        ({"gate_width": 2}, {}, "its early_exit_gate gives 2 numbers for 64, not 1 for 64"),
        ({"gate_width": 0}, {}, "has no exit gate of its own after loops .early_exit_gate.: omit --routers model"),
        ({"total_ut_steps": 1}, {}, "has no exit gate of its own after loops"),
        ({}, {"config": TideConfig(checkpoints=(2,))}, "has a checkpoint after every loop but the last: omit --check"),
        ({}, {"trust_remote_code": False}, "needs Python code of its own .* --trust-remote-code"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict, options: dict, says: str) -> None:
    model = make_looped(tmp_path / "model", **config)
    with pytest.raises(TideError, match=says) as caught:
        export(str(model), tmp_path / "out", **{"routers": "model", "trust_remote_code": True} | options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_without_such_a_gate_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no exit gate of its own"):
        gate_routers(build("llama"))
