"""DFlash heads in the layouts that are published: read, as networks over rows and blocks, and drafting in bundles."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from ort_sessions import session_options
from peft import LoraConfig, get_peft_model
from random_dflash import BLOCK, COUNTS, KV_HEADS, LAYERS, MASK, MODEL_LAYERS, WIDTH, DFlash, drafted, fitted
from random_heads import CONTEXT, VOCABULARY, drafts_cost_no_token, exported, prompt, rounded
from random_heads import target as llama

from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.compose.drafter_networks import EMBEDDINGS, compose_drafter
from tide_export.drafting.heads.dflash import read_dflash
from tide_export.drafting.heads.head import DraftHead
from tide_export.errors import BundleError, ConfigError, DraftError, GenerationError
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.model.source import SourceModel, load_model
from tide_export.names import paged, paged_drafter
from tide_export.pipeline.request import ExportRequest
from tide_export.runtime.engine import Engine, load

PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("models") / "target", hidden_size=WIDTH, num_hidden_layers=MODEL_LAYERS)


@pytest.fixture(scope="module")
def source(model: Path) -> SourceModel:
    return load_model(str(model))


def block_of(source: SourceModel, token: int) -> torch.Tensor:
    return source.model.get_input_embeddings().weight.detach()[[token] + [MASK] * (BLOCK - 1)]


@torch.no_grad()
def step(head: DraftHead, source: SourceModel, fused: torch.Tensor, token: int) -> torch.Tensor:
    """Logits [B - 1, n] of the head as PyTorch code, of one sequence."""
    rows = len(fused) + BLOCK
    embeddings = torch.zeros(1, rows, WIDTH)
    embeddings[0, len(fused)] = block_of(source, token)[0]
    hidden = torch.cat([fused, torch.zeros(BLOCK, WIDTH)])[None]
    return head.step(embeddings, hidden, torch.arange(rows)[None], torch.tensor([[rows - 1]]))[0]


# --- read ------------------------------------------------------------------------------------------------------------


def test_a_head_is_what_its_authors_publish(source: SourceModel, tmp_path: Path) -> None:
    """In both layouts: with the model's head, and with one for a part of the vocabulary."""
    generator, files = torch.Generator().manual_seed(7), DFlash.random()
    fused, tokens = 2 * torch.randn(9, WIDTH, generator=generator), torch.randperm(VOCABULARY, generator=generator)[:40]
    own = torch.randn(40, WIDTH, generator=generator)
    expected = drafted(files.weights, fused, block_of(source, 5))
    head = read_dflash(str(files.write(tmp_path / "head")), source)
    model_head = source.head_rows()
    assert model_head is not None
    torch.testing.assert_close(step(head, source, fused, 5), expected @ model_head.T, rtol=1e-4, atol=1e-4)
    assert (head.layers, head.block_size, len(head.tokens)) == (COUNTS, BLOCK, VOCABULARY)
    assert head.fc is not None
    assert torch.equal(head.fc, files.weights["fc.weight"])
    head = read_dflash(str(files.write_speculators(tmp_path / "speculators", own, tokens)), source)
    order = tokens.argsort()
    assert (head.layers, head.tokens.tolist()) == (COUNTS, tokens[order].tolist())
    torch.testing.assert_close(step(head, source, fused, 5), (expected @ own.T)[:, order], rtol=1e-4, atol=1e-4)


def test_scales_and_caps_of_logits_are_its_own(source: SourceModel, tmp_path: Path) -> None:
    files, fused = DFlash.random(), torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    files.config["dflash_config"] |= {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    files.config["dflash_config"] |= {"input_embedding_scale": 2.0, "projector_type": "dflash", "causal": False}
    head = read_dflash(str(files.write(tmp_path / "head")), source)
    model_head = source.head_rows()
    assert model_head is not None
    logits = drafted(files.weights, fused, 2 * block_of(source, 5)) @ model_head.T
    torch.testing.assert_close(step(head, source, fused, 5), torch.tanh(logits * 0.5 / 3) * 3, rtol=1e-4, atol=1e-4)


def test_the_network_is_the_head_with_rounded_weights(source: SourceModel, tmp_path: Path) -> None:
    """Two sequences in one run, each after rows of an earlier run, whose block it overwrites."""
    head = read_dflash(str(DFlash.random().write(tmp_path / "head")), source)
    pieces, weights = rounded(head)
    file = tmp_path / "drafter.onnx"
    ir.save(lower_for_onnxruntime(compose_drafter(pieces), weights), file)
    session = onnxruntime.InferenceSession(str(file), session_options(), providers=["CPUExecutionProvider"])
    names = [(layer, kind) for layer in range(LAYERS) for kind in ("key", "value")]
    shape = (2 * CONTEXT // PAGE, KV_HEADS, PAGE, pieces.kv_shape[1])
    pages = {key: np.full(shape, 1e4, np.float32) for key in names}
    table = np.arange(2 * CONTEXT // PAGE, dtype=np.int32)[::-1].reshape(2, -1)
    generator = torch.Generator().manual_seed(3)
    states = [2 * torch.randn(count, WIDTH, generator=generator) for count in (40, 23)]
    embedding = source.model.get_input_embeddings().weight.detach()
    done = [0, 0]
    for counts in ((30, 1), (1, 17), (9, 5)):
        ends = [before + count for before, count in zip(done, counts, strict=True)]
        rows = [count + BLOCK for count in counts]
        ids = np.full((1, sum(rows)), 3)
        hidden = np.zeros((1, sum(rows), WIDTH), np.float32)
        starts = np.array([0, *np.cumsum(rows)])
        for number, count in enumerate(counts):
            hidden[0, starts[number] : starts[number] + count] = states[number][done[number] : ends[number]]
            ids[0, starts[number] + count] = 5 + number
        feeds = {
            EMBEDDINGS: embedding[ids].numpy(),
            paged_drafter.HIDDEN_STATES: hidden,
            paged_drafter.POSITION_IDS: np.concatenate(
                [np.arange(before, end + BLOCK) for before, end in zip(done, ends, strict=True)]
            )[None],
            paged_drafter.LAST_TOKENS: starts[1:] - 1,
            paged_drafter.SEQUENCE_STARTS: starts,
            paged_drafter.SEQUENCE_LENGTHS: np.array(ends) + BLOCK,
            paged_drafter.PAGE_TABLE: table,
            **{paged.pages(*key): value for key, value in pages.items()},
        }
        logits, *written = session.run([paged_drafter.LOGITS, *(paged.new_pages(*key) for key in names)], feeds)
        pages = dict(zip(names, written, strict=True))
        for number, end in enumerate(ends):
            expected = step(head, source, states[number][:end], 5 + number)
            np.testing.assert_allclose(logits[number], expected, rtol=2e-3, atol=2e-3)
        done = ends


# --- in a bundle -----------------------------------------------------------------------------------------------------


TEXTS = [prompt(VOCABULARY, 9, 1), prompt(VOCABULARY, 20, 2), prompt(VOCABULARY, 5, 3)]
NEW_TOKENS = 12
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "stop_token_ids": []}


@pytest.fixture(scope="module")
def bundle(model: Path, source: SourceModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head that knows what follows in the model's greedy answers to TEXTS, as far as 4 bits allow."""
    folder, files = tmp_path_factory.mktemp("bundles"), DFlash.random()
    head = read_dflash(str(files.write(folder / "unfitted")), source)
    rounded(head)
    weights = files.weights | {key: value for key, value in head.model.state_dict().items() if key in files.weights}
    right, without_last, wanted = list[torch.Tensor](), list[torch.Tensor](), list[int]()
    for text in TEXTS:
        ids = torch.tensor([text])
        made = source.model.generate(ids, max_new_tokens=NEW_TOKENS + BLOCK, do_sample=False, eos_token_id=None)
        whole = made[0].tolist()
        with torch.no_grad():
            raw = source.run(made, COUNTS).raw
        fused = torch.cat([raw[count][0] for count in COUNTS], -1) @ files.weights["fc.weight"].T
        for length in range(len(text), len(text) + NEW_TOKENS - 1):
            right.append(drafted(weights, fused[:length], block_of(source, whole[length])))
            without_last.append(drafted(weights, fused[: length - 1], block_of(source, whole[length])))
            wanted += whole[length + 1 : length + BLOCK]
    hidden = torch.cat(right)
    rows = fitted(hidden, wanted)
    shares = [
        ((torch.cat(states) @ rows.T).argmax(-1) == torch.tensor(wanted)).float().mean()
        for states in (right, without_last)
    ]
    assert shares[0] > 0.95
    assert shares[1] < 0.6  # so drafts show what the runtime gives it
    written = files.write_speculators(folder / "head", 20 * rows, torch.arange(VOCABULARY))
    return exported(model, written, folder / "made", (2,))


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return load(bundle, provider="cpu", threads=1)


def test_the_runtime_gives_it_rows_and_blocks(engine: Engine) -> None:
    """Or its drafts were others than those that the head was fitted to: alone, and in a list of other lengths."""
    full = engine.generate(TEXTS, mode="full", **GREEDY)
    options = {"mode": "lossless", "threshold": 1.0, "prompt_lookup": 0, "drafter": BLOCK - 1}
    alone = [engine.generate(text, **GREEDY, **options) for text in TEXTS]
    for made in (alone, engine.generate(TEXTS, **GREEDY, **options)):
        assert [one.tokens for one in made] == [one.tokens for one in full]
        accepted = sum(one.stats.learned_accepted for one in made)
        tried = sum(one.stats.learned_drafted for one in made)
        assert tried > 20
        assert accepted > 0.85 * tried
        assert accepted > sum(len(one.tokens) for one in made) / 2  # more than one a verification


@pytest.mark.parametrize("drafter", [1, 2, 8])
@pytest.mark.parametrize("threshold", [1.0, 0.5])
def test_drafts_cost_no_token(engine: Engine, threshold: float, drafter: int) -> None:
    """Greedy and sampled, alone and in a list; with a threshold below 1 exits draft too."""
    assert drafts_cost_no_token(engine, drafter=drafter, threshold=threshold) > 20
    given: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": [0, 1, 2], "stop_token_ids": []}
    full = engine.generate(TEXTS, mode="full", **given)
    made = engine.generate(TEXTS, mode="lossless", threshold=threshold, prompt_lookup=0, drafter=drafter, **given)
    assert [one.tokens for one in made] == [one.tokens for one in full]
    assert sum(one.stats.learned_drafted for one in made) > 5


@pytest.mark.parametrize(
    ("cost", "drafter", "pays"), [(0.7, BLOCK - 1, True), (0.7, 1, False), (2.0, BLOCK - 1, False)]
)
def test_a_run_must_pay_by_all_of_its_drafts(engine: Engine, cost: float, drafter: int, pays: bool) -> None:
    verify = (0.05, 0.1, 0.2, 0.4, 0.8)
    tuned = engine.drafting_as(Drafting((1.0,), 0, 0, (1.0,), verify, {}, drafter, cost))
    made = tuned.generate(TEXTS, mode="lossless", **GREEDY)
    assert [one.tokens for one in made] == [one.tokens for one in engine.generate(TEXTS, mode="full", **GREEDY)]
    assert (sum(one.stats.learned_drafted for one in made) > 0) == pays


def test_processed_logits_and_stop_tokens_end_blocks(engine: Engine) -> None:
    """Penalties count the drafts before in a block; a draft that stops the text is its last."""
    given: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0, "repetition_penalty": 1.3}
    for text in TEXTS:
        plain = engine.generate(text, mode="full", stop_token_ids=[], **given)
        for stops in ([], [plain.tokens[5]]):
            full = engine.generate(text, mode="full", stop_token_ids=stops, **given)
            options = {"threshold": 1.0, "prompt_lookup": 4, "drafter": 8}
            made = engine.generate(text, mode="lossless", stop_token_ids=stops, **given, **options)
            assert made.tokens == full.tokens
            assert made.stats.learned_drafted > 0


def test_a_hook_that_fails_within_a_block_leaves_the_stream_as_it_was(engine: Engine) -> None:
    calls, failing = 0, set(range(3, 30, 2))

    def process(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls in failing:
            raise ValueError("not now")
        return logits

    expected = engine.generate(TEXTS[0], mode="full", **GREEDY).tokens
    options = {"threshold": 1.0, "prompt_lookup": 0, "drafter": BLOCK - 1}
    stream = engine.stream(TEXTS[0], mode="lossless", logits_processor=process, **GREEDY, **options)
    made, failures = list[int](), 0
    while len(made) < len(expected):
        try:
            made.append(next(stream))
        except GenerationError:
            failures += 1
    assert made == expected
    assert 8 < failures <= len(failing)


def test_it_begins_anew_where_its_rows_end(source: SourceModel, model: Path, tmp_path: Path) -> None:
    """Its context holds few blocks, and texts are longer than half of it."""
    files = DFlash.random()
    files.config["block_size"] = 20
    bundle = exported(model, files.write(tmp_path / "head"), tmp_path / "made", (2,), max_length=64)
    engine = load(bundle, provider="cpu", threads=1)
    assert engine.manifest.drafter is not None
    assert (engine.manifest.drafter.max_tokens, engine.manifest.drafter.block_size) == (64, 20)
    for length in (9, 40):
        text = prompt(VOCABULARY, length, length)
        given: dict[str, Any] = {"max_new_tokens": 64 - length, "temperature": 0.0, "stop_token_ids": []}
        full = engine.generate(text, mode="full", **given)
        made = engine.generate(text, mode="lossless", threshold=1.0, prompt_lookup=0, drafter=30, **given)
        assert made.tokens == full.tokens
        assert made.stats.learned_drafted > 0


def rounded_engine(model: Path, bundle: Path, folder: Path, **options: Any) -> Engine:
    """An engine of the model, rounded, with the head that was fitted to it."""
    return load(exported(model, bundle.parents[1] / "head", folder, (2,), **options), provider="cpu", threads=1)


@pytest.mark.exhaustive
def test_it_drafts_beside_int8_pages(model: Path, bundle: Path, tmp_path: Path) -> None:
    """Where the model's text soon is another than that which the head was fitted to; guesses are right once in 97."""
    engine = rounded_engine(model, bundle, tmp_path / "made", config=TideConfig(kv_cache="int8"))
    assert drafts_cost_no_token(engine, drafter=4) > 20
    made = [engine.generate(text, mode="lossless", threshold=1.0, prompt_lookup=0, **GREEDY) for text in TEXTS]
    accepted, tried = (sum(getattr(one.stats, f"learned_{what}") for one in made) for what in ("accepted", "drafted"))
    assert tried > 20
    assert accepted > 0.1 * tried


@pytest.mark.exhaustive
def test_it_drafts_for_an_int4_model(model: Path, bundle: Path, tmp_path: Path) -> None:
    """Not validated: random weights as large as these decide tokens by less than int8 inputs err."""
    engine = rounded_engine(model, bundle, tmp_path / "made", weights="int4", validate=False)
    assert drafts_cost_no_token(engine, drafter=4) > 20


@pytest.mark.exhaustive
def test_it_drafts_for_a_model_with_an_adapter(model: Path, bundle: Path, source: SourceModel, tmp_path: Path) -> None:
    """It reads the states of the adapted model, which are what it was not fitted to: no token changes."""
    made = exported(model, bundle.parents[1] / "head", tmp_path / "made", (2,), lora_rank=4)
    adapted = get_peft_model(copy.deepcopy(source.model), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    engine = load(made, provider="cpu", threads=1, adapters={"one": tmp_path / "adapter"})
    options: dict[str, Any] = {"threshold": 1.0, "prompt_lookup": 0, "drafter": BLOCK - 1}
    texts = list[list[list[int]]]()
    for adapter in (None, "one"):
        full = engine.generate(TEXTS, mode="full", adapter=adapter, **GREEDY)
        drafted = engine.generate(TEXTS, mode="lossless", adapter=adapter, **GREEDY, **options)
        texts.append([one.tokens for one in full])
        assert [one.tokens for one in drafted] == texts[-1]
        assert sum(one.stats.learned_drafted for one in drafted) > 5
    assert texts[0] != texts[1]


def test_the_manifest_says_what_it_drafts_with(bundle: Path, engine: Engine) -> None:
    drafter = engine.manifest.drafter
    assert drafter is not None
    assert (drafter.layers, drafter.num_layers, drafter.block_size) == (COUNTS, LAYERS, BLOCK)
    assert drafter.record == {"layout": "DFlash", "head": str(bundle.parents[1] / "head")}
    opened = open_bundle(bundle)
    for changes, says in (
        ({"block_size": 1}, "drafter.block_size' must be 2 or more, and at most half of max_tokens"),
        ({"block_size": CONTEXT // 2 + 1}, "drafter.block_size' must be 2 or more, and at most half of max_tokens"),
        ({"num_layers": 0}, "drafter.num_layers' must be 1 or more, and at most the model's"),
        ({"num_layers": 8}, "drafter.num_layers' must be 1 or more, and at most the model's"),
    ):
        changed = replace(opened.manifest, drafter=replace(drafter, **changes))
        with pytest.raises(BundleError, match=says):
            type(changed).from_json(changed.to_json())


# --- refused ---------------------------------------------------------------------------------------------------------


def config(**fields: Any) -> Callable[[DFlash], None]:
    return lambda head: head.config.update(fields)


def dflash(**fields: Any) -> Callable[[DFlash], None]:
    return lambda head: head.config["dflash_config"].update(fields)


def weight(key: str, value: torch.Tensor | None) -> Callable[[DFlash], None]:
    def change(head: DFlash) -> None:
        head.weights.pop(key, None)
        if value is not None:
            head.weights[key] = value

    return change


QUERIES = "layers.1.self_attn.q_proj.weight"
REFUSED = {
    "another size's": (config(hidden_size=64), "is not for this model: its hidden size is 64, the model's 128"),
    "another vocabulary": (
        config(vocab_size=98),
        "is not for this model: its vocabulary has 98 tokens, the model's 97",
    ),
    "another depth": (config(num_target_layers=9), "states after layers 2, 4, 5 of 9, and the model has 7"),
    "layers that are not there": (dflash(target_layer_ids=[1, 6]), "after layers 2, 7 of 7, and the model has 7"),
    "no layers": (dflash(target_layer_ids=None), "has no usable block_size, mask_token_id and target_layer_ids"),
    "no mask": (dflash(mask_token_id=None), "has no usable block_size, mask_token_id and target_layer_ids"),
    "a mask that is not there": (dflash(mask_token_id=97), "has blocks of 4 tokens with mask 97: only 2 to 64 tokens"),
    "a block of one": (config(block_size=1), "has blocks of 1 tokens with mask 96: only 2 to 64 tokens"),
    "a second version": (dflash(conv_kernel_size=2), "has conv_kernel_size, and only DFlash heads without it are read"),
    "another projector": (dflash(projector_type="domino"), "has projector_type, and only DFlash heads without it"),
    "causal blocks": (config(is_causal=True), "has is_causal, and only DFlash heads without it are read: use draft"),
    "windows": (
        config(layer_types=["sliding_attention"] * 2),
        "has layers of sliding_attention, and only DFlash heads",
    ),
    "an unknown activation": (config(hidden_act="abacus"), "config.json of draft head '.*' cannot be used"),
    "no queries": (weight(QUERIES, None), f"has no weight {QUERIES}: it is no DFlash head of a layout that is known"),
    "sinks": (weight("layers.0.self_attn.sinks", torch.ones(4)), "has an unknown weight layers.0.self_attn.sinks"),
    "other queries": (weight(QUERIES, torch.ones(3, 4)), rf"weight {QUERIES} is \[3, 4\], not \[64, 128\] as its"),
    "NaN": (weight("norm.weight", torch.full((WIDTH,), torch.nan)), "weight norm.weight holds NaN or infinity"),
    "another fc": (weight("fc.weight", torch.ones(WIDTH, WIDTH)), r"must have a weight fc.weight of \[128, 384\]"),
    "NaN in fc": (weight("fc.weight", torch.full((WIDTH, 3 * WIDTH), torch.nan)), "without NaN, and has not"),
    "an embedding of its own": (weight("embed_tokens.weight", torch.ones(97, WIDTH)), "has an embedding of its own"),
    "an unknown quantization": (config(quantization_config={"quant_method": "modelopt"}), "is quantized with modelopt"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_models_and_damaged_heads_are_refused(case: str, source: SourceModel, tmp_path: Path) -> None:
    change, says = REFUSED[case]
    head = DFlash.random()
    change(head)
    with pytest.raises(DraftError, match=says) as refused:
        read_dflash(str(head.write(tmp_path / "head")), source)
    assert "/head'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_it_is_for_onnxruntime_alone(source: SourceModel, tmp_path: Path) -> None:
    head = str(DFlash.random().write(tmp_path / "head"))
    for network in ("cuda", "tensorrt"):
        with pytest.raises(ConfigError, match=f"reads hidden states or K/V that the segment networks of {network} do"):
            ExportRequest(source.name, "out", draft_head=head, targets=(network,), weights="fp16", engines=False)
