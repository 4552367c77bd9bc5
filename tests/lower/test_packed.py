"""The networks of a batch refer to the weights of the step graph, or are refused."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tide_export.bundle.file_names import WEIGHTS_FILE, batch_file
from tide_export.compose.cut import Pieces, check_positions
from tide_export.errors import GraphError, UnsupportedModelError
from tide_export.lower.onnxruntime.packed import INLINE_BYTES, _point_to
from tide_export.names.networks import HEAD, segment_name


def test_every_network_refers_to_the_weights_of_the_graph(demo_bundle: Path) -> None:
    files = [batch_file(part) for part in (*map(segment_name, range(4)), HEAD)]
    assert {file.relative_to(demo_bundle).as_posix() for file in demo_bundle.glob("batch/*")} == set(files)
    for file in files:
        assert (demo_bundle / file).stat().st_size < 500_000
        model = onnx.load(demo_bundle / file, load_external_data=False)
        outside = [weight for weight in model.graph.initializer if weight.external_data]
        assert {entry.value for weight in outside for entry in weight.external_data if entry.key == "location"} == {
            WEIGHTS_FILE
        }
        inside = sum(weight.ByteSize() for weight in model.graph.initializer if not weight.external_data)
        assert inside < INLINE_BYTES


def test_a_weight_that_the_graph_does_not_hold_is_refused() -> None:
    array = np.zeros(INLINE_BYTES // 4 + 1, np.float32)
    value = ir.Value(name="layers.0.weight", const_value=ir.tensor(array, name="layers.0.weight"))
    with pytest.raises(GraphError, match=r"layers\.0\.weight"):
        _point_to(value, None)


@pytest.mark.parametrize("as_data", [True, False])
def test_positions_counted_from_the_first_are_refused(as_data: bool) -> None:
    """`position_ids[0] + arange` is refused, a table read at every position is not."""
    states, positions, other = (ir.Value(name=name) for name in ("states", "position_ids", "other"))
    node = ir.node("Gather", [positions, other] if as_data else [other, positions])
    piece = ir.Graph([states, positions, other], node.outputs, nodes=[node], opset_imports={"": 23})
    pieces = Pieces((0, 1), piece, (piece,), piece, piece, (), ())
    if not as_data:
        check_positions(pieces)
        return
    with pytest.raises(UnsupportedModelError, match="one token's position"):
        check_positions(pieces)
