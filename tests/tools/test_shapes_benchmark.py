"""`tools/benchmarks/shapes.py` on a tiny bundle: every case is measured. No test looks at a time."""

import json
import sys
from pathlib import Path

import pytest
import torch
from families import build
from tiny_configs import CHECKPOINTS
from tiny_engines import bundle_of

from tide_export.model.source import load_model
from tide_export.routers.random_routers import random_routers
from tide_export.routers.router_set import RouterSet

ECHO = """#!{python}
import json, sys
assert sys.argv[1:] == "-m peer.gguf -t 1 -p 0 -n 48 -r 3 -o json".split(), sys.argv
print(json.dumps([{{"avg_ts": 12.5}}]))
"""


def test_every_case_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shapes

    source = build("lfm2")
    routers = random_routers(source, CHECKPOINTS, list(range(5, 45)), bottleneck=16)
    bundle_of(source, routers, tmp_path / "bundle")
    peer, file = tmp_path / "llama-bench", tmp_path / "times.json"
    peer.write_text(ECHO.format(python=sys.executable))
    peer.chmod(0o755)
    options = [
        "--rounds",
        "2",
        "--threads",
        "1",
        "--llama-bench",
        str(peer),
        "--gguf",
        "peer.gguf",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", ["shapes", str(tmp_path / "bundle"), *options])
    assert shapes.main() == 0
    found = json.loads(file.read_text())
    assert {name: len(rates) for name, rates in found["tokens_per_second"].items()} == {"ours": 2, "llama.cpp": 2}
    assert {count: len(taken) for count, taken in found["seconds"].items()} == dict.fromkeys(map(str, shapes.RUNS), 2)
    assert "over one" in capsys.readouterr().out


TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "vocab_size": 96,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
}


@pytest.mark.parametrize("shape", ["llama", "qwen3_5", "qwen3_moe", "gpt_oss"])
def test_a_model_of_each_shape_is_made(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shapes

    sizes = {name: TINY.get(name, value) for name, value in shapes.SHAPES[shape].items()}
    monkeypatch.setitem(shapes.SHAPES, shape, sizes)
    checkpoints = ["--checkpoints", "1,3"] if shape == "llama" else []
    monkeypatch.setattr(sys, "argv", ["shapes", str(tmp_path / "model"), "--make", shape, *checkpoints])
    dtype = torch.get_default_dtype()
    try:
        assert shapes.main() == 0
    finally:
        torch.set_default_dtype(dtype)
    source = load_model(tmp_path / "model", packed=True)
    assert source.exact_in == ("bf16",)
    assert torch.isfinite(source.run(torch.tensor([[5, 7, 9]]), []).logits).all()
    if checkpoints:
        routers = RouterSet.load(tmp_path / "model" / "routers.safetensors")
        assert routers.checkpoints == (1, 3)
    if shape == "gpt_oss":
        assert source.quantized is not None
        assert len(source.quantized.blocks) == 4 * 2 * 6
