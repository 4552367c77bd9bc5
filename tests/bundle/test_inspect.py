"""`inspect`: everything a bundle says about itself, as JSON and as text, without an engine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tide_export.bundle.file_names import WEIGHTS_FILE
from tide_export.bundle.inspect import describe, render
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.errors import BundleError


def test_segments_cover_every_layer_once(demo_bundle: Path):
    segments = describe(demo_bundle)["segments"]
    assert [(s["first_layer"], s["last_layer"]) for s in segments] == [(0, 2), (3, 5), (6, 8), (9, 11)]
    assert [s.get("checkpoint") for s in segments] == [3, 6, 9, None]


def test_json_says_what_the_manifest_says(demo_bundle: Path, capsys):
    assert main(["inspect", str(demo_bundle), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    manifest = open_bundle(demo_bundle).manifest
    assert answer["model"]["weights_sha256"] == manifest.model.weights_sha256
    assert [tensor["name"] for tensor in answer["inputs"]] == [tensor.name for tensor in manifest.inputs]
    assert set(answer["files"]) == set(manifest.files)
    assert answer["versions"] == manifest.versions
    assert answer["calibration"] == manifest.calibration
    assert answer["kv_bytes_per_token"] == 12 * 2 * 2 * 32 * 4  # layers, K and V, heads, width, float32


def test_text_names_what_matters(demo_bundle: Path, capsys):
    assert main(["inspect", str(demo_bundle)]) == 0
    out = capsys.readouterr().out
    manifest = open_bundle(demo_bundle).manifest
    for word in ("LlamaForCausalLM", "0-2", "9 layers", "pages.{0..11}.key", "exit_thresholds", "precision"):
        assert word in out
    for name, info in manifest.files.items():
        assert name in out
        assert info.sha256[:12] in out


def test_it_says_whether_bits_depend_on_company(demo_bundle: Path):
    described = describe(demo_bundle)
    assert "the same bits as alone, in lists and servers" in render(described)
    integers = {"method": "rtn", "bits": 4, "block_size": 32, "symmetric": True, "accuracy_level": 4}
    assert "lists and servers" in render(described | {"quantization": integers})
    assert "MatMulNBits, of zero points" in render(described | {"quantization": integers | {"symmetric": False}})
    assert "MatMulNBits of accuracy level 0" in render(described | {"quantization": integers | {"accuracy_level": 0}})


def test_a_checkpoint_below_min_layers_is_shown_as_off(demo_bundle: Path):
    described = describe(demo_bundle)
    described["segments"][0]["exits"] = False
    assert "off (min_layers)" in render(described)


def test_routers_without_a_record_are_said_to_have_none(demo_bundle: Path):
    assert "none recorded" in render(describe(demo_bundle) | {"calibration": None})


@pytest.mark.parametrize("report", [[1], {"3": 4}, "none", {}])
def test_a_record_of_another_form_is_left_out(demo_bundle: Path, report: object):
    shown = render(describe(demo_bundle) | {"calibration": {"dataset": "wikitext", "report": report}})
    assert "dataset: wikitext" in shown


def test_damage_is_found_unless_told_not_to_look(demo_bundle: Path, tmp_path: Path):
    copy = Path(shutil.copytree(demo_bundle, tmp_path / "copy"))
    data = bytearray((copy / WEIGHTS_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(BundleError, match="corrupt"):
        describe(copy)
    assert "sha256 not checked" in render(describe(copy, verify=False))


def test_needs_no_engine_and_no_torch(demo_bundle: Path):
    code = (
        "import sys; from tide_export.cli.main import main\n"
        "code = main(['inspect', sys.argv[1]])\n"
        "heavy = {'torch', 'onnxruntime', 'onnx', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(demo_bundle)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
