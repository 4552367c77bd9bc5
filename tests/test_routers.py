"""Router files: what is saved is what is loaded, and what does not belong to a model is refused by name."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tide_export.errors import RouterFileError
from tide_export.model import wrap_model
from tide_export.routers import FORMAT, Router, RouterSet


def tiny_llama(layers=4, width=16, seed=0, name="tiny"):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return wrap_model(LlamaForCausalLM(config), name)


def random_routers(checkpoints=(1, 3), width=16, bottleneck=4, **provenance):
    torch.manual_seed(1)
    return RouterSet({layers: Router(width, bottleneck) for layers in checkpoints}, provenance)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "routers.safetensors"


def test_score_is_the_formula():
    router = Router(3, 2)
    x = torch.tensor([[0.5, -1.0, 2.0]])
    down, up = router.down.weight.detach(), router.up.weight.detach()
    hidden = [sum(float(w) * float(v) for w, v in zip(row, x[0], strict=True)) for row in down]
    silu = [h / (1 + torch.tensor(-h).exp().item()) for h in hidden]
    logit = sum(float(w) * s for w, s in zip(up[0], silu, strict=True))
    assert float(router(x).detach()) == pytest.approx(1 / (1 + torch.tensor(-logit).exp().item()), abs=1e-6)


def test_round_trip(path):
    made = random_routers(model="tiny", report={"1": {"loss": 0.5, "precision": None}}, checkpoint="ünï")
    made.save(path)
    loaded = RouterSet.load(path)
    assert loaded.checkpoints == (1, 3)
    assert (loaded.hidden_size, loaded.bottleneck) == (16, 4)
    assert loaded.provenance == made.provenance
    for layers in loaded.checkpoints:
        for part in ("down", "up"):
            assert torch.equal(getattr(loaded.routers[layers], part).weight, getattr(made.routers[layers], part).weight)
    assert not any(p.requires_grad for router in loaded.routers.values() for p in router.parameters())


def test_arrays_are_laid_out_for_a_product_from_the_left():
    made = random_routers()
    x = torch.randn(5, 16)
    down, up = made.arrays()[3]
    hidden = x.numpy() @ down
    logits = (hidden / (1 + 2.718281828459045**-hidden)) @ up
    assert torch.allclose(torch.from_numpy(logits[:, 0]), made.routers[3].logit(x), atol=1e-5)


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


def test_routers_of_the_model_pass():
    source = tiny_llama()
    random_routers(num_layers=4, weights_sha256=source.weights_sha256).check(source, "r.safetensors")


@pytest.mark.parametrize(
    ("routers", "reason"),
    [
        (random_routers(checkpoints=(2, 4)), "deeper model"),
        (random_routers(width=32), "hidden size 32 but tiny has 16"),
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
