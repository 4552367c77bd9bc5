"""Networks for batches that are not what the manifest calls for, at the first list; one body for both runtimes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from cpp_engine import CppEngine

from tide_export import names
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import write_manifest
from tide_export.errors import BundleError
from tide_export.runtime.engine import load

FIRST, SECOND, THIRD = (names.batch_file(names.segment(k), names.BATCH_SIZES[0]) for k in range(3))
HEAD, SKIPPED = names.batch_file(names.HEAD), names.batch_file(names.skipped(1))
OTHER = r", but its manifest calls for \w+ \["
Damage = Callable[[Path], object]


def changed(file: str, change: Callable[[onnx.GraphProto], None]) -> Damage:
    def damage(bundle: Path) -> None:
        model = onnx.load(bundle / file, load_external_data=False)
        change(model.graph)
        (bundle / file).write_bytes(model.SerializeToString())

    return damage


def any_size(tensor: str, axis: int) -> Callable[[onnx.GraphProto], None]:
    """The input takes any size along an axis."""

    def change(graph: onnx.GraphProto) -> None:
        [entry] = [one for one in graph.input if one.name == tensor]
        entry.type.tensor_type.shape.dim[axis].dim_param = "any"

    return change


def omitted(tensor: str) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        graph.output.remove(next(one for one in graph.output if one.name == tensor))

    return change


def copied(source: str, target: str) -> Damage:
    return lambda bundle: (bundle / target).write_bytes((bundle / source).read_bytes())


KV = names.slot(names.past(0, "key"), 3)
DAMAGE: list[tuple[str, Damage, str]] = [
    ("exact", copied(FIRST, SECOND), r"segment_01\.onnx' has no input hidden_states, which its manifest calls for"),
    ("exact", copied(SECOND, THIRD), r"segment_02\.onnx' has no input past_key_values\.\d\.\w+\.slot_\d+, which its"),
    ("exact", changed(THIRD, omitted(names.EXIT_STATES)), r"segment_02\.onnx' has no output exit_states, which its"),
    (
        "exact",
        changed(SECOND, any_size(names.HIDDEN_STATES, 2)),
        rf"input hidden_states is .*{OTHER}1, 'tokens', ",
    ),
    ("exact", changed(FIRST, any_size(names.SLOT_TOKENS, 0)), rf"segment_00\.onnx': input slot_tokens is .*{OTHER}8\]"),
    (
        "exact",
        changed(FIRST, any_size(KV, 3)),
        rf"input past_key_values\.0\.key\.slot_\d+ is .*{OTHER}1",
    ),
    (
        "exact",
        changed(HEAD, any_size(names.EXIT_STATES, 2)),
        rf"input exit_states is .*{OTHER}1, 'tokens', 0",
    ),
    ("exact", copied(FIRST, HEAD), r"head\.onnx' has no input exit_states, which its manifest calls for"),
    (
        "propagating",
        changed(SKIPPED, any_size(names.HIDDEN_STATES, 2)),
        rf"input hidden_states is .*{OTHER}1, 'tokens', \d",
    ),
    ("propagating", copied(HEAD, SKIPPED), r"has no input hidden_states, which its manifest calls for"),
]


@pytest.fixture(params=["python", "cpp"])
def opens(request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    if request.param == "python":
        return lambda bundle: load(bundle, provider="cpu", threads=1)
    return request.getfixturevalue("open_cpp")


@pytest.mark.parametrize(("kind", "damage", "sentence"), DAMAGE, ids=[sentence for *_, sentence in DAMAGE])
def test_lists_are_refused(
    opens: Callable[[Path], Any], tiny_llama, tmp_path: Path, kind: str, damage: Damage, sentence: str
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(getattr(tiny_llama, kind), bundle)
    damage(bundle)
    write_manifest(bundle, Manifest.from_json((bundle / names.MANIFEST_FILE).read_text()))
    engine = opens(bundle)
    many = engine.generate_batch if isinstance(engine, CppEngine) else engine.generate
    for _ in range(2):
        with pytest.raises(BundleError, match=sentence):
            many([[1], [2]], max_new_tokens=2)
    assert len(engine.generate([1], max_new_tokens=2, stop_token_ids=[]).tokens) == 2
