"""The last gate before a bundle is put in place: the written graph must say what the source model says.

Called by `pipeline.flow`: `ask_model` while the source model is there, `check_export` on the finished folder, when it
is not: the model and ONNX Runtime's copy of its weights are never in memory at the same time. The graph is checked by
`onnx.checker` with shape inference, then loaded in ONNX Runtime and compared with the HuggingFace model (full depth)
and the oracle (exits, tokens that wait and catch up) on two prompts and the tokens after them, one by one from the K/V
cache: a long prompt that reaches behind the model's sliding windows where a large model makes that affordable, and a
short one. Segment networks go through the same, and they and the networks for batches take both prompts together.
`validate` does the same at length and on real text.
"""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from tide_export import names
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.store import Bundle
from tide_export.errors import GraphError
from tide_export.model.source import SourceModel
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.branched.backend import empty_batch
from tide_export.runtime.engine import Engine
from tide_export.runtime.onnxruntime.segments import open_segments
from tide_export.runtime.packed.networks import BatchNetworks
from tide_export.runtime.sequence import Batch
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.batch_parity import compare_together
from tide_export.verify.oracle import oracle
from tide_export.verify.parity import FORGIVEN_GAP, TOLERANCES, Answers, Check, Tolerance, ask, compare
from tide_export.verify.quantized import computes_in_float32, graph_engines

logger = logging.getLogger("tide_export")

SHORT_PROMPT = 3
LONG_PROMPT = 48
BEHIND = 8  # tokens a prompt reaches behind the last window
NEW_TOKENS = 12
MAX_PENDING = 3

# What one pass over the long prompt may cost, of which there are three: half a minute on two cores for all, and memory.
MULTIPLICATIONS = 3e11
LOGIT_BYTES = 2**30


def ask_model(source: SourceModel, routers: RouterSet, manifest: Manifest, graph: ir.Model) -> list[Answers]:
    """What the graph must say, from the source model alone, so that it can be let go before the graph is loaded.

    Args:
        graph: the lowered graph; its sliding windows say how long the longer text must be.
    """
    context = manifest.model.context_length or 2**31
    steps = max(1, min(NEW_TOKENS, context - 1))
    lengths = (prompt_length(source, context, windows_of(graph, source)), SHORT_PROMPT)
    texts = [_prompt(min(length, context - steps) + steps - 1, manifest.model.vocab_size) for length in lengths]
    prompts = [text[: len(text) - steps + 1] for text in texts]
    thresholds = dividing_thresholds(source, routers, prompts[0][-LONG_PROMPT:])
    return [
        ask(source, routers, prompt, text[len(prompt) :], thresholds, manifest.kv_cache_strategy)
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def check_export(folder: Path, manifest: Manifest, answers: Sequence[Answers]) -> None:
    """Refuses a bundle whose graph is malformed or differs from the model, which gave `answers` (`ask_model`).

    Raises:
        GraphError: saying how it differs.
    """
    parts = [*(names.segment(k) for k in range(len(manifest.segment_sizes))), names.HEAD]
    files = [names.GRAPH_FILE, *(map(names.network_file, parts) if manifest.networks is not None else ())]
    try:
        for file in files:
            onnx.checker.check_model(str(folder / file), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError(f"the exported graph is malformed: {str(error).splitlines()[0]}") from error
    bundle = Bundle(folder, manifest)
    for prefix, engine, tolerance in graph_engines(bundle, None):
        _compare(prefix.strip() or "graph", engine, answers, tolerance)
    del engine
    options = (answers[0].thresholds, MAX_PENDING, manifest.compaction_threshold)
    if manifest.networks is not None and manifest.networks.weights != "bf16":  # which no CPU engine runs
        networks = Engine(bundle, open_segments(bundle))
        tolerance = TOLERANCES[manifest.networks.weights]
        _compare("networks", networks, answers, tolerance)
        if manifest.networks.max_batch_size > 1:
            batch = networks.start_batch(*options, len(answers))
            _compare_together("networks with several sequences", batch, manifest, answers, tolerance)
            del batch
        del networks
    if names.batch_file(names.HEAD) in manifest.files:
        sessions = BatchNetworks(bundle, None).sessions(len(answers))
        tolerance = TOLERANCES["fp32" if computes_in_float32(bundle) else "int8 products"]
        together = empty_batch(sessions, manifest, *options)
        _compare_together("networks for batches", together, manifest, answers, tolerance)


def _compare(what: str, engine: Engine, answers: Sequence[Answers], tolerance: Tolerance) -> None:
    """One engine at a time is in memory: the caller holds none."""
    off = [NEVER_EXIT] * len(engine.manifest.checkpoints)
    for name, thresholds in (("full", off), ("exit", answers[0].thresholds)):
        check = Check(name, thresholds, tolerance=tolerance)
        for one in answers:
            compare(engine, one, name == "exit", MAX_PENDING, check)
        _require(check, what, engine.manifest)


def _compare_together(
    what: str, batch: Batch, manifest: Manifest, answers: Sequence[Answers], tolerance: Tolerance
) -> None:
    check = Check("exit", answers[0].thresholds, tolerance=tolerance)
    compare_together(batch, answers, manifest.segment_sizes, check)
    _require(check, what, manifest)


def _require(check: Check, what: str, manifest: Manifest) -> None:
    if not check.holds:
        wrong_logits = f"logits are off by {check.max_error:.2g}, where the largest is {check.largest_logit:.2g}"
        reason = check.differences[0] if check.differences else wrong_logits
        raise GraphError(
            f"the exported {what} of {manifest.model.name} ({manifest.model.architecture}) does not equal the model "
            f"({'full depth' if check.name == 'full' else 'with exits'}): {reason}"
        )


def windows_of(graph: ir.Model, source: SourceModel) -> set[int]:
    """Sliding windows in tokens: those the graph has and the one the model's config speaks of, lest one was lost."""
    sizes = [node.attributes.get_int("local_window_size", -1) for node in graph.graph.all_nodes()]
    return {size for size in (*sizes, getattr(source.text_config, "sliding_window", None)) if size and size > 0}


def prompt_length(source: SourceModel, context: int, sliding: Collection[int]) -> int:
    """Tokens of the long prompt: enough to leave the longest of the `sliding` windows, as far as they can be paid for.

    Logs a warning where a window within the model's context is not left.
    """
    windows = [size for size in sliding if size + BEHIND + NEW_TOKENS <= context]
    wanted = max([LONG_PROMPT, *(size + BEHIND for size in windows)])
    weights = sum(parameter.numel() for parameter in source.model.parameters())
    paid = int(min(MULTIPLICATIONS / weights, LOGIT_BYTES / (4 * source.vocab_size)))
    length = min(wanted, max(LONG_PROMPT, paid))
    if windows and length <= max(windows):
        logger.warning(
            "the check of the graph reads %d tokens, too few to leave the sliding window of %d: "
            "run tide-export validate with longer prompts",
            length,
            max(windows),
        )
    return length


def dividing_thresholds(source: SourceModel, routers: RouterSet, ids: Sequence[int]) -> list[float]:
    """One threshold per checkpoint that divides the tokens of `ids`, so that some leave and wait and some go on,
    whatever the routers are like: the middle of the widest gap between scores in the middle half of them.

    Where a router gives all of them the same score, a threshold that they are all above.
    """
    scores = oracle(source, routers, ids, [NEVER_EXIT] * len(routers.checkpoints)).scores.float().cpu()
    thresholds = []
    for column in scores.sort(dim=0).values.T:
        middle = column[len(column) // 4 : -(len(column) // 4) or None]
        gaps = middle.diff()
        if not len(gaps) or gaps.max() < 10 * FORGIVEN_GAP:
            thresholds.append(float(column[0]) - 100 * FORGIVEN_GAP)
        else:
            widest = int(gaps.argmax())
            thresholds.append(float(middle[widest : widest + 2].mean()))
    return thresholds


def _prompt(length: int, vocabulary: int) -> list[int]:
    """Spread over the vocabulary and the same every time."""
    return (np.arange(1, max(1, length) + 1) * 7919 % vocabulary).tolist()
