"""Networks for CUDA, run by ONNX Runtime's kernels for the CPU, against Hugging Face and the oracle.

In float32, which GroupQueryAttention has on the CPU alone, so that tokens must be equal.
"""

from pathlib import Path

import pytest
import tiers
from families import FAMILIES, build
from test_families import PROMPTS, check_batch, check_drafter, check_drafts
from tiny_engines import engine_of, pieces_of, segments_of

from tide_export.errors import UnsupportedModelError
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import open_engine
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import check_exit, check_full

TOKENS = 24
# With: biases and a tied head; windows and a softcap; norms of queries and keys; positions in the embedding; sinks and
# experts; rotated parts of heads.
CHOSEN = ["llama (3.1)", "gemma2", "qwen3", "gpt2", "gpt_oss", "phi"]
MORE = ["mistral", "mixtral", "phi3", "gpt_neox", "opt", "falcon", "cohere", "olmo2", "granite", "gemma3 (text)"]
REFUSED = {
    "bloom": "has a bias by key position",
    "gemma3n (text)": "has the keys and values of an earlier layer",
}


@pytest.mark.parametrize("family", [*CHOSEN, *(MORE if tiers.ALL else [])])
def test_a_family_is_equal(family: str, tmp_path: Path) -> None:
    source, checkpoints = build(family), FAMILIES[family].checkpoints
    routers = random_routers(source, checkpoints, PROMPTS[2], bottleneck=16, lens_rank=8, shortlist=16)
    pieces, middle = pieces_of(source, checkpoints), dividing_thresholds(source, routers, PROMPTS[2])
    engine_of(source, routers, tmp_path / "bundle", pieces)
    bundle = segments_of(source, routers, tmp_path / "bundle", pieces, target="cuda")
    engine = open_engine(bundle, "cpu-networks", threads=1)
    full = check_full(engine, source, PROMPTS, TOKENS)
    assert full.holds, full.differences
    assert full.within_tolerance == 0
    exits = check_exit(engine, source, routers, PROMPTS, TOKENS, middle, max_pending=4)
    assert exits.holds, exits.differences
    assert len(exits.exits) > 1
    check_batch(engine, middle, modes=1)
    check_drafts("", engine, source)
    check_drafter(source, tmp_path / "bundle")


@pytest.mark.parametrize("family", REFUSED)
def test_what_has_no_kernel_is_refused(family: str, tmp_path: Path) -> None:
    source, checkpoints = build(family), FAMILIES[family].checkpoints
    routers = random_routers(source, checkpoints, PROMPTS[2], bottleneck=16)
    with pytest.raises(
        UnsupportedModelError, match=f"layers . to . {REFUSED[family]}.* no CUDA kernel: use target onn"
    ):
        segments_of(source, routers, tmp_path, pieces_of(source, checkpoints), target="cuda")
