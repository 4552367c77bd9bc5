"""`tools/benchmarks/gpu_exits.py`: a token by provider "cuda", over the stand-ins for CUDA and ONNX Runtime; and what
is drawn where weights were left behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from fake_cudart import ROOT
from onnx import TensorProto, helper
from tiny_engines import TinyLlama, pieces_of, segments_of

from tide_export.bundle.file_names import EMBEDDING_FILE, SEGMENTS_FOLDER, SEGMENTS_WEIGHTS_FILE
from tide_export.bundle.network_weights import network_weights
from tide_export.bundle.opened import open_bundle

sys.path += [str(ROOT / "tools" / name) for name in ("benchmarks", "checks")]
import gpu_exits
from gpu_carry import pack_shape

RUN = """
import sys
from pathlib import Path
from fake_cudart import FakeCudart
FakeCudart(Path(sys.argv[1])).reset()
import gpu_exits
sys.exit(gpu_exits.main(sys.argv[2:]))
"""
FEW = ["--sequences", "1,2", "--new-tokens", "4", "--rounds", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def shape(tiny_llama: TinyLlama, tmp_path_factory: pytest.TempPathFactory, traces) -> Path:
    """The tiny bundle with networks for CUDA in fp16, packed without weights."""
    folder = tmp_path_factory.mktemp("shape")
    shutil.copytree(tiny_llama.exact, folder / "bundle")
    pieces = pieces_of(tiny_llama.source, tiny_llama.routers.checkpoints, traces)
    bundle = segments_of(tiny_llama.source, tiny_llama.routers, folder / "bundle", pieces, "fp16", "cuda")
    pack_shape(bundle.path, folder / "packed")
    assert not list((folder / "packed").rglob("*.data"))
    return folder / "packed"


def run(ort_on_gpu: dict[str, str], *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    paths = [ROOT, ROOT / "tools" / "benchmarks", Path(__file__).parent]
    given = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "FAKE_ORT_DEVICE": "0"}
    return subprocess.run(
        [sys.executable, "-c", RUN, ort_on_gpu["TIDE_CUDART"], *arguments],
        env=os.environ | ort_on_gpu | given | changes,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_bundle_without_weights_is_timed_on_random_ones(
    shape: Path, ort_on_gpu: dict[str, str], tmp_path: Path
) -> None:
    done = run(ort_on_gpu, str(shape), *FEW, "--json", str(tmp_path / "exits.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no more runs are recorded" not in done.stderr
    bundle = open_bundle(shape, verify=False)  # files of the sizes that the manifest lists
    assert {EMBEDDING_FILE, f"{SEGMENTS_FOLDER}/{SEGMENTS_WEIGHTS_FILE}"} <= set(bundle.files)
    rows = json.loads((tmp_path / "exits.json").read_text())
    cases = ["full", "never", *(f"{layers} layers" for layers in bundle.manifest.checkpoints)]
    assert [(row["case"], row["sequences"]) for row in rows] == [(case, size) for size in (1, 2) for case in cases]
    assert all(row["us a token"] > 0 for row in rows)
    assert all(row["full / this"] == 1 for row in rows if row["case"] == "full")
    assert [row["case"] for row in rows if row["share of copy bandwidth"] != "-"] == ["full"]
    weights = network_weights(bundle).values()
    read = sum(weight.size for network in weights for weight in network.weights if not weight.is_table)
    moved = read / rows[0]["us a token"] / rows[0]["share of copy bandwidth"]
    assert 100 < moved < 1e6, "bytes a microsecond that a copy moves"

    full = run(ort_on_gpu, str(shape), "--full-only", *FEW, FAKE_ORT_RECORDING="operation not permitted")
    assert [line.split(" | ")[:2] for line in full.stdout.splitlines()] == [["full", "1"], ["full", "2"]]
    assert "no more runs are recorded as CUDA graphs" in full.stderr, "by which a session knows that it failed"


def test_a_token_that_ran_other_layers_makes_it_fail(shape: Path, ort_on_gpu: dict[str, str], tmp_path: Path) -> None:
    """As where every score is no number."""
    pack_shape(shape, tmp_path)
    gpu_exits.prepare(tmp_path, "cpu")
    segments = tmp_path / SEGMENTS_FOLDER
    content = bytearray((segments / SEGMENTS_WEIGHTS_FILE).read_bytes())
    routers = {at: one.size for at, one in gpu_exits.weights_of(segments).items() if one.kind == "float32"}
    for at, size in routers.items():
        content[at : at + size] = b"\xff" * size
    (segments / SEGMENTS_WEIGHTS_FILE).write_bytes(content)
    done = run(ort_on_gpu, str(tmp_path), *FEW)
    assert done.returncode == 1, done.stderr
    checkpoints = open_bundle(tmp_path, verify=False).manifest.checkpoints
    wrong = [line for line in done.stdout.splitlines() if line.startswith("DIFFERS: ")]
    assert len(wrong) == 2 * len(checkpoints), "full and never run all layers"
    assert f"DIFFERS: {checkpoints[0]} layers, 1 sequences: tokens ran [" in done.stdout


def test_a_bundle_for_tensorrt_is_refused(tiny_llama: TinyLlama) -> None:
    with pytest.raises(SystemExit, match="holds no networks for CUDA: export it with --target cuda"):
        gpu_exits.main([str(tiny_llama.exact), "--device", "cpu"])


def test_what_is_drawn_has_the_type_and_place_of_what_was_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_exits, "PIECE", 1 << 10)
    weights = {
        "x.norm": (TensorProto.FLOAT16, (600,), 0, 1200),
        "x.dense": (TensorProto.BFLOAT16, (40, 50), 4096, 4000),
        "x.blocks": (TensorProto.UINT8, (64, 2, 16), 8192, 2048),
        "x.scales": (TensorProto.FLOAT, (64, 8), 12288, 2048),
        "x.ids": (TensorProto.INT64, (200,), 16384, 1600),
    }
    initializers = []
    for name, (kind, dims, offset, length) in weights.items():
        tensor = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", SEGMENTS_WEIGHTS_FILE), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        initializers.append(tensor)
    nodes = [helper.make_node("MatMulNBits", ["x", "x.blocks", "x.scales"], ["y"], domain="com.microsoft")]
    graph = helper.make_graph(nodes, "network", [], [], initializers)
    onnx.save(helper.make_model(graph), tmp_path / "segment_00.onnx")
    file = tmp_path / SEGMENTS_WEIGHTS_FILE
    gpu_exits.draw(file, 20_000, gpu_exits.weights_of(tmp_path), "cpu")
    content = file.read_bytes()
    assert len(content) == 20_000
    assert [name.name for name in tmp_path.glob("*.part")] == []

    norm = np.frombuffer(content[:1200], np.float16).astype(float)
    assert (abs(norm.mean() - 1) < 0.01, 0.01 < norm.std() < 0.03) == (True, True)
    dense = (np.frombuffer(content[4096:8096], np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert (abs(dense.mean()) < 0.01, 0.01 < dense.std() < 0.03) == (True, True)
    assert len(set(content[8192:10240])) > 200
    scales = np.frombuffer(content[12288:14336], np.float32)
    assert (scales.min() > 0, scales.max() < 0.01) == (True, True)
    assert not any(content[16384:17984])
    gpu_exits.draw(file, 20_000, {}, "cpu")
    assert file.read_bytes() == content, "what is there stays"
