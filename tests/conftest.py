"""Fixtures of the whole suite: the demo model, one exported demo bundle for all workers, tiny models of many
families."""

import fcntl
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKPOINTS = (3, 6, 9)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The trained 12-layer Llama that ships with the repository."""
    return ROOT / "demo" / "demo-llama"


@pytest.fixture(scope="session")
def demo_source(demo_model: Path):
    from tide_export.model import load_model

    return load_model(str(demo_model))


@pytest.fixture(scope="session")
def demo_bundle(demo_model: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The demo model exported with checkpoints 3, 6, 9 and briefly calibrated routers; made once for all workers.

    It has the networks for TensorRT too, and no engines.
    """
    from tide_export.config import TideConfig
    from tide_export.pipeline import export

    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent
    bundle = shared / "demo-bundle"
    with (shared / "demo-bundle.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not bundle.exists():
            config = TideConfig(
                checkpoints=CHECKPOINTS,
                min_layers=3,
                calibration_dataset=str(ROOT / "calibration" / "text" / "python-stdlib.jsonl"),
                calibration_samples=40,
                calibration_length=256,
                router_epochs=8,
            )
            # With segment networks, as a machine without TensorRT makes them.
            export(str(demo_model), bundle, config=config, targets=("tensorrt",), engines=False)
    return bundle


@pytest.fixture(scope="session")
def demo_text_ids(demo_model: Path) -> list[int]:
    """1000 tokens of source code that the routers were not calibrated on."""
    import json

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    ids: list[int] = []
    for line in (ROOT / "calibration" / "text" / "python-stdlib-validation.jsonl").read_text().splitlines():
        ids += tokenizer.encode(json.loads(line)["text"]).ids
    return ids[:1000]


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    """No test may depend on the network: a hub lookup fails at once instead of waiting for a time-out."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"
