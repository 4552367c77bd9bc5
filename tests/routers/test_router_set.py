"""Routers, lenses and their file: the formulas, what is saved is what is loaded, what is foreign is refused by name."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_configs import small_llama
from transformers import LlamaForCausalLM

from tide_export.errors import RouterFileError
from tide_export.model.source import wrap_model
from tide_export.routers.router import Lens, Router, summarize
from tide_export.routers.router_set import FORMAT, RouterSet


def tiny_llama(layers=4, width=16, seed=0, name="tiny"):
    torch.manual_seed(seed)
    return wrap_model(LlamaForCausalLM(small_llama(vocab_size=31, width=width, layers=layers, context=64)), name)


def random_routers(checkpoints=(1, 3), width=16, bottleneck=4, shortlist=0, lens_rank=0, **provenance):
    torch.manual_seed(1)
    rows = torch.randn(shortlist, width) if shortlist else None
    routers = {layers: Router(width, bottleneck, rows) for layers in checkpoints}
    lenses = {layers: Lens(width, lens_rank) for layers in checkpoints} if lens_rank else {}
    for module in [*routers.values(), *lenses.values()]:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    return RouterSet(routers, provenance, lenses)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "routers.safetensors"


def test_score_is_the_formula():
    router = Router(3, 2)
    torch.nn.init.constant_(router.up.bias, 0.7)
    x = torch.tensor([[0.5, -1.0, 2.0]])
    down, up = router.down.weight.detach(), router.up.weight.detach()
    hidden = [sum(float(w) * float(v) for w, v in zip(row, x[0], strict=True)) for row in down]
    assert float(router(x).detach()) == pytest.approx(score(hidden, up, 0.7), abs=1e-6)


def score(hidden, up, bias):
    silu = [h / (1 + math.exp(-h)) for h in hidden]
    return 1 / (1 + math.exp(-sum(float(w) * s for w, s in zip(up[0], silu, strict=True)) - bias))


def test_score_with_a_shortlist_is_the_formula():
    router = random_routers(shortlist=7).routers[3]
    x = np.random.default_rng(0).normal(size=16)
    part = {name: tensor.double().numpy() for name, tensor in router.state_dict().items()}
    logits = np.sort(part["shortlist"] @ x)[::-1]
    told = logits[:2] - np.log(np.exp(logits).sum())
    assert summarize(torch.from_numpy(x).float(), router.shortlist).tolist() == pytest.approx(told.tolist(), abs=1e-5)
    hidden = part["down.weight"] @ x + part["confidence.weight"] @ told
    expected = score(hidden.tolist(), part["up.weight"], float(part["up.bias"][0]))
    assert float(router(torch.from_numpy(x).float()).detach()) == pytest.approx(expected, abs=1e-5)


def test_summary_of_large_logits_is_finite():
    router = random_routers(shortlist=5).routers[1]
    assert torch.isfinite(summarize(1e4 * torch.ones(2, 16), router.shortlist)).all()


def test_a_new_router_has_no_bias_and_a_new_lens_does_nothing():
    torch.manual_seed(0)
    x = torch.randn(5, 16)
    assert float(Router(16, 4).up.bias.detach()) == 0.0
    assert torch.equal(Lens(16, 8)(x), x)


def test_lens_is_the_formula():
    lens = random_routers(lens_rank=3).lenses[1]
    x = torch.randn(5, 16)
    expected = x + x @ lens.down.weight.T @ lens.up.weight.T + lens.up.bias
    assert torch.allclose(lens(x), expected, atol=1e-4)
    assert not torch.allclose(lens(x), x, atol=1.0)


def test_the_shortlist_is_not_trained():
    router = random_routers(shortlist=7).routers[1]
    assert "shortlist" in router.state_dict()
    assert "shortlist" not in dict(router.named_parameters())


FORMS = [{}, {"shortlist": 7}, {"lens_rank": 3}, {"shortlist": 7, "lens_rank": 3}]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_round_trip(path, form):
    made = random_routers(model="tiny", report={"1": {"loss": 0.5, "precision": None}}, checkpoint="ünï", **form)
    made.save(path)
    loaded = RouterSet.load(path)
    assert loaded.checkpoints == (1, 3)
    assert loaded.hidden_size == 16
    assert loaded.strategy == made.strategy == ("lens" if "lens_rank" in form else "identity")
    assert loaded.provenance == made.provenance
    found, expected = loaded.tensors(), made.tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    x = torch.randn(6, 16)
    for layers in loaded.checkpoints:
        assert torch.equal(loaded.routers[layers](x), made.routers[layers](x))
    for layers in loaded.lenses:
        assert torch.equal(loaded.lenses[layers](x), made.lenses[layers](x))
    modules = [*loaded.routers.values(), *loaded.lenses.values()]
    assert not any(p.requires_grad or module.training for module in modules for p in module.parameters())


def test_the_shortlist_is_stored_once(path):
    made = random_routers(shortlist=200)
    made.save(path)
    with safe_open(path, framework="pt") as file:
        assert [name for name in file.keys() if "shortlist" in name] == ["shortlist"]  # noqa: SIM118 - not a dict
    loaded = RouterSet.load(path)
    assert loaded.routers[1].shortlist is loaded.routers[3].shortlist


def test_sizes_are_said():
    assert random_routers(bottleneck=64).sizes() == "2 routers 9 KiB"
    found = random_routers(bottleneck=64, shortlist=64, lens_rank=32).sizes()
    assert found == "2 routers 10 KiB, shortlist 4 KiB, 2 lenses 8 KiB"


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_arrays_are_laid_out_for_a_product_from_the_left(form):
    made = random_routers(**form)
    x = torch.randn(5, 16)
    arrays = made.arrays()[3]
    hidden = x.numpy() @ arrays.down
    assert (arrays.confidence is None) == (arrays.shortlist is None) == ("shortlist" not in form)
    if arrays.shortlist is not None:
        logits = x.numpy() @ arrays.shortlist
        likely = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        hidden = hidden + np.sort(likely, axis=1)[:, :-3:-1] @ arrays.confidence
    found = (hidden / (1 + np.exp(-hidden))) @ arrays.up + arrays.bias
    assert torch.allclose(torch.from_numpy(found[:, 0]), made.routers[3].logit(x).detach(), atol=1e-4)
    assert all(array.flags.c_contiguous and array.dtype == np.float32 for array in (arrays.down, arrays.up))


def test_lens_arrays_are_laid_out_for_a_product_from_the_left():
    made = random_routers(lens_rank=3)
    x = torch.randn(5, 16)
    arrays = made.lens_arrays()
    assert arrays.keys() == made.routers.keys()
    found = x.numpy() + x.numpy() @ arrays[3].down @ arrays[3].up + arrays[3].bias
    assert torch.allclose(torch.from_numpy(found), made.lenses[3](x).detach(), atol=1e-4)


def test_exit_state_is_lens_then_norm():
    source, made = tiny_llama(), random_routers(lens_rank=3)
    raw = torch.randn(2, 16)
    with torch.no_grad():
        expected = source.model.model.norm(made.lenses[1](raw))
        assert torch.equal(made.exit_state(source, 1, raw), expected)
        assert torch.equal(random_routers().exit_state(source, 1, raw), source.model.model.norm(raw))


def test_saving_replaces_and_leaves_nothing_beside(path, tmp_path):
    random_routers(checkpoints=(1,)).save(path)
    random_routers(checkpoints=(2,)).save(path)
    assert RouterSet.load(path).checkpoints == (2,)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_unwritable_folder(tmp_path):
    with pytest.raises(RouterFileError, match="cannot write router file"):
        random_routers().save(tmp_path / "none" / "routers.safetensors")


def test_missing_file(path):
    with pytest.raises(RouterFileError, match="no router file at"):
        RouterSet.load(path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(path, keep):
    random_routers().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RouterFileError, match="truncated or corrupt"):
        RouterSet.load(path)


def test_foreign_bytes(path):
    path.write_bytes(b"\xff" * 1000)
    with pytest.raises(RouterFileError, match="truncated or corrupt"):
        RouterSet.load(path)


def test_safetensors_of_something_else(path):
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(RouterFileError, match="not a router file"):
        RouterSet.load(path)


@pytest.mark.parametrize(
    ("tensors", "provenance", "reason"),
    [
        ({}, "{}", "holds no router"),
        ({"weight": torch.zeros(2)}, "{}", "corrupt"),
        ({"routers.x.down.weight": torch.zeros(2)}, "{}", "corrupt"),
        ({"routers.2.down.weight": torch.zeros(4, 16)}, "{}", "checkpoint 2 has missing or misshapen"),
        (
            {"routers.2.down.weight": torch.zeros(4, 16), "routers.2.up.weight": torch.zeros(1, 5)},
            "{}",
            "checkpoint 2 has missing or misshapen",
        ),
        (
            {"routers.2.down.weight": torch.full((4, 16), float("nan")), "routers.2.up.weight": torch.zeros(1, 4)},
            "{}",
            "checkpoint 2 holds NaN",
        ),
        (
            {"routers.0.down.weight": torch.zeros(4, 16), "routers.0.up.weight": torch.zeros(1, 4)},
            "{}",
            "after 0 layers",
        ),
        ({"routers.2.down.weight": torch.zeros(4, 16), "routers.2.up.weight": torch.zeros(1, 4)}, "{", "corrupt"),
        ({"routers.2.down.weight": torch.zeros(4, 16), "routers.2.up.weight": torch.zeros(1, 4)}, "[]", "corrupt"),
        (
            {
                "routers.1.down.weight": torch.zeros(4, 16),
                "routers.1.up.weight": torch.zeros(1, 4),
                "routers.2.down.weight": torch.zeros(4, 8),
                "routers.2.up.weight": torch.zeros(1, 4),
            },
            "{}",
            "different widths",
        ),
    ],
)
def test_damaged_contents(path, tensors, provenance, reason):
    save_file(tensors, path, metadata={"format": FORMAT, "provenance": provenance})
    with pytest.raises(RouterFileError, match=reason):
        RouterSet.load(path)


def nan(tensor):
    return torch.full_like(tensor, float("nan"))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("lenses.1.down.weight", nan, "lens at checkpoint 1 holds NaN"),
        ("lenses.3.up.bias", nan, "lens at checkpoint 3 holds NaN"),
        ("lenses.3.up.weight", lambda t: t[:, :-1].contiguous(), "lens at checkpoint 3 has missing or misshapen"),
        ("lenses.3.up.bias", None, "lens at checkpoint 3 has missing or misshapen"),
        ("lenses.3.down.weight", None, "lens at checkpoint 3 has missing or misshapen"),
        ("shortlist", nan, "holds NaN"),
        ("shortlist", lambda t: t[:, :-1].contiguous(), "checkpoint 1 is of another width than the shortlist"),
        ("shortlist", lambda t: t[0].contiguous(), "misshapen shortlist"),
        ("shortlist", lambda t: t[:1].contiguous(), "misshapen shortlist"),
        ("shortlist", None, "router at checkpoint 1 has missing or misshapen"),
        ("routers.3.confidence.weight", None, "router at checkpoint 3 has missing or misshapen"),
        ("routers.3.up.bias", nan, "router at checkpoint 3 holds NaN"),
    ],
)
def test_damaged_lenses_and_shortlists(path, name, change, reason):
    tensors = random_routers(shortlist=7, lens_rank=3).tensors()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": FORMAT, "provenance": "{}"})
    with pytest.raises(RouterFileError, match=reason) as caught:
        RouterSet.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("without", "reason"),
    [
        ("routers.3", r"holds lenses for \[1, 3\] but routers for \[1\]"),
        ("routers.", "holds no router"),
    ],
)
def test_every_lens_has_a_router(path, without, reason):
    tensors = random_routers(lens_rank=3).tensors()
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(without)}
    save_file(kept, path, metadata={"format": FORMAT, "provenance": "{}"})
    with pytest.raises(RouterFileError, match=reason):
        RouterSet.load(path)


def test_a_checkpoint_may_have_no_lens(path):
    tensors = random_routers(lens_rank=3).tensors()
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("lenses.3")}
    save_file(kept, path, metadata={"format": FORMAT, "provenance": "{}"})
    loaded = RouterSet.load(path)
    assert (loaded.checkpoints, tuple(loaded.lenses), loaded.strategy) == ((1, 3), (1,), "lens")


def test_a_file_of_an_older_release_says_calibrate_again(path):
    save_file(random_routers().tensors(), path, metadata={"format": "tide_export.routers/1", "provenance": "{}"})
    with pytest.raises(RouterFileError, match="calibrate again"):
        RouterSet.load(path)


def test_routers_of_the_model_pass():
    source = tiny_llama()
    random_routers(num_layers=4, weights_sha256=source.weights_sha256).check(source, "r.safetensors")


@pytest.mark.parametrize(
    ("routers", "reason"),
    [
        (random_routers(checkpoints=(2, 4)), "deeper model"),
        (random_routers(width=32), "hidden size 32 but tiny has 16"),
        (
            RouterSet(random_routers().routers, {}, random_routers(width=8, lens_rank=3).lenses),
            "lens at checkpoint 1 is for hidden size 8 but tiny has 16",
        ),
        (random_routers(num_layers=8), "made for a model of 8 layers but tiny has 4"),
        (random_routers(num_layers=4, weights_sha256="0" * 64, model="other"), "calibrated on 'other'"),
    ],
)
def test_routers_of_another_model(routers, reason):
    with pytest.raises(RouterFileError, match=reason) as caught:
        routers.check(tiny_llama(), "r.safetensors")
    assert "r.safetensors" in str(caught.value)


def test_same_shape_other_weights_is_another_model(path):
    random_routers(num_layers=4, weights_sha256=tiny_llama(seed=0).weights_sha256, model="tiny").save(path)
    with pytest.raises(RouterFileError, match="whose weights differ"):
        RouterSet.load(path).check(tiny_llama(seed=1, name="retrained"), path)


def test_provenance_is_readable_without_this_package(path):
    random_routers(model="tiny").save(path)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["provenance"]) == {"model": "tiny"}


def tide_file(path, layers=(0, 2), width=16, bottleneck=4):
    """As TIDE 0.2.1 saves it: the layer index counts from 0, the checkpoint lies behind that layer."""
    torch.manual_seed(3)
    weights = {
        layer: {"down.weight": torch.randn(bottleneck, width), "up.weight": torch.randn(1, bottleneck)}
        for layer in layers
    }
    torch.save({"hidden_dim": width, "bottleneck_dim": bottleneck, "router_layers": weights}, path)
    return weights


def test_tides_own_file(tmp_path):
    weights = tide_file(tmp_path / "router.pt")
    loaded = RouterSet.load(tmp_path / "router.pt")
    assert loaded.checkpoints == (1, 3)
    assert loaded.provenance == {}
    assert torch.equal(loaded.routers[1].down.weight, weights[0]["down.weight"])
    assert torch.equal(loaded.routers[3].up.weight, weights[2]["up.weight"])
    for router in loaded.routers.values():  # of the form TIDE knows
        assert router.shortlist is None
        assert float(router.up.bias) == 0.0
    assert loaded.lenses == {}
    loaded.check(tiny_llama(), "router.pt")


def test_tides_router_behind_the_last_layer_is_refused(tmp_path):
    tide_file(tmp_path / "router.pt", layers=(1, 3))
    with pytest.raises(RouterFileError, match="deeper model"):
        RouterSet.load(tmp_path / "router.pt").check(tiny_llama(), "router.pt")


class Payload:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("content", [{"weights": 1}, [1, 2], Payload(), {"router_layers": {"a": {}}}])
def test_pt_file_of_something_else(tmp_path, capsys, content):
    torch.save(content, tmp_path / "router.pt")
    with pytest.raises(RouterFileError, match=r"not a TIDE router\.pt, or is damaged") as caught:
        RouterSet.load(tmp_path / "router.pt")
    assert "\n" not in str(caught.value)
    assert "executed" not in capsys.readouterr().out


def test_truncated_pt_file(tmp_path):
    path = tmp_path / "router.pt"
    tide_file(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RouterFileError, match="damaged"):
        RouterSet.load(path)
