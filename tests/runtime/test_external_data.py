"""The weights that a network keeps in another file are found as `onnx` finds them; damaged networks are refused."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_model import TinyModel

from tide_export.runtime.onnxruntime.external_data import external_tensors


@pytest.fixture(scope="module")
def network(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path: Path = tmp_path_factory.mktemp("network") / "model.onnx"
    onnx.save(tiny.graph(), path, save_as_external_data=True, location="weights", size_threshold=100)
    return path.read_bytes()


def test_every_tensor_is_that_of_onnx(network: bytes) -> None:
    graph = onnx.load_model_from_string(network).graph
    expected = []
    for one in graph.initializer:
        place = {entry.key: entry.value for entry in one.external_data}
        if place:
            where = (place["location"], int(place.get("offset", 0)))
            expected.append((one.name, one.data_type, tuple(one.dims), *where))
    assert len(expected) > 10
    assert external_tensors(network) == expected


def test_damaged_networks_are_value_errors_or_read(network: bytes) -> None:
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(network[: random.integers(len(network))])
        for at in random.integers(0, len(damaged), 3):
            damaged[at] = random.integers(256)
        try:
            external_tensors(bytes(damaged))
        except ValueError:  # of which UnicodeDecodeError is one
            refused += 1
    assert refused > 50
