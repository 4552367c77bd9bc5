"""Writes bundles of the table of table.h, whose files name the networks that the simulated ONNX Runtime has."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tide_export.bundle.drafter_field import DrafterInfo
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.model_info import LoraInfo, LoraTarget, ModelInfo, StateInfo
from tide_export.bundle.store import write_manifest

SEGMENTS, VOCABULARY, CONTEXT, WIDTH, UNDO, DRAFTED = 3, 24, 112, 2, 4, 20  # as in table.h
ADAPTERS = {"one": 1, "two": 2}


def write_bundles(folder: Path) -> None:
    """Writes the bundles "plain" and "recurrent", and for each the adapters "one" and "two" beside it."""
    for name in ("plain", "recurrent"):
        write_bundle(folder / name, name == "recurrent")
        for adapter, number in ADAPTERS.items():
            write_adapter(folder / f"{name}-{adapter}", number)


def write_bundle(folder: Path, recurrent: bool) -> None:
    kind = " recurrent" if recurrent else ""
    segments = {f"batch/segment_{k:02}.onnx": f"segment {k}{kind}" for k in range(SEGMENTS)}
    files = {"model.onnx": "no graph", "batch/head.onnx": "head", "drafter.onnx": "drafter", **segments}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    targets = tuple(LoraTarget(f"layers.{k}.q", (k,), WIDTH, WIDTH) for k in range(SEGMENTS))
    states = tuple(StateInfo(k, 0, (CONTEXT + 1,), UNDO) for k in range(SEGMENTS))
    model = ModelInfo(
        name="table",
        architecture="TableForCausalLM",
        weights_sha256="0" * 64,
        num_layers=SEGMENTS,
        hidden_size=WIDTH,
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        eos_token_ids=(0,),
        kv_shapes=((1, 1),) * SEGMENTS,
        states=states if recurrent else None,
        lora=LoraInfo(1, targets),
    )
    manifest = Manifest(
        model=model,
        checkpoints=tuple(range(1, SEGMENTS)),
        thresholds=(0.8,) * (SEGMENTS - 1),
        min_layers=0,
        max_pending=8,
        weights="fp32",
        targets=("onnxruntime",),
        opset=23,
        inputs=(),
        outputs=(),
        calibration=None,
        versions={},
        created="",
        drafter=DrafterInfo("0" * 64, f"0-{DRAFTED - 1}", (0.7,) * 8, 64, WIDTH, (), (1, 1)),
    )
    write_manifest(folder, manifest)


def write_adapter(folder: Path, number: int) -> None:
    """An adapter whose row of numbers has another sum than those of others."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "lora_alpha": 1, "r": 1, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    down, up = np.full((1, WIDTH), number, np.float32), np.full((WIDTH, 1), 10 * number, np.float32)
    module = "base_model.model.layers.{}.q.lora_{}.weight"
    matrices = {"A": down, "B": up}
    save_file(
        {module.format(k, part): matrix for k in range(SEGMENTS) for part, matrix in matrices.items()},
        folder / "adapter_model.safetensors",
    )
