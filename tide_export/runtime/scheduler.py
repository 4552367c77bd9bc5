"""Schedules requests that join, leave and are cancelled between steps, for lists and for servers.

`Scheduler.submit` puts a request into a queue. Each step ends cancelled requests, admits waiting ones to free slots and
K/V memory, and runs one token (in lossless mode the drafts) of each decoding request and a chunk of the prompts of the
others. The steps run in the thread that reads a handle, or, after `start`, in a thread of the library.
"""

import asyncio
import ctypes
import json
import logging
import threading
import weakref
from collections.abc import Sequence
from ctypes import byref, c_double, c_int
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from tide_export.bundle.manifest import Drafting
from tide_export.bundle.opened import Bundle
from tide_export.common.values import Options, real_number, whole_number
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig, GenerationOptions, with_options
from tide_export.runtime.handle import RequestHandle
from tide_export.runtime.hooks import Hooks
from tide_export.runtime.native import OK, AuditState, Owned, SchedulerState, call, created, library, raise_interrupt
from tide_export.runtime.request import hooks_of, options_json, prompt_ids
from tide_export.runtime.tokenizer import LateText, tokenizer_of
from tide_export.runtime.watch import Watch

PROMPT_TOKENS = 512
MINIMA = {"slots": 1, "prompt_tokens": 1, "waiting": 1, "kv_tokens": 1, "prefix_cache_bytes": 0, "answer_bytes": 0}
AUDIT_RATE = 0.01  # costs 2 % of the time at most (docs/measurements/serving.md)
ALL_TOKENS = 2**63  # a position beyond the last token of any request

logger = logging.getLogger("tide_export.scheduling")


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits(Options):
    """Limits the work and memory of a scheduler.

    Attributes:
        slots: requests decoded at the same time, 1024 or fewer; at most `Engine.max_batch_size` are.
        prompt_tokens: prompt tokens of one step; fewer make decoding requests wait less for prompts.
        waiting: requests in the queue beyond those for which a slot is free; None: no limit.
        kv_tokens: tokens of K/V of all requests with a slot, each counted with its prompt and `max_new_tokens`; None:
            as many as there is memory for.
        prefix_cache_bytes: bytes of K/V and recurrent states of earlier prompts and answers kept for requests
            that begin with the same tokens, those in use included; 0: none.
        answer_bytes: bytes of earlier answers in lossless mode that later requests of the same adapter and
            `cache_salt` draft from; 0: none.

    Raises:
        GenerationError: one is not a whole number, or too small.
    """

    slots: int = 8
    prompt_tokens: int = PROMPT_TOKENS
    waiting: int | None = None
    kv_tokens: int | None = None
    prefix_cache_bytes: int = 0
    answer_bytes: int = 0

    def __post_init__(self) -> None:
        for name, minimum in MINIMA.items():
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), minimum=minimum)


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Options):
    """Sets how a scheduler checks tokens of mode `exit` against full depth.

    Attributes:
        rate: share of the tokens that are chosen for the check.
        epsilon: largest share of tokens that exits may change. When the lower bound is above it, the thresholds of
            requests that get a slot later are raised, halfway to 1 each time; after three times exits are turned off.
            None: thresholds stay.

    Raises:
        GenerationError: one is not a number, or outside its range.
    """

    rate: float = AUDIT_RATE
    epsilon: float | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "epsilon"):
            value = getattr(self, name)
            if value is not None and not 0 < real_number(f"audit {name}", value) <= 1:
                raise GenerationError(f"audit {name} must be above 0 and at most 1, not {value}")


class Audit:
    """Reads the results of a scheduler's audit."""

    def __init__(self, scheduler: Owned) -> None:
        """Takes a tide_scheduler that has an audit."""
        self._scheduler = scheduler

    @property
    def audited(self) -> int:
        """Tokens chosen so far, over all requests."""
        return self._state.audited

    @property
    def checked(self) -> int:
        """Chosen tokens that had exited and were computed again at full depth."""
        return self._state.checked

    @property
    def different(self) -> int:
        """Checked tokens for which full depth chooses another token."""
        return self._state.different

    @property
    def raises(self) -> int:
        """Number of times that thresholds were raised."""
        return self._state.raises

    @property
    def upper_bound(self) -> float:
        """Upper bound of the share of tokens that exits change, since thresholds were last raised."""
        return self._state.upper_bound

    @property
    def lower_bound(self) -> float:
        """Lower bound of the same share."""
        return self._state.lower_bound

    @property
    def _state(self) -> AuditState:
        state = AuditState()
        call("scheduler_audit", self._scheduler, ctypes.byref(state))
        return state


class Scheduler:
    """Decodes requests in one batch.

    Any thread may submit, cancel and read; one at a time runs the steps.

    Attributes:
        limits: its limits.
        audit: the audit of mode `exit`; None: there is none.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Owned,
        limits: SchedulerLimits,
        compaction_threshold: float | None,
        audit: AuditConfig | None,
        by_default: str,
        drafting: Drafting | None,
    ) -> None:
        """Creates the scheduler of a tide_engine; `Engine.scheduler` lists the arguments and errors.

        Args:
            by_default: describes mode `auto`, for the log.
            drafting: replaces the bundle's drafting in lossless mode.
        """
        self.limits = limits
        options: dict[str, Any] = asdict(limits) | {"compaction_threshold": compaction_threshold}
        if audit is not None:
            options |= {"audit_rate": audit.rate, "audit_epsilon": audit.epsilon}
        self._bundle, self._by_default, self._drafting = bundle, by_default, drafting
        self._hooks = dict[Owned, Hooks]()  # of requests that may still run, even if their handles are gone
        self._handle = created("scheduler_create", engine, json.dumps(options).encode(), needed=(engine, self._hooks))
        self.audit = None if audit is None else Audit(self._handle)
        self._threaded = False
        self._watches = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Watch]()
        weakref.finalize(self, _close_watches, self._watches)

    @property
    def waiting(self) -> int:
        """Number of requests without a slot."""
        return self._state.waiting

    @property
    def running(self) -> int:
        """Number of requests with a slot."""
        return self._state.running

    @property
    def prefix_cache_bytes(self) -> int:
        """Bytes of K/V and recurrent states in the prefix cache."""
        return self._state.prefix_cache_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens of K/V that requests with a slot may have together, by `limits` and by memory."""
        return self._state.kv_tokens

    @property
    def closed(self) -> bool:
        """Whether the scheduler refuses new requests."""
        return bool(self._state.closed)

    @property
    def _state(self) -> SchedulerState:
        state: SchedulerState = library().tide_scheduler_describe(self._handle)
        return state

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
            timeout: seconds from now after which it is cancelled; None: never.

        Raises:
            QueueFullError: the queue is full.
            GenerationError: as `Engine.stream` raises it; the request needs more K/V memory than `kv_tokens`; or the
                scheduler is closed.
        """
        return self.submit_ids(prompt_ids(ids), with_options(config, options), timeout)

    def submit_ids(self, prompt: np.ndarray, config: GenerationConfig, timeout: float | None = None) -> RequestHandle:
        """Submits a prompt that is an int64 array [S], as `submit` does."""
        bundle, seconds = self._bundle, None if timeout is None else c_double(real_number("timeout", timeout))
        options, hooks = options_json(bundle, config, self._drafting), hooks_of(bundle, config, prompt)
        handle = Owned("submit")
        pointers = hooks and byref(hooks.struct), seconds and byref(seconds), handle.pointer
        self._forget_ended()
        try:
            if hooks is not None:
                self._hooks[handle] = hooks
            call("submit", self._handle, prompt.ctypes.data, len(prompt), options, *pointers)
        except BaseException:
            if handle:  # a signal handler raised after the request was queued
                library().tide_request_cancel(handle)
            else:
                self.forget(handle)
            raise
        late = None
        if config.detokenize and not config.stop:
            late = LateText(tokenizer_of(bundle), prompt.tolist(), config.special_tokens)
        return RequestHandle(self, handle, hooks, late, config)

    def forget(self, request: Owned) -> None:
        """Drops the hooks of a request that has ended."""
        self._hooks.pop(request, None)

    def _forget_ended(self) -> None:
        """Drops the hooks of requests that ended without being read to the end."""
        status = c_int()
        for request in list(self._hooks):
            if request:
                library().tide_request_read(request, ALL_TOKENS, None, 0, byref(status))
                if status.value != OK:
                    self.forget(request)

    def step(self) -> bool:
        """Runs one step over all requests with a slot; False: there was nothing to do.

        Raises:
            GenerationError: a hook of a request called it during a step.
        """
        self._check_caller()
        more = bool(library().tide_scheduler_step(self._handle))
        raise_interrupt()
        return more

    def drive(self) -> bool:
        """Runs a step for the reader of a handle; False: the library's thread runs the steps."""
        if not self._threaded:
            self.step()
        else:
            self._check_caller()
        return not self._threaded

    def _check_caller(self) -> None:
        if self._state.in_step:
            raise GenerationError("a hook of a request cannot wait for the scheduler that calls it")

    def watch(self) -> Watch:
        """Returns the watch that wakes coroutines of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._watches:
            self._watches[loop] = Watch(self._handle)
        return self._watches[loop]

    def start(self) -> "Scheduler":
        """Starts a thread that runs the steps until `close`; logs what mode `auto` is."""
        logger.info("%d slots, mode %s", self.limits.slots, self._by_default)
        call("scheduler_start", self._handle)
        self._threaded = True
        return self

    def close(self, drain: bool = True) -> None:
        """Refuses new requests and waits until those submitted have ended.

        Args:
            drain: finish them; else they are cancelled, as they are if a signal handler's exception, such as
                KeyboardInterrupt, ends the wait.

        Raises:
            GenerationError: as `step` raises it.
        """
        self._check_caller()
        closing = threading.Thread(target=library().tide_scheduler_close, args=(self._handle, drain))
        try:
            closing.start()
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            closing.run()
        try:
            if closing.is_alive():
                closing.join()  # signal handlers run during a join, but not during a function of the library
        except BaseException:
            library().tide_scheduler_close(self._handle, False)
            raise
        finally:
            self._threaded = False

    def __enter__(self) -> "Scheduler":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(drain=kind is None)


def _close_watches(watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Watch]) -> None:
    for watch in list(watches.values()):
        watch.close()
