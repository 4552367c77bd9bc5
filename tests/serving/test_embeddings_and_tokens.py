"""/v1/embeddings gives the engine's vectors in both encodings, and /tokenize and /detokenize the bundle's tokens."""

import base64
from typing import Any

import numpy as np
import pytest
from running_server import PROMPT, Running

from tide_export.runtime.engine import Engine

TEXTS = [f"def f{number}(x):\n    return x + {number}" for number in range(9)]  # more than the server has room for


def test_vectors_are_the_engine_s(server: Running, engine: Engine) -> None:
    ids = [engine.tokenizer.encode(text) for text in TEXTS]
    expected, layer = engine.embed(ids), engine.manifest.checkpoints[0]
    for given in (TEXTS, ids):
        made = server.openai.embeddings.create(model="demo", input=given)  # whose client asks for base64
        np.testing.assert_allclose([one.embedding for one in made.data], expected, atol=1e-4)
        assert [one.index for one in made.data] == list(range(len(TEXTS)))
        assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, ids))
    for body, options in (
        ({"pooling": "mean"}, {"pooling": "mean"}),
        ({"layer": layer, "normalize": False}, {"layer": layer, "normalize": False}),
        ({"dimensions": 6, "encoding_format": "base64"}, {"dimensions": 6}),
        ({"encoding_format": None, "normalize": None, "pooling": None}, {}),
    ):
        answered = server.http.post("/v1/embeddings", json={"model": "demo", "input": PROMPT} | body)
        (one,) = answered.json()["data"]
        vector = one["embedding"]
        found = np.frombuffer(base64.b64decode(vector), "<f4") if isinstance(vector, str) else np.array(vector)
        want: dict[str, Any] = options
        np.testing.assert_allclose(found, engine.embed(engine.tokenizer.encode(PROMPT), **want), atol=1e-4)
    assert server.idle()


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"model": "other"}, 404, "there is no model 'other' here, but 'demo'"),
        ({"input": ""}, 400, "the prompt is empty: it holds no token"),
        ({"input": []}, 400, "the prompt is empty: give at least one token"),
        ({"input": [1 << 40]}, 400, "the prompt holds token id 1099511627776, outside the vocabulary 0..4095"),
        ({"layer": 4}, 400, "layer must be a checkpoint of the bundle (3, 6, 9), not 4"),
        ({"layer": 3, "pooling": "mean"}, 400, "pooling 'mean' is for full depth: a checkpoint gives the hidden state"),
        ({"dimensions": 5000}, 400, "dimensions must be at most 128, the model's, not 5000"),
        ({"encoding_format": "int8"}, 400, "encoding_format: Input should be 'float' or 'base64'"),
    ],
)
def test_vectors_that_are_refused(server: Running, body: dict[str, Any], status: int, sentence: str) -> None:
    answered = server.http.post("/v1/embeddings", json={"model": "demo", "input": PROMPT} | body)
    assert answered.status_code == status
    assert answered.json()["error"]["message"].startswith(sentence)
    assert server.idle()


def test_tokens_of_texts_and_conversations(server: Running, engine: Engine) -> None:
    tokenizer, context = engine.tokenizer, engine.manifest.model.context_length
    for special, ids in ((True, tokenizer.encode(PROMPT)), (False, tokenizer.encode_plain(PROMPT))):
        asked = {"model": "demo", "prompt": PROMPT, "add_special_tokens": special, "return_token_strs": True}
        found = server.http.post("/tokenize", json=asked).json()
        assert (found["count"], found["tokens"], found["max_model_len"]) == (len(ids), ids, context)
        assert found["token_strs"] == [tokenizer.token_text(token) for token in ids]
        back = server.http.post("/detokenize", json={"model": "demo", "tokens": ids}).json()
        assert back == {"prompt": "".join(found["token_strs"])}
    messages = [{"role": "user", "content": "List files"}]
    asked = {"messages": messages, "prompt": None, "add_special_tokens": None}
    found = server.http.post("/tokenize", json=asked).json()
    assert found["tokens"] == tokenizer.encode_plain("# user: List files\n# assistant:")
    assert found["token_strs"] is None
    info = server.http.get("/tokenizer_info").json()
    assert tokenizer.encode_plain(info["eos_token"]) == list(engine.manifest.model.eos_token_ids[:1])
    assert "add_generation_prompt" not in info["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/tokenize", {}, "give one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "give one of prompt and messages"),
        ("/tokenize", {"messages": [{"role": "fool", "content": "a"}]}, "messages.0.role: Input should be"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt: Input should be True"),
        ("/detokenize", {"tokens": [4096]}, "tokens holds token id 4096, outside the vocabulary 0..4095"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0: Input should be greater than or equal to 0"),
    ],
)
def test_tokens_that_are_refused(server: Running, path: str, body: dict[str, Any], sentence: str) -> None:
    answered = server.http.post(path, json=body)
    assert answered.status_code == 400
    assert answered.json()["error"]["message"].startswith(sentence)


def test_they_ask_for_the_key(server: Running) -> None:
    for path in ("/v1/embeddings", "/tokenize", "/detokenize"):
        answered = server.http.post(path, json={}, headers={"Authorization": "Bearer other"})
        assert answered.status_code == 401
    assert server.http.get("/tokenizer_info", headers={"Authorization": ""}).status_code == 401
