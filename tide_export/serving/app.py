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
        return await _answer(service, request, await _read(service, request, CompletionRequest))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(service, request, await _read(service, request, ChatRequest))

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        asked = await _read(service, request, ResponsesRequest)
        return await _answer(service, request, asked.chat, lambda choices: ResponsesAnswer(service, asked, choices))

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        asked = await _read(service, request, EmbeddingRequest)
        return await _json(await _unless_gone(request, embed(service, asked)))

    @app.post("/tokenize")
    async def tokens(request: Request) -> Response:
        asked = await _read(service, request, TokenizeRequest)
        reader = service.reader_of(len(asked.prompt or ""), asked.prompt is None)
        return JSONResponse(await asyncio.get_running_loop().run_in_executor(reader, tokenize, service, asked))

    @app.post("/detokenize")
    async def text(request: Request) -> Response:
        asked = await _read(service, request, DetokenizeRequest)
        return JSONResponse(await asyncio.to_thread(detokenize, service, asked))

    @app.get("/tokenizer_info")
    async def tokenizer() -> dict[str, Any]:
        return await asyncio.to_thread(tokenizer_info, service)

    return app


B = TypeVar("B", bound=BaseModel)


async def _read(service: Service, request: Request, form: type[B]) -> B:
    """Reads the request's body.

    Raises:
        ApiError: it took longer than `body_seconds`, is not JSON, or does not have this form.
    """
    seconds = service.config.body_seconds
    try:
        body = await asyncio.wait_for(request.body(), seconds)
    except TimeoutError:
        raise ApiError(408, f"the request's body took longer than {seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, GONE) from None
    if (reader := service.reader_of(len(body))) is None:
        return _parsed(body, form)
    return await asyncio.get_running_loop().run_in_executor(reader, _parsed, body, form)


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
    choices: list[tuple[Prompt, RequestHandle]] = []
    run, gone = asyncio.get_running_loop().run_in_executor, asyncio.create_task(_gone(http))

    def unless_gone(function: Callable[..., R], *arguments: Any) -> R:
        if gone.done():  # while other requests had the thread
            raise ApiError(499, GONE)
        return function(*arguments)

    texts = [] if isinstance(request, ChatRequest) else request.prompts
    reader = service.reader_of(sum(map(len, texts)), isinstance(request, ChatRequest))
    try:
        for prompt in await run(reader, unless_gone, service.prompts, request):
            handles = await run(service.executor(request), unless_gone, service.submit, request, prompt)
            choices += [(prompt, handle) for handle in handles]
    except ApiError:
        cancel([handle for _, handle in choices])
        raise
    finally:
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    reply = Answer(service, request, choices) if make is None else make(choices)
    if request.stream:
        return StreamingResponse(reply.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return await _json(await _unless_gone(http, reply.whole()))


async def _json(content: dict[str, Any]) -> Response:
    return Response(await asyncio.to_thread(_written, content), media_type="application/json")


def _written(content: dict[str, Any]) -> bytes:
    """Writes JSON, each item of a list by itself: meanwhile the writer lets no other thread run."""

    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    fields = [
        f"{written(name)}:" + (f"[{','.join(map(written, value))}]" if isinstance(value, list) else written(value))
        for name, value in content.items()
    ]
    return f"{{{','.join(fields)}}}".encode()


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
