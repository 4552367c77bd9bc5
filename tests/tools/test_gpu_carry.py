"""`tools/checks/gpu_carry.py`: what is packed for a session on a lent GPU, and that a session finds it."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from drafters import drafting_copy, random_drafter

from tide_export.bundle.file_names import SEGMENTS_FOLDER, SEGMENTS_WEIGHTS_FILE, WEIGHTS_FILE
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.drafting.bundle import write_drafter
from tide_export.runtime.engine import load, open_engine


@pytest.fixture(scope="module")
def carry(session: ModuleType) -> ModuleType:
    import gpu_carry

    return gpu_carry


def test_packing_goes_on_where_it_was_cut_off_and_says_what_is_too_large(
    carry: ModuleType, session: ModuleType, tmp_path: Path, tiny_llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = []

    def export(model: str, bundle: Path, weights: str, routers: Path | None) -> None:
        exported.append((weights, routers and routers.parent.name))
        if exported == [("fp32", None), ("drafter", "fp32"), ("fp16", "fp32")]:
            raise KeyboardInterrupt
        shutil.copytree(tiny_llama.exact, bundle)

    def libraries(folder: Path, architectures: str) -> None:
        exported.append(("libraries", architectures))
        (folder / carry.KERNELS).touch()
        (folder / carry.PLUGINS).touch()

    def drafter(model: str, bundle: Path) -> None:
        exported.append(("drafter", bundle.name))
        model = open_bundle(bundle).manifest.model
        given = model.hidden_size, model.hidden_size, np.arange(0, model.vocab_size, 3)
        write_drafter(bundle, random_drafter(*given, weights_sha256=model.weights_sha256))

    monkeypatch.setattr(carry, "export_bundle", export)
    monkeypatch.setattr(carry, "train_drafter", drafter)
    monkeypatch.setattr(carry, "compile_libraries", libraries)
    folder = tmp_path / "carried"
    arguments = ["MODEL", "-o", str(folder), "--architectures", "90"]
    with pytest.raises(KeyboardInterrupt):
        carry.main(arguments)
    assert carry.main([*arguments, "--resume"]) == 0
    cuda = [(f"cuda-{weights}", "fp32") for weights in ("bf16", "fp16", "int4")]
    rest = [("fp16", "fp32"), ("bf16", "fp32"), *cuda, ("libraries", "90")]
    assert exported == [("fp32", None), ("drafter", "fp32"), ("fp16", "fp32"), *rest]
    assert carry.main([*arguments, "--resume", "--limit", "0.001"]) == 1
    assert len(exported) == 9
    given = session.brought(session.parsed(["-o", "x", "--carried", str(folder)]))
    assert (next(iter(given.bundles)), given.kernels) == ("fp32", folder / carry.KERNELS)
    assert given.plugins == folder / carry.PLUGINS
    assert given.shapes == {}
    drafting = sys.modules["gpu_steps"].drafter
    assert drafting(given.bundles["fp32"])() is None
    assert drafting(given.bundles["bf16"])() == "no drafter in bf16: gpu_carry.py packs one"


@pytest.mark.parametrize("own", [False, True])
def test_the_plugin_is_packed_with_or_without_tensorrt_s_headers(
    carry: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    headers = tmp_path / "trt" if own else carry.DECLARED
    (tmp_path / "trt" / "include").mkdir(parents=True)
    (tmp_path / "trt" / "include" / "NvInfer.h").touch()
    commands = []

    def run(*command: str) -> None:
        commands.append(command)
        if "--build" in command:
            (tmp_path / "build" / "plugins").mkdir(parents=True)
            for name in (carry.KERNELS, carry.PLUGINS):
                (tmp_path / "build" / "plugins" / name).touch()

    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path / "trt") if own else "")
    monkeypatch.setattr(carry, "run", run)
    carry.compile_libraries(tmp_path, "90")
    assert f"-DTENSORRT_ROOT={headers}" in commands[0]
    assert {"tide_kernels", "tide_plugins"} <= set(commands[1])
    assert (headers / "include" / "NvInfer.h").is_file()
    assert sorted(file.name for file in tmp_path.glob("*.so")) == [carry.KERNELS, carry.PLUGINS]
    assert not (tmp_path / "build").exists()


def test_the_step_of_the_drafter_passes_where_it_drafts_and_tokens_stay(plan: ModuleType, tmp_path: Path, tiny_llama):
    """On the CPU; and a bundle without a drafter does not pass."""
    program = [sys.executable, "-c", plan.DRAFTS]
    for bundle, words in (
        (drafting_copy(tiny_llama.exact, tmp_path), " accepted"),
        (tiny_llama.exact, "no drafts, or"),
    ):
        done = subprocess.run([*program, str(bundle), "cpu-networks"], capture_output=True, text=True, check=False)
        assert words in done.stdout + done.stderr
        assert (done.returncode == 0) == (words == " accepted")


def test_a_bundle_is_packed_without_what_a_session_does_not_read(carry: ModuleType, tmp_path: Path, tiny_llama) -> None:
    for name in ("fp32", "bf16"):
        shutil.copytree(tiny_llama.exact, tmp_path / name)
        carry.strip(tmp_path / name)
        files = set(open_bundle(tmp_path / name).manifest.files)
        assert "segments/head.onnx" in files
        assert any(file.startswith("batch/") for file in files) == (name == "fp32"), "lists are compared with its"
        assert (WEIGHTS_FILE in files) == (name == "fp32")
    prompt = [3, 5, 7]
    expected = load(tiny_llama.exact, provider="cpu").generate(prompt, max_new_tokens=4).tokens
    networks = open_engine(open_bundle(tmp_path / "bf16"), "cpu-networks")
    assert networks.generate(prompt, max_new_tokens=4).tokens == expected
    together = load(tmp_path / "fp32", provider="cpu").generate([prompt, prompt], max_new_tokens=4)
    assert [one.tokens for one in together] == [expected] * 2


def test_shapes_are_packed_without_weights_in_their_order(
    carry: ModuleType, session: ModuleType, tmp_path: Path, tiny_llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    for name in ("z-first", "a-second"):
        shutil.copytree(tiny_llama.exact, tmp_path / name)
        manifest = open_bundle(tmp_path / name).manifest
        write_manifest(tmp_path / name, replace(manifest, targets=("onnxruntime", "cuda")))
        shapes += ["--shape", str(tmp_path / name)]
    folder = tmp_path / "carried"
    for name in (*carry.WEIGHTS, *(carry.CUDA + weights for weights in carry.CUDA_WEIGHTS)):
        shutil.copytree(tiny_llama.exact, folder / "bundles" / name)
    monkeypatch.setattr(carry, "train_drafter", lambda *given: None)
    arguments = ["MODEL", "-o", str(folder), "--architectures", "", "--resume"]
    with pytest.raises(SystemExit, match="holds no networks for CUDA: export it with --target cuda"):
        carry.main([*arguments, "--shape", str(tiny_llama.exact)])
    assert carry.main([*arguments, *shapes]) == 0
    given = session.brought(session.parsed(["-o", "x", "--carried", str(folder)]))
    assert list(given.shapes) == ["0-z-first", "1-a-second"]
    for packed in given.shapes.values():
        assert not list(packed.rglob("*.data"))
        assert not (packed / "batch").exists()
        manifest = Manifest.from_json((packed / "tide.json").read_text())
        assert f"{SEGMENTS_FOLDER}/{SEGMENTS_WEIGHTS_FILE}" in manifest.files, "for its size"
        assert WEIGHTS_FILE not in manifest.files
