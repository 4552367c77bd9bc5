"""Decodes requests that join, leave and are cancelled between steps: one loop for lists of prompts and for services.

`Scheduler.submit` puts a request into a queue. Every step ends what was cancelled, lets waiting requests join as slots
and K/V memory become free, and runs one token, or what lossless mode drafts, of each request that writes, and a part of
the prompts of those that read. No thread is needed: whoever reads a handle does the steps. `start` gives them to a
thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Unpack

import numpy as np

from tide_export.bundle.auto_mode import AutoMode, sentence
from tide_export.bundle.manifest import PROPAGATE
from tide_export.bundle.opened import Bundle
from tide_export.errors import GenerationError, QueueFullError, first_line
from tide_export.runtime.config import GenerationConfig, GenerationOptions, with_options
from tide_export.runtime.decoding.decoder import StepRequest
from tide_export.runtime.decoding.generation import Progress
from tide_export.runtime.request import Request, check_prompt, decoder_of, resolve, sampler_of, text_of
from tide_export.runtime.scheduling.audit import Audit, AuditConfig, open_audit
from tide_export.runtime.scheduling.handle import END, RequestHandle
from tide_export.runtime.scheduling.job import Job, in_order
from tide_export.runtime.scheduling.prefix_cache import PrefixCache, open_prefix_cache
from tide_export.runtime.sequence import Batch, StepResult
from tide_export.values import real_number, whole_number

PROMPT_TOKENS = 512
MIN_PROMPT_TOKENS = 4  # with fewer a prompt of a bundle that propagates could not be divided
MINIMA = {"slots": 1, "prompt_tokens": MIN_PROMPT_TOKENS, "waiting": 1, "kv_tokens": 1, "prefix_cache_bytes": 0}

logger = logging.getLogger("tide_export.scheduling")


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """What a scheduler holds at most.

    Attributes:
        slots: requests decoded at the same time; no more than `Engine.max_batch_size`.
        prompt_tokens: tokens of prompts read in one step: how long those that write may wait for those that read.
        waiting: requests in the queue beyond those for which a slot is free; None: any number.
        kv_tokens: tokens of K/V of all requests with a slot, each counted with its prompt and `max_new_tokens`; None:
            any number.
        prefix_cache_bytes: of K/V of prompts and answers, beside those of requests with a slot, that are kept for
            requests that begin with the same tokens; 0: none.

    Raises:
        GenerationError: one is not a whole number, or too small.
    """

    slots: int = 8
    prompt_tokens: int = PROMPT_TOKENS
    waiting: int | None = None
    kv_tokens: int | None = None
    prefix_cache_bytes: int = 0

    def __post_init__(self) -> None:
        for name, minimum in MINIMA.items():
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), minimum=minimum)


class Scheduler:
    """Decodes requests on one batch. Any thread may submit, cancel and read; one at a time does the steps.

    Attributes:
        limits: what it holds at most.
        audit: of mode `exit`; None: there is none.
    """

    def __init__(
        self,
        bundle: Bundle,
        auto: AutoMode | None,
        batch: Batch,
        limits: SchedulerLimits,
        audit: AuditConfig | None = None,
    ) -> None:
        """`batch`: an empty one of the bundle, which nothing else uses; `auto`: as `Engine.auto`.

        Raises:
            GenerationError: the batch can have no prefix cache, or not of this size; the bundle no audit.
        """
        self.limits = limits
        self.audit: Audit | None = None if audit is None else open_audit(bundle, audit)
        self._bundle, self._batch = bundle, batch
        # By its slots, however many are taken: tokens must not depend on the load.
        self._auto = None if auto is None else auto.of(min(limits.slots, batch.free_slots))
        self._auto_sentence = f"{'full' if self._auto is None else self._auto.mode} by default: {sentence(auto)}"
        self._propagates = bundle.manifest.kv_cache_strategy == PROPAGATE
        self._prefixes = open_prefix_cache(bundle.manifest, batch, limits.prefix_cache_bytes)
        self._waiting = deque[tuple[Job, RequestHandle]]()
        self._running = dict[int, tuple[Job, RequestHandle]]()
        self._changed = threading.Condition()  # of the queue and of `_closing`
        self._stepping = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = self._cancelling = False

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of K/V in the prefix cache now."""
        return self._prefixes.bytes if self._prefixes is not None else 0

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closing

    def submit(
        self,
        ids: Sequence[int] | np.ndarray,
        config: GenerationConfig | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> RequestHandle:
        """Checks a request and puts it into the queue.

        Args:
            ids: the prompt, a flat list of token ids or an integer array [S].
            config, options: how to generate, as in `Engine.generate`.
            timeout: seconds from now after which it is cancelled.

        Raises:
            QueueFullError: the queue is full.
            GenerationError: as `Engine.stream`; the request can never get its K/V memory; the scheduler is closed.
        """
        manifest, config = self._bundle.manifest, with_options(config, options)
        prompt = check_prompt(manifest, ids)
        request = resolve(self._bundle, config, batched=False, auto=self._auto)
        sampler = sampler_of(request, prompt)
        audit = self.audit if request.config.mode == "exit" else None
        job = Job(
            prompt,
            request,
            Progress(manifest, prompt, config.max_new_tokens, request.stop, text_of(self._bundle, config, prompt)),
            partial(decoder_of, manifest, sampler, request.stop, request.drafts, auditor=audit),
            None if timeout is None else time.monotonic() + real_number("timeout", timeout),
        )
        room = self.limits.kv_tokens
        if room is not None and job.reserved > room:
            raise GenerationError(
                f"prompt and max_new_tokens have {job.reserved} tokens, and the scheduler has K/V memory for {room}"
            )
        handle = RequestHandle(job, self._drive)
        with self._changed:
            if self._closing:
                raise GenerationError("the scheduler is closed: it takes no more requests")
            allowed = self.limits.waiting
            if allowed is not None and len(self._waiting) >= allowed + self.limits.slots - len(self._running):
                raise QueueFullError(f"{allowed} requests are waiting already: submit again later")
            self._waiting.append((job, handle))
            self._changed.notify_all()
        return handle

    def step(self) -> bool:
        """Does one step over all requests with a slot; False: there was nothing to do."""
        with self._stepping:
            self._end_cancelled()
            self._admit()
            steps = self._steps()
            if not steps:
                return bool(self._running or self._waiting)
            started = time.perf_counter()
            results = self._run(steps)
            seconds = time.perf_counter() - started
            for slot, result in results.items():
                self._take(slot, result, seconds)
            return True

    def start(self) -> "Scheduler":
        """Lets a thread do the steps until `close`; logs what mode `auto` is."""
        logger.info("%d slots, mode %s", self.limits.slots, self._auto_sentence)
        self._thread = threading.Thread(target=self._work, name="tide-scheduler", daemon=True)
        self._thread.start()
        return self

    def close(self, drain: bool = True) -> None:
        """Takes no more requests, and returns when those submitted have ended; without `drain` these are cancelled."""
        with self._changed:
            self._closing, self._cancelling = True, not drain
            self._changed.notify_all()
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None
        while self.step():
            pass

    def discard(self) -> None:
        """Forgets all requests, without another step: nothing then keeps their K/V buffers alive. For a scheduler that
        nobody uses any more."""
        self._running.clear()
        self._waiting.clear()

    def __enter__(self) -> "Scheduler":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(drain=kind is None)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._closing):
                    self._changed.wait()
                if self._closing and not (self._waiting or self._running):
                    return
            try:
                self.step()
            except Exception as error:  # nobody else would see it, and all readers would wait for ever
                self._abort(GenerationError(f"the scheduler failed: {first_line(error)}"))
                raise

    def _abort(self, error: GenerationError) -> None:
        """Ends every request with an error, and takes no more."""
        with self._changed:
            self._closing = True
        for job, handle in self._all():
            handle.error = error
            self._end(job, handle)

    def _drive(self) -> bool:
        """A step by the reader of a handle; False: the thread does them."""
        if self._thread is not None:
            return False
        self.step()
        return True

    def _all(self) -> list[tuple[Job, RequestHandle]]:
        with self._changed:
            return [*self._waiting, *self._running.values()]

    def _end_cancelled(self) -> None:
        now = time.monotonic()
        for job, handle in self._all():
            if job.cancelled or self._cancelling or job.expired(now):
                job.progress.end("timeout" if job.expired(now) else "cancelled")
                self._end(job, handle)

    def _admit(self) -> None:
        """Gives slots to waiting requests, first come, first served."""
        room = self.limits.kv_tokens
        held = sum(job.reserved for job, _ in self._running.values())
        while self._waiting and self._batch.free_slots and len(self._running) < self.limits.slots:
            job, handle = self._waiting[0]
            if room is not None and held + job.reserved > room:
                return
            held += job.reserved
            with self._changed:
                self._waiting.popleft()
            try:
                slot = self._batch.join(self._thresholds(job.request), job.request.max_pending)
            except GenerationError as error:  # the device failed
                handle.error = error
                handle.put(END)
                continue
            job.begin(slot, self._batch.sequences[slot])
            self._running[slot] = (job, handle)

    def _thresholds(self, request: Request) -> list[float]:
        """Those of a request that begins now."""
        if self.audit is None or request.config.mode != "exit":
            return request.thresholds
        return self.audit.raised(request.thresholds)

    def _steps(self) -> dict[int, StepRequest]:
        """What each request runs in this step, by slot."""
        left, steps = self.limits.prompt_tokens, dict[int, StepRequest]()
        for job in in_order([job for job, _ in self._running.values()]):
            if self._prefixes is not None and left and job.unread and not self._begin_cached(self._prefixes, job):
                continue
            step = job.next_step(left, whole=self._propagates)
            if step is None:
                continue
            assert job.slot is not None
            steps[job.slot] = step
            if not job.progress.tokens:
                left -= len(step.ids)
        return steps

    def _begin_cached(self, prefixes: PrefixCache, job: Job) -> bool:
        """Takes over what is cached of a prompt; False: the request failed."""
        assert job.slot is not None
        try:
            job.skip(prefixes.begin(job.slot, job.prompt))
        except GenerationError as error:
            self._fail(job.slot, error)
            return False
        return True

    def _keep(self, job: Job) -> None:
        """Caches the K/V of a request's text."""
        if self._prefixes is None or job.slot is None:
            return
        try:
            self._prefixes.keep(job.slot, job.prompt, job.progress.tokens)
        except GenerationError as error:
            logger.warning("the prefix cache does not grow: %s", error)

    def _run(self, steps: Mapping[int, StepRequest]) -> dict[int, StepResult]:
        """Runs a step. One that fails for several requests is repeated for each alone, so that only those end whose own
        step fails."""
        try:
            return self._batch.step(
                {slot: step.ids for slot, step in steps.items()},
                logits_to_keep={
                    slot: step.logits_to_keep for slot, step in steps.items() if self._running[slot][0].verifies
                },
                full={slot for slot, step in steps.items() if step.full},
            )
        except GenerationError as error:
            if len(steps) == 1:
                self._fail(next(iter(steps)), error)
                return {}
        results = dict[int, StepResult]()
        for slot, step in steps.items():
            for result in self._run({slot: step}).values():
                results[slot] = result._replace(
                    logits=result.logits.copy(), position_logits=result.position_logits.copy()
                )
        return results

    def _take(self, slot: int, result: StepResult, seconds: float) -> None:
        job, handle = self._running[slot]
        read = job.reads_prompt
        try:
            tokens = job.take(result, seconds)
        except GenerationError as error:  # logits that are not finite
            self._fail(slot, error)
            return
        if tokens:
            handle.put(tokens)
        if job.progress.finish_reason is not None:
            self._end(job, handle)
        elif read:
            self._keep(job)

    def _fail(self, slot: int, error: GenerationError) -> None:
        job, handle = self._running[slot]
        handle.error = error
        self._end(job, handle)

    def _end(self, job: Job, handle: RequestHandle) -> None:
        if job.slot is None:
            with self._changed:
                self._waiting.remove((job, handle))
        else:
            if handle.error is None:
                self._keep(job)
            del self._running[job.slot]
            self._batch.leave(job.slot)
            job.end()
        handle.put(END)
