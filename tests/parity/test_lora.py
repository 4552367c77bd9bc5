"""Low-rank adapters at run time against peft: `full` equals peft's model, `exit` TIDE's rule on it, in lists each
sequence has its own adapter, and without one nothing changes."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from drafters import drafting_copy
from families import build
from parity.test_families import LENS_AND_SHORTLIST, NEW_TOKENS, PROMPTS
from peft import LoraConfig, PeftModel, get_peft_model
from tiers import exhaustive_but
from tiny_configs import CHECKPOINTS, small_llama
from tiny_engines import bound, bundle_of
from transformers import LlamaForCausalLM

from tide_export.bundle.file_names import GRAPH_FILE
from tide_export.bundle.manifest import Quantization
from tide_export.bundle.opened import Bundle
from tide_export.compose.cut import cut
from tide_export.model.source import SourceModel, wrap_model
from tide_export.names.operators import OP_GATE, OP_INTEGER_LAYERS, OP_LAYERS, OP_LORA
from tide_export.pipeline import pieces as pipeline_pieces
from tide_export.quantize.flow import quantize_model
from tide_export.quantize.half import round_to_half
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import AuditConfig, SchedulerLimits
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify.export_gate import dividing_thresholds
from tide_export.verify.parity import TOLERANCES, check_exit, check_full, check_lossless
from tide_export.verify.step_graph import StepGraph

RANK = 8
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "down_proj"],  # of a projection that is packed in the model
    "gpt2": ["c_attn", "c_fc"],  # of matrices that are stored transposed
    "qwen2": ["v_proj"],
    "lfm2": ["in_proj", "q_proj", "w1"],  # with recurrent states
    "hrm_text": ["q_proj", "down_proj"],  # of layers that run again, in other segments too
}


def adapter_at(folder: Path, source: SourceModel, seed: int, **config: Any) -> SourceModel:
    """Writes an adapter whose matrices are both random; returns the model with it, as peft computes it."""
    torch.manual_seed(seed)
    model = get_peft_model(copy.deepcopy(source.model), LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(copy.deepcopy(source.model), folder).eval()
    return wrap_model(loaded.merge_and_unload(), source.name)


@dataclass
class Adapted:
    """An engine whose sequences run with an adapter, as the checks take it."""

    engine: Engine
    adapter: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, *arguments: Any, **options: Any) -> Any:
        return self.engine.generate(*arguments, adapter=self.adapter, **options)

    @property
    def start(self) -> Callable[..., Any]:
        return partial(self.engine.start, adapter=self.adapter)


def exported(source: SourceModel, folder: Path, **options: Any) -> Bundle:
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, **LENS_AND_SHORTLIST)
    pieces = cut(pipeline_pieces.trace(source, CHECKPOINTS, bound(source), lora_rank=RANK), bound(source))
    return bundle_of(source, routers, folder, pieces, **options)


@pytest.mark.parametrize("family", exhaustive_but(["phi3", "lfm2", "hrm_text"], TARGETS))
def test_full_is_peft_and_exit_is_the_oracle_on_it(family: str, tmp_path: Path) -> None:
    source = build(family)
    adapted = {
        "one": adapter_at(tmp_path / "one", source, 1, r=4, lora_alpha=8, target_modules=TARGETS[family]),
        "two": adapter_at(
            tmp_path / "two", source, 2, r=RANK, lora_alpha=6, use_rslora=True, target_modules=TARGETS[family][-1:]
        ),
    }
    bundle = exported(source, tmp_path / "bundle")
    engine = load(bundle.path, threads=1, adapters={name: tmp_path / name for name in adapted})
    routers = random_routers(source, CHECKPOINTS, PROMPTS[2], bottleneck=16, **LENS_AND_SHORTLIST)
    texts = set()
    for name, model in ((None, source), *adapted.items()):
        under_test: Any = engine if name is None else Adapted(engine, name)
        full = check_full(under_test, model, PROMPTS, NEW_TOKENS)
        assert full.holds, (name, full.differences)
        assert (full.within_tolerance, full.max_error < 1e-3) == (0, True)
        middle = dividing_thresholds(model, routers, PROMPTS[2])
        for thresholds, max_pending in ((middle, 4), ([0.7] * 2, 1)):
            exits = check_exit(under_test, model, routers, PROMPTS, NEW_TOKENS, thresholds, max_pending)
            assert exits.holds, (name, thresholds, exits.differences)
        drafts = check_lossless(under_test, model, PROMPTS, NEW_TOKENS, threshold=0.0, max_pending=3)
        assert drafts.holds, (name, drafts.differences)
        texts.add(tuple(under_test.generate(PROMPTS[2], mode="full", max_new_tokens=NEW_TOKENS).tokens))
    assert len(texts) == 3, "the adapters change no token"
    graph = check_full(StepGraph(bundle, threads=1), source, PROMPTS[2:], 4)
    assert graph.holds, ("model.onnx without an adapter", graph.differences)

    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": [], "mode": "full"}
    for name in (None, *adapted):
        alone = [engine.generate(prompt, adapter=name, **options).tokens for prompt in PROMPTS]
        assert [one.tokens for one in engine.generate(PROMPTS, adapter=name, **options)] == alone
    with engine.scheduler(SchedulerLimits(slots=4, prefix_cache_bytes=1 << 22)) as scheduler:
        for _ in range(2):  # the second finds the texts of the first, each of its adapter alone
            handles = {name: scheduler.submit(PROMPTS[2], adapter=name, **options) for name in (None, *adapted)}
            for name, handle in handles.items():
                assert handle.result().tokens == engine.generate(PROMPTS[2], adapter=name, **options).tokens, name
        assert all(handle.cached_tokens > 0 for handle in handles.values())


def test_a_drafter_and_an_audit_beside_adapters(tmp_path: Path) -> None:
    """The drafter is trained for the model without adapters: what it drafts is accepted less often, and never wrong."""
    source = build("llama")
    adapter_at(tmp_path / "one", source, 1, r=4, lora_alpha=8, target_modules=TARGETS["llama"])
    bundle = exported(source, tmp_path / "bundle")
    engine = load(drafting_copy(bundle.path, tmp_path), threads=1, adapters={"one": tmp_path / "one"})
    asked: dict[str, Any] = {"adapter": "one", "max_new_tokens": 40, "stop_token_ids": []}
    lossless = {"mode": "lossless", "threshold": 1.0, "prompt_lookup": 0, "drafter": 3, "temperature": 0.8, "seed": 3}
    exits = {"mode": "exit", "threshold": 0.5, "min_layers": 0}
    full = engine.generate(PROMPTS[2], **asked, mode="full", temperature=0.8, seed=3).tokens
    drafted = engine.generate(PROMPTS[2], **asked, **lossless)
    assert drafted.tokens == full
    assert drafted.stats.learned_drafted > 0
    with engine.scheduler(SchedulerLimits(slots=3), audit=AuditConfig(rate=1.0)) as scheduler:
        handles = [scheduler.submit(PROMPTS[2], **asked, **options) for options in (lossless, exits)]
        found = [handle.result().tokens for handle in handles]
        audit = scheduler.audit
    assert found == [full, engine.generate(PROMPTS[2], **asked, **exits).tokens]
    state = engine.start([NEVER_EXIT] * len(CHECKPOINTS), adapter="one")
    rows = state.step([*PROMPTS[2], *found[1][:-1]], logits_to_keep=len(found[1]), full=True).position_logits
    different = sum(int(row.argmax()) != token for row, token in zip(rows, found[1], strict=True))
    assert audit is not None
    assert (audit.audited, audit.different) == (len(found[1]), different)
    assert 0 < different < len(found[1])


@pytest.mark.parametrize("weights", exhaustive_but(["int4 with outliers"], ["bf16", "int4", "int4 with outliers"]))
def test_fused_layers_take_adapters(weights: str, tmp_path: Path) -> None:
    source, budget = build("llama"), None
    if outliers := weights == "int4 with outliers":
        budget = 5.0
        weights, config = "int4", small_llama(512, 256, len(source.structure.layers), 512)
        torch.manual_seed(0)
        source = wrap_model(LlamaForCausalLM(config), "wide")
    if weights == "int4":
        quantize_model(source, Quantization("rtn", 4, 32, True, 4, budget))
        assert source.quantized is not None
        assert any(blocks.outliers is not None for blocks in source.quantized.blocks.values()) == outliers
    else:
        round_to_half(source, weights)
    bundle = exported(source, tmp_path / "bundle", half=weights if weights == "bf16" else None)
    nodes = ir.load(bundle.path / GRAPH_FILE).graph.all_nodes()
    counts = Counter(node.op_type for node in nodes)
    layers = OP_INTEGER_LAYERS if weights == "int4" else OP_LAYERS
    assert (counts[layers], counts[OP_LORA], counts[OP_GATE]) == (source.num_layers, 0, 0), "a layer is one operator"
    model = adapter_at(tmp_path / "one", source, 1, r=4, lora_alpha=8, target_modules=TARGETS["llama"])
    engine = load(bundle.path, threads=2, adapters={"one": tmp_path / "one"})
    tolerance = TOLERANCES["int8 matmuls" if weights == "int4" else "fp32"]
    for under_test, judge in ((engine, source), (Adapted(engine, "one"), model)):
        full = check_full(under_test, judge, PROMPTS, NEW_TOKENS, tolerance=tolerance)  # type: ignore[arg-type]
        assert full.holds, (full.max_error, full.largest_logit, full.differences)
    alone = [engine.generate(PROMPTS[2], adapter=name, mode="full").tokens for name in (None, "one")]
    with engine.scheduler(SchedulerLimits(slots=2)) as scheduler:
        handles = [scheduler.submit(PROMPTS[2], adapter=name, mode="full") for name in (None, "one")]
        assert [handle.result().tokens for handle in handles] == alone
