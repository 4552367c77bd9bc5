"""Answers requests with one engine, its scheduler and its tokenizer, independent of HTTP."""

import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

from tide_export.bundle.file_names import WEIGHTS_FILE
from tide_export.errors import BundleError, ConfigError, ConstraintError, GenerationError, QueueFullError, TideError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine
from tide_export.runtime.generation import TokenLogprobs
from tide_export.runtime.grammar import Compilations, stop_compiling
from tide_export.runtime.handle import RequestHandle
from tide_export.runtime.memory import memory_left, memory_limit
from tide_export.runtime.scheduler import AUDIT_RATE, AuditConfig, SchedulerLimits
from tide_export.serving.call_reader import CallReader
from tide_export.serving.config import ServerConfig
from tide_export.serving.metrics import Metrics
from tide_export.serving.protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest
from tide_export.serving.tool_calling import ToolCalling

logger = logging.getLogger("tide_export.serving")
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
RETRY_SECONDS = 1
LARGE = 16384  # bytes, characters or tokens of a request: others wait while fewer are parsed or encoded
COMPILING_THREADS = RENDERING_THREADS = 2
MIN_PREFIX_CACHE_BYTES, PREFIX_CACHE_UNIT = 2**28, 2**23
STOPPING = "the server is stopping"
FINISH_REASONS = {"stop": "stop", "length": "length", "context": "length"}


def default_prefix_cache_bytes(engine: Engine) -> int:
    """Returns the size of the weights, as a larger model has larger K/V and states, but 256 MiB or more.

    At most a quarter of the memory that is left, and none of less than PREFIX_CACHE_UNIT; 0 for providers without one.
    """
    if engine.provider != "cpu":
        return 0
    weights = engine.manifest.files.get(WEIGHTS_FILE)
    wanted = max(MIN_PREFIX_CACHE_BYTES, weights.size if weights else 0)
    return min(wanted, memory_left() // 4 // PREFIX_CACHE_UNIT * PREFIX_CACHE_UNIT)


@dataclass(frozen=True)
class Piece:
    """A piece of the text of one choice; the last one has a finish reason."""

    text: str
    tokens: list[int]  # its tokens
    logprobs: Sequence[TokenLogprobs | None] | None  # one per token
    finish_reason: str | None = None
    echoed: bool = False  # whether it is the prompt


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens, the most tokens to generate, and its text unless it was given as tokens.

    Those of one request share its `compilations`.
    """

    ids: list[int]
    max_tokens: int
    compilations: Compilations
    text: str | None = None


Choices = Sequence[tuple[Prompt, RequestHandle]]


class Service:
    """Answers requests with one bundle; its scheduler runs from `start` to `close`."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        """Opens tokenizer, chat template and scheduler.

        Raises:
            ConfigError: an adapter has the model's name.
            BundleError: the bundle has no tokenizer, or its chat template cannot be used.
            GenerationError: memory is too small for the slots.
        """
        self.config, self.engine = config, engine
        self.model = config.model_name or engine.bundle.path.resolve().name
        if self.model in engine.adapters:
            raise ConfigError(f"the model and an adapter are both named {self.model!r}: give another --model-name")
        self.tokenizer = engine.tokenizer
        self.created = int(time.time())
        limits = SchedulerLimits(
            slots=min(config.slots, engine.max_batch_size),
            waiting=config.waiting,
            prompt_tokens=config.prompt_tokens,
            kv_tokens=config.kv_tokens,
            prefix_cache_bytes=default_prefix_cache_bytes(engine)
            if config.prefix_cache_bytes is None
            else config.prefix_cache_bytes,
            answer_bytes=config.answer_bytes,
        )
        audit = None
        if config.audit_rate is not None or config.audit_epsilon is not None:
            audit = AuditConfig(rate=config.audit_rate or AUDIT_RATE, epsilon=config.audit_epsilon)
        self.scheduler = engine.scheduler(limits, audit=audit)
        cached = self.scheduler.limits.prefix_cache_bytes >> 20
        memory = f"{memory_left() >> 20} MiB of {memory_limit() >> 20} left, prefix cache of {cached} MiB"
        logger.info("memory: %s, K/V for %d tokens at a time", memory, self.scheduler.kv_tokens)
        self.metrics = Metrics(self.scheduler)
        self._compiling = ThreadPoolExecutor(COMPILING_THREADS, "grammars")
        self._rendering = ThreadPoolExecutor(RENDERING_THREADS, "templates")
        self._reading = ThreadPoolExecutor(1, "large requests")
        self._calling: ToolCalling | None = None
        self._no_template = ""
        try:
            self._calling = ToolCalling(engine.bundle, self.tokenizer, config.tool_parser)
            logger.info("%s", self._calling.sentence())
        except BundleError as error:
            self._no_template = str(error)

    def prompts(self, request: CompletionRequest | ChatRequest) -> list[Prompt]:
        """Returns the prompts of a request.

        Raises:
            ApiError: the request names another model; there is no chat template, or it refuses the messages; there
                are more choices than the queue takes; or a prompt fills the model's context.
        """
        self.check_model(request.model)
        prompts = 1 if isinstance(request, ChatRequest) else len(request.prompts)
        choices, room = prompts * request.n, self.scheduler.limits.slots + self.config.waiting
        if choices > room:
            raise ApiError(400, f"prompt and n ask for {choices} choices, and this server takes {room} at a time")
        texts: list[str | None]
        try:
            if isinstance(request, ChatRequest):
                texts, encoded = [None], [self.conversation(request)]
                asked = request.max_completion_tokens or request.max_tokens or self.config.max_tokens
            else:
                texts = [one if isinstance(one, str) else None for one in request.prompts]
                encoded = self.encoded(request.prompts)
                asked = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        except GenerationError as error:
            raise ApiError(400, str(error)) from None
        compilations, pairs = Compilations(), zip(encoded, texts, strict=True)
        return [Prompt(ids, self._room(ids, asked), compilations, text) for ids, text in pairs]

    def check_model(self, name: str) -> None:
        """Checks the model's name, which may be an adapter's; ApiError if the server has another model."""
        if name not in (self.model, *self.engine.adapters):
            here = ", ".join(map(repr, (self.model, *self.engine.adapters)))
            raise ApiError(404, f"there is no model {name!r} here, but {here}", "not_found_error")

    def adapter_of(self, name: str) -> str | None:
        """Returns the adapter that a request's model means; None: none."""
        return None if name == self.model else name

    def salt_of(self, given: str | None) -> str | None:
        """Returns the salt of a request's cached prompts: `given`, or with `private_cache` a new one."""
        return given or (token_hex(16) if self.config.private_cache else None)

    def conversation(self, request: ChatRequest) -> list[int]:
        """Returns the tokens of a conversation.

        Raises:
            GenerationError: the chat template refuses it.
            ApiError: the bundle has no chat template.
        """
        return self._chat().encode(request)

    def encoded(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        """Returns the tokens of each prompt; GenerationError if a text has none."""
        return [self.tokenizer.encode(one) if isinstance(one, str) else one for one in prompts]

    def submit(self, request: GenerationRequest, prompt: Prompt) -> list[RequestHandle]:
        """Puts the choices of one prompt into the queue, all or none.

        Raises:
            ApiError: the server is stopping, the queue is full, or an option or the prompt is refused.
        """
        with prompt.compilations.shared():
            return self.put(prompt.ids, self._configs(request, prompt))

    def executor(self, request: GenerationRequest) -> ThreadPoolExecutor | None:
        """Returns the threads that submit a request: those with grammars, which take longer, have their own."""
        return self._compiling if request.constrained else self.reader_of(len(request.predicted))

    def reader_of(self, size: int, conversation: bool = False) -> ThreadPoolExecutor | None:
        """Returns the threads that parse or encode what a client sent; None: any.

        Large texts have one, as a parser lets no other thread run; templates, which may loop, have others.
        """
        return self._rendering if conversation else self._reading if size >= LARGE else None

    def close(self) -> None:
        """Ends what still runs; waits for the step in progress alone."""
        for threads in (self._compiling, self._rendering, self._reading):
            threads.shutdown(wait=False, cancel_futures=True)
        stop_compiling()
        self.scheduler.close(drain=False)

    def put(self, ids: Sequence[int], configs: Iterable[GenerationConfig]) -> list[RequestHandle]:
        """Puts generations from the same prompt into the queue, all or none; raises as `submit`."""
        handles = list[RequestHandle]()
        if self.scheduler.closed:
            raise ApiError(503, STOPPING, "server_error", RETRY_SECONDS)
        try:
            for config in configs:
                handles.append(self.scheduler.submit(ids, config, timeout=self.config.request_seconds))
        except GenerationError as error:
            cancel(handles)
            if isinstance(error, QueueFullError):
                raise ApiError(429, str(error), "rate_limit_error", RETRY_SECONDS) from None
            raise ApiError(400, str(error)) from None
        return handles

    async def pieces(self, handle: RequestHandle) -> AsyncGenerator[Piece]:
        """Yields the text of one choice, piece by piece.

        Raises:
            ApiError: the generation failed, or took too long.
        """
        started, sent, new = time.perf_counter(), 0, list[int]()
        count = 0

        def piece(reason: str | None = None) -> Piece:
            logprobs = None if handle.logprobs is None else handle.logprobs[count - len(new) : count]
            return Piece(text[sent:], new, logprobs, reason)

        try:
            async for token in handle:
                if not count:
                    self.metrics.first_token.observe(time.perf_counter() - started)
                new.append(token)
                count += 1
                text = handle.text or ""
                if len(text) > sent:
                    yield piece()
                    sent, new = len(text), []
            text = handle.text or ""
        except ConstraintError as error:
            raise ApiError(400, str(error)) from None
        except TideError as error:
            raise ApiError(500, str(error), "server_error") from None
        finally:
            handle.cancel()
            self.metrics.ended(handle)
        yield piece(self.reason(handle))

    def reader(self, request: GenerationRequest) -> CallReader | None:
        """Returns a reader of the tool calls of one answer; None: no tools are offered."""
        return self._chat().reader(request) if isinstance(request, ChatRequest) and request.offered else None

    def _chat(self) -> ToolCalling:
        if self._calling is None:
            raise ApiError(400, self._no_template)
        return self._calling

    def _configs(self, request: GenerationRequest, prompt: Prompt) -> Iterator[GenerationConfig]:
        salt = self.salt_of(request.cache_salt)
        prediction = self.tokenizer.encode(request.predicted) if request.predicted else None
        calling: GenerationConfig | None = None
        for choice in range(request.n):
            # At least one token: the step over the prompt generates it.
            ends = self.engine.manifest.model.eos_token_ids
            config = request.config(max(prompt.max_tokens, 1), choice, ends, prediction)
            config = replace(config, adapter=self.adapter_of(request.model), cache_salt=salt)
            if isinstance(request, ChatRequest) and request.offered:
                calling = calling or self._chat().config(request, config)
                config = replace(calling, seed=config.seed)
            yield config

    def reason(self, handle: RequestHandle) -> str:
        """Returns why a generation ended; ApiError if the server stopped it or it took too long."""
        reason = handle.finish_reason
        if reason == "cancelled":
            raise ApiError(503, STOPPING, "server_error", RETRY_SECONDS)
        if reason not in FINISH_REASONS:
            raise self.too_long()
        return FINISH_REASONS[reason]

    def too_long(self) -> ApiError:
        """Returns the error of a request that reached the time limit."""
        return ApiError(504, f"the request took longer than {self.config.request_seconds:g} s", "server_error")

    def _room(self, ids: Sequence[int], asked: int) -> int:
        """Returns the most tokens of an answer that fit the model's context."""
        context = self.engine.manifest.model.context_length
        if context is None:
            return asked
        if len(ids) >= context + (asked == 0):
            raise ApiError(
                400, f"the prompt has {len(ids)} tokens, and the model's context of {context} leaves no room to answer"
            )
        return min(asked, context - len(ids))


def cancel(handles: Sequence[RequestHandle]) -> None:
    """Cancels requests that have not ended."""
    for handle in handles:
        handle.cancel()


def usage(choices: Choices, completion_tokens: int) -> dict[str, Any]:
    """Returns OpenAI's `usage`, with the drafts of lossless mode as predicted tokens.

    The first choice of each prompt tells how much of it was cached.
    """
    first = {id(prompt): (prompt, handle) for prompt, handle in reversed(choices)}.values()
    prompt_tokens, stats = sum(len(prompt.ids) for prompt, _ in first), [handle.stats for _, handle in choices]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(handle.cached_tokens for _, handle in first)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(one.accepted for one in stats),
            "rejected_prediction_tokens": sum(one.drafted - one.accepted for one in stats),
        },
    }
