"""The command line on models and router files that are damaged, foreign or of another shape; and TIDE's own files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import refused
from safetensors.torch import load_file, save_file

from tide_export.cli.main import main
from tide_export.routers.router import Router
from tide_export.routers.router_set import RouterSet

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "demo" / "demo-llama"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model to spoil."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def change_config(model: Path, **values) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


def put_nan(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def drop_a_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.7.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def truncate(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-5000])


@pytest.mark.parametrize("command", ["calibrate", "export"])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (put_nan, "model.layers.7.mlp.up_proj.weight holds NaN"),
        (drop_a_tensor, "model.layers.7.mlp.up_proj.weight"),
        (truncate, "cannot load the weights"),
        (lambda model: (model / "model.safetensors").unlink(), "cannot load the weights"),
        (lambda model: (model / "config.json").write_text("{"), "cannot"),
        (lambda model: change_config(model, model_type="abacus"), "abacus"),
        (lambda model: change_config(model, hidden_size=96), "its weights do not fit"),
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer"),
    ],
    ids=["nan", "missing tensor", "truncated", "no weights", "bad json", "unknown", "misshapen", "no tokenizer"],
)
def test_unusable_models_are_refused_and_nothing_is_written(capsys, tmp_path, model, command, spoil, says):
    spoil(model)
    assert says in refused(capsys, command, "-q", model, "-o", tmp_path / "result", "--dataset", ROOT / "LICENSE")
    assert list(tmp_path.iterdir()) == [model]


# --- router files ----------------------------------------------------------------------------------------------------


def tide_file(path: Path, layers=(2, 5, 8), width: int = 128, bottleneck: int = 16) -> Path:
    """A router.pt as TIDE 0.2.1 saves it; its layer l is our checkpoint l + 1."""
    torch.manual_seed(0)
    parts = {
        layer: {"down.weight": torch.randn(bottleneck, width), "up.weight": torch.randn(1, bottleneck)}
        for layer in layers
    }
    torch.save({"hidden_dim": width, "bottleneck_dim": bottleneck, "router_layers": parts}, path)
    return path


def our_file(path: Path, checkpoints=(3, 6, 9), width: int = 128, **provenance) -> Path:
    routers = {layers: Router(width, 16).requires_grad_(False) for layers in checkpoints}
    RouterSet(routers, provenance).save(path)
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: tide_file(path / "r.pt", layers=(5, 11)), "made for a deeper model"),
        (lambda path: tide_file(path / "r.pt", width=64), "hidden size 64"),
        (lambda path: our_file(path / "r.safetensors", num_layers=16), "made for a model of 16 layers"),
        (lambda path: our_file(path / "r.safetensors", weights_sha256="0" * 64), "whose weights differ"),
        (lambda path: our_file(path / "r.safetensors", checkpoints=(3, 12)), "made for a deeper model"),
    ],
)
def test_routers_of_another_model_are_refused(capsys, tmp_path, make, says):
    path = make(tmp_path)
    assert says in refused(capsys, "export", "-q", MODEL, "-o", tmp_path / "x", "--routers", path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["r.safetensors", "r.pt"])
def test_damaged_router_files_are_refused(capsys, tmp_path, name):
    path = tmp_path / name
    assert "no router file" in refused(capsys, "export", "-q", MODEL, "-o", tmp_path / "x", "--routers", path)
    (our_file if name.endswith("s") else tide_file)(path)
    path.write_bytes(path.read_bytes()[:-200])
    assert str(path) in refused(capsys, "export", "-q", MODEL, "-o", tmp_path / "x", "--routers", path)
    assert list(tmp_path.iterdir()) == [path]


def test_tide_s_file_is_converted_and_bound_to_the_model(tmp_path, capsys):
    path, output = tide_file(tmp_path / "router.pt"), tmp_path / "routers.safetensors"
    assert main(["calibrate", str(MODEL), "-o", str(output), "--from-tide", str(path), "-q"]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    before, after = RouterSet.load(path), RouterSet.load(output)
    assert after.checkpoints == (3, 6, 9)
    for layers in after.checkpoints:
        torch.testing.assert_close(after.routers[layers].down.weight, before.routers[layers].down.weight)
        torch.testing.assert_close(after.routers[layers].up.weight, before.routers[layers].up.weight)
    assert after.provenance["num_layers"] == 12
    assert len(after.provenance["weights_sha256"]) == 64
    line = refused(capsys, "calibrate", "-q", MODEL, "-o", tmp_path / "again", "--from-tide", output)
    assert "is not TIDE's router.pt" in line


def test_tide_s_file_for_another_model_is_refused(capsys, tmp_path):
    path = tide_file(tmp_path / "router.pt", layers=(11,))
    assert "deeper" in refused(capsys, "calibrate", "-q", MODEL, "-o", tmp_path / "x", "--from-tide", path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_found_before_the_work(capsys, tmp_path):
    line = refused(capsys, "calibrate", "-q", MODEL, "-o", tmp_path / "none" / "x", "--dataset", "./none.txt")
    assert "does not exist" in line
