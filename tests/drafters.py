"""Drafters with random weights, and bundles with one."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from tide_export.bundle.file_names import DRAFTER_FILE
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.compose.drafter_networks import compose_drafter
from tide_export.drafting.bundle import write_drafter
from tide_export.drafting.files import drafter_info, put_before, quantized
from tide_export.drafting.network import DrafterNetwork
from tide_export.drafting.pieces import pieces_of
from tide_export.graph.builder import GraphBuilder, Weights
from tide_export.graph.rewriting import FLOAT, INT64, typed_value
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.names import paged_drafter as names
from tide_export.routers.drafter_weights import CONFIDENCES, Drafter, Shape

ROWS = 64  # of a sequence


def random_drafter(state: int, embedding: int, tokens: np.ndarray, bias: bool = False, **changes: Any) -> Drafter:
    """A drafter with random weights of which none is without effect."""
    shape, generator = Shape.of(state, embedding), np.random.default_rng(4)

    def normal(*size: int) -> np.ndarray:
        return generator.standard_normal(size).astype(np.float32)

    arrays = {
        name: normal(*size) * size[1] ** -0.5 if len(size) == 2 else 1 + 0.2 * normal(*size)
        for name, size in shape.arrays.items()
    }
    head = normal(len(tokens), state) * 2 * state**-0.5
    acceptance = (0.9,) * len(CONFIDENCES)  # so that it drafts until it has shown otherwise
    drafter = Drafter(shape, tokens, head, normal(len(tokens)) if bias else None, arrays, acceptance, "0" * 64)
    return replace(drafter, **changes)


def network_of(drafter: Drafter) -> DrafterNetwork:
    """The network that training has, with a drafter's weights."""
    arrays = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in drafter.arrays.items()}
    bias = None if drafter.bias is None else torch.from_numpy(np.array(drafter.bias, np.float32))
    return DrafterNetwork(drafter.shape, arrays, torch.from_numpy(np.array(drafter.head, np.float32)), bias)


def with_drafter(bundle: Path, drafter: Drafter, rows: int = ROWS, **changes: Any) -> Path:
    """Puts `drafter` into a bundle without weights outside its graph; returns the bundle's path.

    Args:
        changes: of the manifest's entry, to one that is not the drafter's.
    """
    manifest = open_bundle(bundle, verify=False).manifest
    vocabulary = manifest.model.vocab_size
    pieces = pieces_of(drafter, rows)
    model = lower_for_onnxruntime(compose_drafter(pieces), quantized(pieces))
    builder = GraphBuilder("embedding", Weights())
    table = np.random.default_rng(6).standard_normal((vocabulary, drafter.shape.embedding)).astype(np.float32)
    ids = typed_value(names.INPUT_IDS, INT64, [1, "tokens"])
    inputs = [builder.weights.float32("embedding", table), ids]
    rows_of = builder.op("Gather", inputs, dtype=FLOAT, shape=[1, "tokens", drafter.shape.embedding])
    put_before(model, builder.model("embedding", [ids], {"embeddings": rows_of}))
    ir.save(model, bundle / DRAFTER_FILE)
    info = replace(drafter_info(pieces, manifest.model.weights_sha256, None), **changes)
    write_manifest(bundle, replace(manifest, drafter=info))
    return bundle


def drafting_copy(bundle: Path, folder: Path) -> Path:
    """A copy of a bundle, in `folder`, with a random drafter of the right widths, as `write_drafter` puts it there."""
    copy = folder / "drafting"
    shutil.copytree(bundle, copy)
    model = open_bundle(copy, verify=False).manifest.model
    tokens = np.arange(0, model.vocab_size, 3)
    width = model.hidden_size
    write_drafter(copy, random_drafter(width, width, tokens, weights_sha256=model.weights_sha256))
    return copy
