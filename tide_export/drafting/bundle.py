"""Writes a drafter into a bundle: a network that finds its embedding in the bundle's own weights.

The nodes that look up the embedding are those of the bundle's graph.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from tide_export import names
from tide_export.bundle.manifest import Quantization
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.bundle.store import replace_file
from tide_export.compose.drafter import EMBEDDINGS, compose_drafter
from tide_export.errors import DraftError
from tide_export.files import TEMPORARY, failure
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.model.quantized_weights import QuantizedWeights
from tide_export.quantize.rounding import round_to_nearest
from tide_export.quantize.settings import INT8_MATMULS
from tide_export.routers.drafter import Drafter
from tide_export.trace.rewriting import FLOAT, present, replace_value

logger = logging.getLogger("tide_export")

MAX_TOKENS = 2048  # rows of a sequence, at most: a drafter begins anew after these
QUANTIZATION = Quantization("rtn", bits=4, block_size=16, symmetric=True, accuracy_level=INT8_MATMULS)


def check_bundle(bundle: str | os.PathLike[str], weights_sha256: str | None = None, width: int | None = None) -> Bundle:
    """Opens a bundle that a drafter can be written into.

    Args:
        weights_sha256: of the model that the drafter is trained for; None: not known yet.
        width: of that model's embeddings; None: not known yet.

    Raises:
        BundleError: it is missing or damaged.
        DraftError: it is of another model, propagates K/V, or has no embedding to look up.
    """
    opened = open_bundle(Path(bundle), verify=False)
    manifest = opened.manifest
    if manifest.kv_cache_strategy == "propagate":
        raise DraftError(
            f"bundle {bundle} propagates K/V, and drafts need an exact cache: export it with kv_cache_strategy exact"
        )
    if weights_sha256 is not None and manifest.model.weights_sha256 != weights_sha256:
        raise DraftError(f"bundle {bundle} was exported from another model than the one given: its weights differ")
    shape = _embedding(opened).graph.outputs[0].shape
    if width is not None and (shape is None or shape[-1] != width):
        raise DraftError(
            f"bundle {bundle} looks up {'unknown' if shape is None else shape[-1]} numbers a token first, not the "
            f"{width} of the model's embedding: a drafter cannot read it"
        )
    return opened


def write_drafter(bundle: str | os.PathLike[str], drafter: Drafter) -> None:
    """Composes the network of `drafter` and writes it into the bundle, in place of one that is there.

    Raises:
        BundleError: the bundle cannot be written to, or was changed meanwhile; it is then as it was, or has no drafter.
        DraftError: as `check_bundle`; or there is no room on the disk.
    """
    opened = check_bundle(bundle, drafter.weights_sha256, drafter.shape.embedding)
    context = opened.manifest.model.context_length or MAX_TOKENS
    model = compose_drafter(drafter, min(context, MAX_TOKENS))
    lower_for_onnxruntime(model, quantized(drafter))
    put_before(model, _embedding(opened))
    temporary = opened.path / f".{names.DRAFTER_FILE}.{TEMPORARY}"
    try:
        ir.save(model, temporary)
        drafting = opened.manifest.drafting
        plain = replace(opened.manifest, drafter=None, drafting=drafting and replace(drafting, drafter_cost=None))
        replace_file(opened, names.DRAFTER_FILE, temporary, replace(plain, drafter=dict(drafter.provenance)), plain)
    except OSError as error:
        raise DraftError(f"cannot write the drafter into {bundle}: {failure(error, opened.path)}") from error
    finally:
        temporary.unlink(missing_ok=True)


def quantized(drafter: Drafter, settings: Quantization = QUANTIZATION) -> QuantizedWeights:
    """Rounds the matrices of a drafter to integers."""
    matrices = drafter.matrices.items()
    return QuantizedWeights(settings, {name: round_to_nearest(matrix, settings) for name, matrix in matrices})


def _embedding(bundle: Bundle) -> ir.Model:
    """The first nodes of the bundle's graph, which make float32 embeddings of token ids.

    Raises:
        DraftError: they look up more than the ids.
    """
    model = ir.load(bundle.path / names.GRAPH_FILE)
    (ids,) = (value for value in model.graph.inputs if value.name == names.INPUT_IDS)
    values, nodes = {ids}, list[ir.Node]()
    for node in model.graph:
        read = [value for value in node.inputs if value is not None and value.const_value is None]
        if not read or not set(read) <= values:
            continue
        nodes.append(node)
        values |= set(node.outputs)
        if node.outputs[0].dtype == FLOAT:
            break
    if not nodes or nodes[-1].outputs[0].dtype != FLOAT:
        raise DraftError(f"bundle {bundle.path} has no single lookup of its embedding: a drafter cannot read it")
    for node in list(model.graph):
        if node not in nodes:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
    output = nodes[-1].outputs[0]
    model.graph.outputs.clear()
    model.graph.outputs.append(output)
    model.graph.remove([node for node in model.graph if node not in nodes])
    return model


def put_before(model: ir.Model, embedding: ir.Model) -> None:
    """Makes `model` read token ids in place of the embeddings that `embedding` makes of them."""
    output = embedding.graph.outputs[0]
    graph = model.graph
    (placeholder,) = (value for value in graph.inputs if value.name == EMBEDDINGS)
    (ids,) = (value for value in embedding.graph.inputs if value.name == names.INPUT_IDS)
    nodes = list(embedding.graph)
    weights = [
        value for value in embedding.graph.initializers.values() if any(node in nodes for node, _ in value.uses())
    ]
    embedding.graph.outputs.clear()
    embedding.graph.remove(nodes)
    for weight in weights:
        embedding.graph.initializers.pop(str(weight.name))
        graph.initializers.add(weight)
    replace_value(placeholder, output)
    graph.insert_before(present(next(iter(graph))), nodes)
    embedding.graph.inputs.remove(ids)
    ids.shape = ir.Shape([1, *(placeholder.shape or [])[1:2]])
    graph.inputs[list(graph.inputs).index(placeholder)] = ids
