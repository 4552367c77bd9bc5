"""Gemma 4's assistants: read, as networks over the model's K/V, and drafting in bundles."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiers
import torch
from ort_sessions import session_options
from random_assistants import (
    CONTEXT,
    KINDS,
    KV_LAYERS,
    OWN_WIDTH,
    VOCABULARY,
    WIDTH,
    WINDOW,
    Assistant,
    all_layers_read,
    before_draft,
    target,
)
from random_assistants import drafted as reference
from random_heads import drafts_cost_no_token, exported, prompt, rounded
from random_heads import target as llama
from transformers import AutoModelForCausalLM

from tide_export.bundle.opened import open_bundle
from tide_export.calibration.config import TideConfig
from tide_export.compose.drafter_networks import EMBEDDINGS, compose_drafter
from tide_export.drafting.heads.assistant import read_assistant
from tide_export.errors import BundleError, ConfigError, DraftError
from tide_export.lower.onnxruntime.lower import lower_for_onnxruntime
from tide_export.model.source import SourceModel, load_model
from tide_export.names import paged, paged_drafter
from tide_export.pipeline.request import ExportRequest
from tide_export.runtime.engine import Engine, load

PAGE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def source(model: Path) -> SourceModel:
    return load_model(str(model))


LAYOUTS = {"all tokens": (False, "gemma4_assistant"), "near clusters": (True, "gemma4_assistant")}
LAYOUTS |= {"unified": (True, "gemma4_unified_assistant")}


@pytest.mark.parametrize("layout", tiers.exhaustive_but(["all tokens", "near clusters"], LAYOUTS))
def test_the_network_drafts_what_transformers_does(layout: str, source: SourceModel, tmp_path: Path) -> None:
    """Over pages in which the model's keys and values lie, fewer and more than the window has."""
    folder = Assistant.random(*LAYOUTS[layout]).write(tmp_path / "assistant")
    head = read_assistant(str(folder), source)
    with all_layers_read(folder):
        published: Any = AutoModelForCausalLM.from_pretrained(folder)
    expected = reference(source.model, published, prompt(VOCABULARY, 30), [4, 5])
    for one, other in zip(reference(source.model, head.model, prompt(VOCABULARY, 30), [4, 5]), expected, strict=True):
        torch.testing.assert_close(one, other)
    pieces, weights = rounded(head, CONTEXT)
    assert (head.kv_layers, pieces.shared_kv) == (KV_LAYERS, {1: (1, 32), 2: (2, 16)})
    file = tmp_path / "drafter.onnx"
    ir.save(lower_for_onnxruntime(compose_drafter(pieces), weights), file)
    session = onnxruntime.InferenceSession(str(file), session_options(), providers=["CPUExecutionProvider"])
    table = source.model.get_input_embeddings().weight.detach()
    for count in (2, WINDOW + 1, WINDOW + 2, 40):
        ids, following = prompt(VOCABULARY, count, count), prompt(VOCABULARY, 3)
        logits, states = reference(source.model, head.model, ids, following)
        state, shared = before_draft(source.model, ids)
        pages = {
            paged.pages(layer, kind): in_pages(shared[KINDS[KV_LAYERS.index(layer)]][number])
            for layer in pieces.shared_kv
            for number, kind in enumerate(("key", "value"))
        }
        for step, token in enumerate([ids[-1], *following]):
            feeds = {
                EMBEDDINGS: table[[token]][None].numpy(),
                paged_drafter.HIDDEN_STATES: state.numpy(),
                paged_drafter.POSITION_IDS: np.array([[count - 2]]),
                paged_drafter.LAST_TOKENS: np.array([0]),
                paged_drafter.SEQUENCE_STARTS: np.array([0, 1]),
                paged_drafter.SEQUENCE_LENGTHS: np.array([count - 1]),
                paged_drafter.PAGE_TABLE: np.arange(CONTEXT // PAGE, dtype=np.int32)[::-1][None],
                **pages,
            }
            made, following_state = session.run([paged_drafter.LOGITS, paged_drafter.NEW_HIDDEN_STATES], feeds)
            np.testing.assert_allclose(made[0], logits[step], rtol=2e-3, atol=2e-3)
            np.testing.assert_allclose(following_state[0], states[step], rtol=2e-3, atol=2e-3)
            state = torch.from_numpy(following_state)[None]


def in_pages(values: torch.Tensor) -> np.ndarray:
    """Keys or values [1, H, n, d] in pages [P, H, 16, d], the first of which is last; other rows are not to be read."""
    _, heads, count, width = values.shape
    rows = np.full((CONTEXT, heads, width), 1e4, np.float32)
    rows[:count] = values[0].transpose(0, 1).numpy()
    return np.ascontiguousarray(rows.reshape(-1, PAGE, heads, width)[::-1].transpose(0, 2, 1, 3))


# --- in a bundle -----------------------------------------------------------------------------------------------------


TEXTS = [prompt(VOCABULARY, 9, 1), prompt(VOCABULARY, 20, 2), prompt(VOCABULARY, 5, 3)]
NEW_TOKENS = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "stop_token_ids": []}


@pytest.fixture(scope="module")
def bundle(model: Path, source: SourceModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an assistant that knows what follows in the model's greedy answers to TEXTS, as far as 4 bits allow."""
    folder, assistant = tmp_path_factory.mktemp("bundles"), Assistant.random()
    head = read_assistant(str(assistant.write(folder / "unfitted")), source)
    rounded(head, CONTEXT)
    states, wanted = list[torch.Tensor](), list[int]()  # every second state is without the last key
    catcher = head.model.lm_head.register_forward_pre_hook(lambda _, args: states.append(args[0][0, 0]))
    for text in TEXTS:
        ids = torch.tensor([text])
        made = source.model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)[0].tolist()
        for length in range(len(text) + 1, len(made)):
            reference(source.model, head.model, made[:length], [])
            reference(source.model, head.model, made[:length], [], unseen=1)
            wanted.append(made[length])
    catcher.remove()
    hidden, logits = torch.stack(states[::2]), torch.zeros(len(wanted), VOCABULARY)
    logits[range(len(wanted)), wanted] = 1
    square = hidden.T @ hidden
    fitted = torch.linalg.solve(square + 0.01 * square.diagonal().mean() * torch.eye(len(square)), hidden.T @ logits)
    without_last_key = torch.stack(states[1::2])
    right = [((part @ fitted).argmax(-1) == torch.tensor(wanted)).float().mean() for part in (hidden, without_last_key)]
    assert right[0] > 0.95
    assert right[1] < 0.6  # so drafts show what the runtime gives it
    assistant.weights["model.embed_tokens.weight"] = 20 * fitted.T.contiguous()
    return exported(model, assistant.write(folder / "assistant"), folder / "made", (2,), max_length=CONTEXT)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return load(bundle, provider="cpu", threads=1)


def test_the_runtime_gives_it_the_model_s_keys_and_values(engine: Engine) -> None:
    """Or its drafts were others than those that the assistant was fitted to: alone, and in a list of other lengths."""
    full = engine.generate(TEXTS, mode="full", **GREEDY)
    options = {"mode": "lossless", "threshold": 1.0, "prompt_lookup": 0, "drafter": 1}
    alone = [engine.generate(text, **GREEDY, **options) for text in TEXTS]
    for made in (alone, engine.generate(TEXTS, **GREEDY, **options)):
        assert [one.tokens for one in made] == [one.tokens for one in full]
        accepted = sum(one.stats.learned_accepted for one in made)
        tried = sum(one.stats.learned_drafted for one in made)
        assert tried > 20
        assert accepted > 0.9 * tried


@pytest.mark.parametrize("threshold", [1.0, 0.5])
def test_drafts_cost_no_token(engine: Engine, threshold: float) -> None:
    """Greedy and sampled, alone and in a list; with a threshold below 1 exits draft too."""
    assert drafts_cost_no_token(engine, drafter=4, threshold=threshold) > 20
    given: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": [0, 1, 2], "stop_token_ids": []}
    full = engine.generate(TEXTS, mode="full", **given)
    made = engine.generate(TEXTS, mode="lossless", threshold=threshold, prompt_lookup=0, drafter=4, **given)
    assert [one.tokens for one in made] == [one.tokens for one in full]
    assert sum(one.stats.learned_drafted for one in made) > 5


@pytest.mark.parametrize("shared", tiers.exhaustive_beyond(1, [2, 0]))
def test_it_drafts_for_a_model_that_also_reads_images(shared: int, tmp_path: Path) -> None:
    """Whose ids of images are replaced before the lookup; and where no layer of the model shares another's K/V."""
    model = target(tmp_path / "target", images=True, num_kv_shared_layers=shared)
    assistant = Assistant.random().write(tmp_path / "assistant")
    engine = load(exported(model, assistant, tmp_path / "made", (2,), max_length=64), provider="cpu", threads=1)
    assert engine.manifest.drafter is not None
    assert engine.manifest.drafter.kv_layers == ((3, 4) if shared == 0 else (1, 2))
    assert drafts_cost_no_token(engine, drafter=4) > 20


@pytest.mark.exhaustive
def test_it_reads_int8_pages(model: Path, bundle: Path, tmp_path: Path) -> None:
    assistant, options = bundle.parents[1] / "assistant", {"config": TideConfig(kv_cache="int8"), "max_length": CONTEXT}
    engine = load(exported(model, assistant, tmp_path / "made", (2,), **options), provider="cpu", threads=1)
    made = [
        engine.generate(text, mode="lossless", threshold=1.0, prompt_lookup=0, drafter=1, **GREEDY) for text in TEXTS
    ]
    assert sum(one.stats.learned_accepted for one in made) > 0.5 * sum(one.stats.learned_drafted for one in made) > 10
    assert drafts_cost_no_token(engine, drafter=4) > 20


def test_the_manifest_says_what_it_reads(bundle: Path, engine: Engine, tmp_path: Path) -> None:
    drafter = engine.manifest.drafter
    assert drafter is not None
    assert (drafter.kv_layers, drafter.kv_shape, drafter.max_tokens) == ((1, 2), None, CONTEXT)
    assert drafter.record == {"layout": "Gemma 4 assistant", "head": str(bundle.parents[1] / "assistant")}
    opened = open_bundle(bundle)
    for layers in ((), (2, 1), (1, 3)):  # layer 3 has none of its own
        changed = replace(opened.manifest, drafter=replace(drafter, kv_layers=layers))
        with pytest.raises(BundleError, match=r"drafter.kv_layers' must be ascending layers with keys and values of"):
            type(changed).from_json(changed.to_json())


# --- refused ---------------------------------------------------------------------------------------------------------


def text_config(**fields: Any) -> Callable[[Assistant], None]:
    return lambda assistant: assistant.config["text_config"].update(fields)


def config(**fields: Any) -> Callable[[Assistant], None]:
    return lambda assistant: assistant.config.update(fields)


def weight(key: str, value: torch.Tensor | None) -> Callable[[Assistant], None]:
    def change(assistant: Assistant) -> None:
        assistant.weights.pop(key)
        if value is not None:
            assistant.weights[key] = value

    return change


QUERIES, ORDER = "model.layers.1.self_attn.q_proj.weight", "masked_embedding.token_ordering"
REFUSED = {
    "another size's": (config(backbone_hidden_size=32), "its backbone_hidden_size is 32, not the model's 64: give the"),
    "another vocabulary": (text_config(vocab_size=104), "its vocab_size is 104, not the model's 96"),
    "other keys": (
        text_config(head_dim=8),
        "no sliding_attention layer has keys of 2 heads of 8 numbers, as its layer 0",
    ),
    "layers of no type": (text_config(layer_types=["a", "b", "c"]), "config.json of draft head '.*' cannot be used"),
    "no queries": (weight(QUERIES, None), f"it has no usable weight for {QUERIES}: download it again"),
    "other queries": (weight(QUERIES, torch.ones(3, 4)), rf"weight {QUERIES} is \[3, 4\], not \[64, 96\]"),
    "NaN": (weight(QUERIES, torch.full((64, 96), torch.nan)), f"weight {QUERIES} holds NaN or infinity"),
    "a token twice": (weight(ORDER, torch.zeros(VOCABULARY, dtype=torch.long)), "has not every token once"),
    "clusters of two sizes": (
        lambda assistant: (
            assistant.config.update(num_centroids=36),
            assistant.weights.update({"masked_embedding.centroids.weight": torch.ones(36, OWN_WIDTH)}),
        ),
        "in clusters of one size: download it again",
    ),
    "an unknown quantization": (config(quantization_config={"quant_method": "modelopt"}), "is quantized with modelopt"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_models_and_damaged_assistants_are_refused(case: str, source: SourceModel, tmp_path: Path) -> None:
    change, says = REFUSED[case]
    assistant = Assistant.random(ordered=True)
    change(assistant)
    with pytest.raises(DraftError, match=says) as refused:
        read_assistant(str(assistant.write(tmp_path / "assistant")), source)
    assert "/assistant'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_it_is_refused_for_what_has_no_such_keys(tmp_path: Path) -> None:
    assistant = str(Assistant.random().write(tmp_path / "assistant"))
    other = load_model(str(llama(tmp_path / "llama")))
    with pytest.raises(DraftError, match="it is an assistant of a Gemma 4, and the model is a llama: give the Gemma 4"):
        read_assistant(assistant, other)
    for network in ("cuda", "tensorrt"):
        with pytest.raises(ConfigError, match=f"reads hidden states or K/V that the segment networks of {network} do"):
            ExportRequest(other.name, "out", draft_head=assistant, targets=(network,), weights="fp16", engines=False)
    assert other.hidden_size == WIDTH  # nothing but its kind tells them apart
