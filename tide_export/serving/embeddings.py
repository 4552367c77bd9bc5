"""Answers POST /v1/embeddings."""

import asyncio
import base64
from collections import deque
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tide_export.errors import GenerationError
from tide_export.runtime.embedding import EmbeddingConfig
from tide_export.runtime.handle import RequestHandle
from tide_export.serving.protocol import ApiError, Nullable, Prompts, listed
from tide_export.serving.service import Service, cancel


class EmbeddingRequest(Nullable):
    """POST /v1/embeddings: OpenAI's fields, and those of `EmbeddingConfig`."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    pooling: Literal["last", "mean"] = "last"
    layer: int | None = Field(None, ge=1)
    normalize: bool = True
    cache_salt: str | None = Field(None, min_length=1)


async def embed(service: Service, request: EmbeddingRequest) -> dict[str, Any]:
    """Answers a request; at most as many texts are queued at a time as the server has slots.

    Raises:
        ApiError: the request names another model, an option or a text is refused, the queue is full, a text failed, or
            all of them together took longer than a request may.
    """
    try:
        async with asyncio.timeout(service.config.request_seconds):
            return await _embed(service, request)
    except TimeoutError:
        raise service.too_long() from None


async def _embed(service: Service, request: EmbeddingRequest) -> dict[str, Any]:
    service.check_model(request.model)
    fields = request.model_dump(include={"pooling", "layer", "dimensions", "normalize"})
    try:
        how = EmbeddingConfig(**fields, adapter=service.adapter_of(request.model))
        options = replace(how.options(service.engine.manifest), cache_salt=service.salt_of(request.cache_salt))
        given = listed(request.input)
        reader = service.reader_of(sum(map(len, given)))
        texts = await asyncio.get_running_loop().run_in_executor(reader, service.encoded, given)
    except GenerationError as error:
        raise ApiError(400, str(error)) from None
    running, vectors = deque[RequestHandle](), list[NDArray[np.float32]]()
    try:
        for ids in texts:
            if len(running) == service.scheduler.limits.slots:
                vectors.append(await _vector(service, how, running[0]))
                running.popleft()
            running += await asyncio.to_thread(service.put, ids, [options])
        while running:
            vectors.append(await _vector(service, how, running[0]))
            running.popleft()
    finally:
        cancel(running)
    count = sum(map(len, texts))
    data = [
        {"object": "embedding", "index": number, "embedding": _encoded(vector, request.encoding_format)}
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": request.model, "usage": usage}


async def _vector(service: Service, how: EmbeddingConfig, handle: RequestHandle) -> NDArray[np.float32]:
    try:
        async for _ in handle:
            pass
        service.reason(handle)
        service.metrics.read(handle)
        return await asyncio.to_thread(lambda: how.vector(handle.result()))
    except GenerationError as error:
        raise ApiError(400 if handle.error is None else 500, str(error)) from None


def _encoded(vector: NDArray[np.float32], form: str) -> list[float] | str:
    return vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
