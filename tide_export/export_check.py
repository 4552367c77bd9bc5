"""The last gate before a bundle is put in place: the written graph must say what the source model says.

Called by `pipeline` on the finished folder. The graph is checked by `onnx.checker` with shape inference, then loaded in
ONNX Runtime and compared with the HuggingFace model (full depth) and the oracle (exits) on a short sequence. `validate`
does the same at length and on real text.
"""

from pathlib import Path

import numpy as np
import onnx

from tide_export import names
from tide_export.bundle import Bundle, Manifest
from tide_export.errors import GraphError
from tide_export.model import SourceModel
from tide_export.parity import Check, check_exit, check_full
from tide_export.routers import RouterSet
from tide_export.runtime.engine import Engine
from tide_export.runtime.session import open_session

PROMPT_TOKENS = 24
NEW_TOKENS = 8


def check_export(folder: Path, manifest: Manifest, source: SourceModel, routers: RouterSet) -> None:
    """Refuses a bundle whose graph is malformed or differs from the model.

    Raises:
        GraphError: saying how it differs.
    """
    try:
        onnx.checker.check_model(str(folder / names.GRAPH_FILE), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphError(f"the exported graph is malformed: {str(error).splitlines()[0]}") from error
    bundle = Bundle(folder, manifest)
    engine = Engine(bundle, open_session(bundle, "cpu", None))
    limit = (manifest.model.context_length or PROMPT_TOKENS + NEW_TOKENS) - NEW_TOKENS
    length = max(1, min(PROMPT_TOKENS, limit))
    # Spread over the vocabulary and the same every time.
    prompt = (np.arange(1, length + 1) * 7919 % manifest.model.vocab_size).tolist()
    steps = min(NEW_TOKENS, (manifest.model.context_length or NEW_TOKENS + 1) - length)
    checks = [check_full(engine, source, [prompt], steps)]
    thresholds = [0.5] * len(manifest.checkpoints)
    checks.append(check_exit(engine, source, routers, [prompt], steps, thresholds, max_pending=2))
    for check in checks:
        _require(check, source)


def _require(check: Check, source: SourceModel) -> None:
    if not check.holds:
        wrong_logits = f"logits are off by {check.max_error:.2g}, where the largest is {check.largest_logit:.2g}"
        reason = check.differences[0] if check.differences else wrong_logits
        raise GraphError(
            f"the exported graph of {source.name} ({source.architecture}) does not equal the model "
            f"({'full depth' if check.name == 'full' else 'with exits'}): {reason}"
        )
