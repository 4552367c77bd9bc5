"""Refuses a finished bundle whose graph does not equal the source model.

`pipeline.flow` calls `model_references` while the source model is loaded, and `check_export` on the finished folder
after the model is freed, so that two copies of the weights are never in memory. `onnx.checker` checks the graph with
shape inference. Then the batch networks are compared with the Hugging Face model (full depth) and the oracle (exits,
pending tokens) on two prompts and the tokens after them, one by one from the K/V cache: a short prompt, and a long one
that exceeds the model's sliding windows if the model is small enough. Segment networks are compared in the same way;
both also on both prompts in one batch, and the graph, without our library, on the long one. `validate` checks more, on
real text.
"""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from tide_export.bundle.file_names import GRAPH_FILE, network_file
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.opened import open_bundle
from tide_export.common.memory import return_free_memory
from tide_export.errors import GraphError
from tide_export.lower.onnxruntime.layers import inline_layers
from tide_export.model.source import SourceModel
from tide_export.names.networks import AFTER_SEGMENTS, segment_name
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import open_engine
from tide_export.runtime.stepping import Batch
from tide_export.thresholds.pareto import constant_routers
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.batch_parity import compare_batch
from tide_export.verify.oracle import oracle
from tide_export.verify.parity import TOLERANCES, UNDECIDED_GAP, Check, Stepped, Tolerance, compare
from tide_export.verify.quantized import graph_engines
from tide_export.verify.references import References, compute_references
from tide_export.verify.step_graph import StepGraph

logger = logging.getLogger("tide_export")

SHORT_PROMPT = 3
LONG_PROMPT = 48
BEYOND = 8  # tokens by which the long prompt exceeds the longest window
NEW_TOKENS = 12
MAX_PENDING = 3

# Limits of one pass over the long prompt: three passes take half a minute on two cores.
MULTIPLICATIONS = 3e11
LOGIT_BYTES = 2**30


def model_references(source: SourceModel, routers: RouterSet, manifest: Manifest, graph: ir.Model) -> list[References]:
    """Computes the expected output from the source model, which can then be freed.

    Args:
        graph: the lowered graph; its sliding windows determine the length of the long prompt.
    """
    context = manifest.model.context_length or 2**31
    steps = max(1, min(NEW_TOKENS, context - 1))
    lengths = (prompt_length(source, context, windows_of(graph, source)), SHORT_PROMPT)
    texts = [_prompt(min(length, context - steps) + steps - 1, manifest.model.vocab_size) for length in lengths]
    prompts = [text[: len(text) - steps + 1] for text in texts]
    thresholds = dividing_thresholds(source, routers, prompts[0][-LONG_PROMPT:])
    references = [
        compute_references(source, routers, prompt, text[len(prompt) :], thresholds)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return_free_memory()
    return references


def check_export(folder: Path, manifest: Manifest, references: Sequence[References]) -> None:
    """Compares the graph and the networks of a bundle with the `references` of its model.

    Raises:
        GraphError: a graph is malformed or differs; names the first difference.
    """
    parts = [*(segment_name(k) for k in range(len(manifest.segment_sizes))), *AFTER_SEGMENTS]
    files = [GRAPH_FILE, *(map(network_file, parts) if manifest.networks is not None else ())]
    try:
        for file in files:
            onnx.checker.check_model(str(folder / file))
            _check_types(folder / file)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError(f"the exported graph is malformed: {str(error).splitlines()[0]}") from error
    bundle = open_bundle(folder, verify=False)
    for name, engine, deployed, as_deployed in graph_engines(bundle, None):
        _compare(name or "networks", engine, references, deployed)
        if not as_deployed:
            del engine  # before the next is opened: each packs the weights anew
    _compare("graph", StepGraph(bundle), references[:1], deployed)
    if manifest.networks is not None and manifest.networks.weights != "bf16":  # which no CPU engine runs
        networks = open_engine(bundle, "cpu-networks")
        tolerance = TOLERANCES[manifest.networks.precision]
        _compare("segment networks", networks, references, tolerance)
        if manifest.networks.max_batch_size > 1:
            batch = networks.start_batch(manifest.compaction_threshold, len(references))
            _compare_batch("segment networks with several sequences", batch, manifest, references, tolerance)
            del batch
        del networks
    if engine.max_batch_size > 1:
        batch = engine.start_batch(manifest.compaction_threshold, len(references))
        _compare_batch("several sequences", batch, manifest, references, deployed)


def _check_types(path: Path) -> None:
    """Infers all types and shapes, with functions inlined: inside them the checker knows no ORT operators."""
    model = ir.load(path)
    inline_layers(model)
    onnx.shape_inference.infer_shapes(ir.to_proto(model), check_type=True, strict_mode=True)


def _compare(part: str, engine: Stepped, references: Sequence[References], tolerance: Tolerance) -> None:
    off = [NEVER_EXIT] * len(engine.manifest.checkpoints)
    for mode, thresholds in (("full", off), ("exit", references[0].thresholds)):
        check = Check(mode, mode, thresholds, tolerance)
        for reference in references:
            compare(engine, reference, MAX_PENDING, check)
        _require(check, part, engine.manifest)


def _compare_batch(
    part: str, batch: Batch, manifest: Manifest, references: Sequence[References], tolerance: Tolerance
) -> None:
    check = Check("exit", "exit", references[0].thresholds, tolerance)
    compare_batch(batch, MAX_PENDING, references, manifest.segment_sizes, check)
    _require(check, part, manifest)


def _require(check: Check, part: str, manifest: Manifest) -> None:
    if not check.holds:
        wrong_logits = f"logits are off by {check.max_error:.2g}, where the largest is {check.largest_logit:.2g}"
        reason = check.differences[0] if check.differences else wrong_logits
        raise GraphError(
            f"the exported {part} of {manifest.model.name} ({manifest.model.architecture}) does not equal the model "
            f"({'full depth' if check.mode == 'full' else 'with exits'}): {reason}"
        )


def windows_of(graph: ir.Model, source: SourceModel) -> set[int]:
    """Returns the sliding windows in tokens: the graph's, and the config's in case the graph lost it."""
    sizes = [node.attributes.get_int("local_window_size", -1) for node in graph.graph.all_nodes()]
    return {size for size in (*sizes, getattr(source.text_config, "sliding_window", None)) if size and size > 0}


def prompt_length(source: SourceModel, context: int, sliding: Collection[int]) -> int:
    """Returns the length of the long prompt: beyond the longest `sliding` window, if affordable.

    Logs a warning if it does not exceed a window within the model's context.
    """
    windows = [size for size in sliding if size + BEYOND + NEW_TOKENS <= context]
    wanted = max([LONG_PROMPT, *(size + BEYOND for size in windows)])
    weights = sum(parameter.numel() for parameter in source.model.parameters())
    affordable = int(min(MULTIPLICATIONS / weights, LOGIT_BYTES / (4 * source.vocab_size)))
    length = min(wanted, max(LONG_PROMPT, affordable))
    if windows and length <= max(windows):
        logger.warning(
            "the check of the graph reads %d tokens, too few to leave the sliding window of %d: "
            "run tide-export validate with longer prompts",
            length,
            max(windows),
        )
    return length


def dividing_thresholds(source: SourceModel, routers: RouterSet, ids: Sequence[int]) -> list[float]:
    """Returns thresholds at which some of the tokens of `ids` exit and some do not.

    Each is the middle of the widest gap between scores in their middle half. If a router gives all tokens the same
    score, the threshold is below it, and a warning names the router.
    """
    scores = oracle(source, routers, ids, [NEVER_EXIT] * len(routers.checkpoints)).scores.float().cpu()
    for sentence in constant_routers(scores.numpy(), routers.checkpoints):
        logger.warning("%s", sentence)
    thresholds = []
    for column in scores.sort(dim=0).values.T:
        middle = column[len(column) // 4 : -(len(column) // 4) or None]
        gaps = middle.diff()
        if not len(gaps) or gaps.max() < 10 * UNDECIDED_GAP:
            thresholds.append(float(column[0]) - 100 * UNDECIDED_GAP)
        else:
            widest = int(gaps.argmax())
            thresholds.append(float(middle[widest : widest + 2].mean()))
    return thresholds


def _prompt(length: int, vocabulary: int) -> list[int]:
    """Returns fixed token ids spread over the vocabulary."""
    return (np.arange(1, max(1, length) + 1) * 7919 % vocabulary).tolist()
