"""Layers that run several times in a pass are as many layers: each time has a module of its own, with the weights of
all."""

import copy
import threading
from itertools import combinations

import pytest
import torch
from families import build

from tide_export.errors import UnsupportedModelError
from tide_export.model.source import wrap_model
from tide_export.quantize.gptq import record_layer_inputs

IDS = torch.tensor([[5, 9, 40, 3]])


def test_each_run_is_a_layer_with_states_of_its_own() -> None:
    source = build("hrm_text")
    layers = source.structure.layers
    low, high = source.model.model.L_module.layers[0], source.model.model.H_module.layers[0]
    assert [layer.mlp for layer in layers] == [low.mlp, low.mlp, high.mlp, low.mlp, low.mlp, high.mlp]
    assert source.structure.final_modules == (source.model.model.H_module.final_norm,)
    states = source.run(IDS, range(1, 7))
    for one, other in combinations(states.raw.values(), 2):
        assert (one - other).abs().max() > 0.1
    torch.testing.assert_close(source.head(source.normalize(states.raw[6])), states.logits)


def test_a_pass_begins_with_the_first_run_after_one_that_broke_off_and_beside_others() -> None:
    source = build("hrm_text")
    expected = source.run(IDS, [2])

    def fail(*_: object) -> None:
        raise InterruptedError

    with source.structure.layers[2].register_forward_hook(fail), pytest.raises(InterruptedError):
        source.run(IDS, [2])

    beside = []
    other = threading.Thread(target=lambda: beside.append(source.run(IDS.flip(1), [2])))

    def run_other(*_: object) -> None:
        if other.ident is None:
            other.start()
            other.join()

    with source.structure.layers[3].register_forward_pre_hook(run_other):
        found = source.run(IDS, [2])
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.raw[2], expected.raw[2])
    assert torch.equal(beside[0].logits, source.run(IDS.flip(1), [2]).logits)


def test_a_copy_of_the_model_runs_on_its_own_weights() -> None:
    source = build("hrm_text")
    again = wrap_model(source.model, "again")
    assert list(again.structure.layers) == list(source.structure.layers)
    copied = wrap_model(copy.deepcopy(source.model), "copied")
    logits = source.run(IDS, []).logits
    assert torch.equal(copied.run(IDS, []).logits, logits)
    with torch.no_grad():
        source.model.model.L_module.layers[0].mlp.down_proj.weight.zero_()
    assert torch.equal(copied.run(IDS, []).logits, logits)
    changed = source.run(IDS, [1]).logits
    assert (changed - logits).abs().max() > 0.01
    with copied.structure.captured([1]) as none:
        source.run(IDS, [])
    assert not none


def test_gptq_does_not_follow_states_that_change_between_layers() -> None:
    with pytest.raises(UnsupportedModelError, match="HrmTextForCausalLM changes hidden states between its layers"):
        record_layer_inputs(build("hrm_text"), [IDS[0].tolist()])
    assert len(record_layer_inputs(build("llama"), [IDS[0].tolist()])[0].calls) == 3
