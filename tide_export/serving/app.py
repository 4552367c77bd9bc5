"""Builds the ASGI application that serves OpenAI's API, health and metrics over HTTP."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from tide_export.runtime.handle import RequestHandle
from tide_export.serving.answers import Answer
from tide_export.serving.embeddings import EmbeddingRequest, embed
from tide_export.serving.guard import Guard, answer
from tide_export.serving.protocol import ApiError, ChatRequest, CompletionRequest, refusal
from tide_export.serving.responses import ResponsesAnswer
from tide_export.serving.responses_request import ResponsesRequest
from tide_export.serving.service import Choices, Prompt, Service, cancel
from tide_export.serving.tokenizing import DetokenizeRequest, TokenizeRequest, detokenize, tokenize, tokenizer_info

R = TypeVar("R")
GONE = "the client has gone"
SMALL_BODY = 16384  # bytes that are parsed at once: others wait for it


def build_app(service: Service) -> FastAPI:
    """Builds the ASGI application; the scheduler runs while the application does."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.close)

    app = FastAPI(title="tide_export", docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    app.add_middleware(Guard, config=service.config, metrics=service.metrics)
    if allowed := service.config.allow_origin:  # around the guard: what a browser asks beforehand has no key
        app.add_middleware(CORSMiddleware, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"])

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Exception) -> JSONResponse:
        status = getattr(error, "status_code", 404)
        return answer(ApiError(status, f"there is no {request.method} {request.url.path} here", "not_found_error"))

    @app.get("/health")
    async def health() -> Response:
        failed = service.scheduler.closed  # by a failed step; a stopping server answers no requests
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    @app.get("/ready")
    async def ready() -> Response:
        full = service.scheduler.waiting >= service.config.waiting
        status = "failed" if service.scheduler.closed else "queue full" if full else "ready"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        shared = {"object": "model", "created": service.created, "owned_by": "tide_export"}
        adapters = [{"id": name, **shared, "parent": service.model} for name in service.engine.adapters]
        return {"object": "list", "data": [{"id": service.model, **shared}, *adapters]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, await _read(request, CompletionRequest, service.config.body_seconds))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, await _read(request, ChatRequest, service.config.body_seconds))

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        asked = await _read(request, ResponsesRequest, service.config.body_seconds)
        return await _answer(service, request, asked.chat, lambda choices: ResponsesAnswer(service, asked, choices))

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        asked = await _read(request, EmbeddingRequest, service.config.body_seconds)
        return JSONResponse(await _unless_gone(request, embed(service, asked)))

    @app.post("/tokenize")
    async def tokens(request: Request) -> Response:
        asked = await _read(request, TokenizeRequest, service.config.body_seconds)
        return JSONResponse(await asyncio.to_thread(tokenize, service, asked))

    @app.post("/detokenize")
    async def text(request: Request) -> Response:
        asked = await _read(request, DetokenizeRequest, service.config.body_seconds)
        return JSONResponse(await asyncio.to_thread(detokenize, service, asked))

    @app.get("/tokenizer_info")
    async def tokenizer() -> dict[str, Any]:
        return await asyncio.to_thread(tokenizer_info, service)

    return app


B = TypeVar("B", bound=BaseModel)


async def _read(request: Request, form: type[B], seconds: float) -> B:
    """Reads the request's body.

    Raises:
        ApiError: it took longer than `seconds`, is not JSON, or does not have this form.
    """
    try:
        body = await asyncio.wait_for(request.body(), seconds)
    except TimeoutError:
        raise ApiError(408, f"the request's body took longer than {seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, GONE) from None
    return _parsed(body, form) if len(body) < SMALL_BODY else await asyncio.to_thread(_parsed, body, form)


def _parsed(body: bytes, form: type[B]) -> B:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of more than 4300 digits
        raise ApiError(400, f"the body is no JSON: {error}") from None
    try:
        return form.model_validate(content)
    except ValidationError as error:
        raise refusal(error) from None


async def _answer(
    service: Service,
    http: Request,
    request: CompletionRequest | ChatRequest,
    make: Callable[[Choices], Answer | ResponsesAnswer] | None = None,
) -> Response:
    """Generates the choices of a request, and answers in the form of `make`, by default an `Answer`."""
    prompts = await asyncio.to_thread(service.prompts, request)
    choices: list[tuple[Prompt, RequestHandle]] = []
    loop, executor = asyncio.get_running_loop(), service.executor(request)
    try:
        for prompt in prompts:
            choices += [
                (prompt, handle) for handle in await loop.run_in_executor(executor, service.submit, request, prompt)
            ]
    except ApiError:
        cancel([handle for _, handle in choices])
        raise
    reply = Answer(service, request, choices) if make is None else make(choices)
    if request.stream:
        return StreamingResponse(reply.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return JSONResponse(await _unless_gone(http, reply.whole()))


async def _unless_gone(http: Request, work: Coroutine[Any, Any, R]) -> R:
    """Returns the result of `work`, or cancels it when the client disconnects."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, GONE)
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
