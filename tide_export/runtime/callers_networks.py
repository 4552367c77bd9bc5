"""Lets the library run segment networks by Python callbacks, for engines that it cannot open itself.

The library keeps the sequences, their memory and the recorded CUDA graphs. It calls back to run one network, on a GPU
only until that run is recorded.
"""

import ctypes
import json
import logging
import os
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any, Protocol

from tide_export.bundle.network_spec import RunSize
from tide_export.bundle.opened import Bundle
from tide_export.errors import TideError
from tide_export.runtime import native
from tide_export.runtime.native import Owned

logger = logging.getLogger("tide_export")

Open = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, POINTER(c_int64))
Run = ctypes.CFUNCTYPE(
    *(c_int, c_void_p, c_int64, c_char_p, POINTER(c_char_p), POINTER(c_void_p), c_size_t),
    *(c_int64, c_int64, c_int64, c_int64, c_int),
)
Forget = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64)
Close = ctypes.CFUNCTYPE(None, c_void_p, c_int64)


class Networks(Protocol):
    """Runs the networks on one set of buffers."""

    def run(self, name: str, addresses: Mapping[str, int], size: RunSize, recording: int, captured: bool) -> bool:
        """Queues a run of a network, and returns whether its runs can be recorded.

        Args:
            addresses: the memory of its tensors, by name.
            recording: 0, or the number of the recording that the run is part of: it is queued, then captured with the
                same arguments, and its context must not change after that.
            captured: whether the stream is being captured.

        Raises:
            GenerationError: the run failed.
        """
        ...

    def forget(self, recording: int) -> None:
        """Frees the contexts of a recording, if there are any."""
        ...

    def close(self) -> None:
        """Frees the memory of the networks."""
        ...


class Opener(Protocol):
    """Opens networks on a CUDA stream; None: on the host."""

    def __call__(self, stream: int | None) -> Networks: ...


class _Struct(ctypes.Structure):
    _fields_ = (
        ("context", c_void_p),
        ("provider", c_char_p),
        ("gpu", c_int),
        ("open", Open),
        ("run", Run),
        ("forget", Forget),
        ("close", Close),
        ("reports", c_int),
    )


def load_networks(
    bundle: Bundle, options: dict[str, Any], provider: str, opener: Opener, gpu: int | None = None
) -> Owned:
    """Creates a tide_engine on networks that `opener` opens.

    Args:
        options: the options of tide_load.
        gpu: the number of the GPU that they run on; None: the host.

    Raises:
        ProviderError, BundleError: as `engine.load` raises them.
    """
    callbacks = _Callbacks(provider, opener, -1 if gpu is None else gpu)
    arguments = *load_arguments(bundle, options), ctypes.byref(callbacks.struct)
    return native.created("load_networks", *arguments, needed=(callbacks,))


def load_arguments(bundle: Bundle, options: dict[str, Any]) -> tuple[bytes, bytes]:
    """Returns the path and the options of tide_load that hand over an open bundle."""
    return os.fsencode(bundle.path), json.dumps(options | {"opened": bundle.handed_over}).encode()


class _Callbacks:
    """Wraps an `Opener` and its networks as C functions."""

    def __init__(self, provider: str, opener: Opener, gpu: int) -> None:
        self._opener, self._opened, self._numbers = opener, dict[int, Networks](), 0
        functions = Open(self._open), Run(self._run), Forget(self._forget), Close(self._close)
        self.struct = _Struct(None, provider.encode(), gpu, *functions, 1)

    def _open(self, _: Any, stream: int | None, number: Any) -> int:
        try:
            self._numbers += 1
            self._opened[self._numbers] = self._opener(stream)
            number[0] = self._numbers
            _report(native.OK)
        except BaseException as error:
            _failed("networks cannot be opened", error)
        return native.OK  # ignored: `_report` gives the status

    def _run(
        self,
        _: Any,
        number: int,
        network: bytes,
        tensors: Any,
        addresses: Any,
        count: int,
        tokens: int,
        batch_size: int,
        keys: int,
        recording: int,
        captured: int,
    ) -> int:
        try:
            named = {tensors[i].decode(): int(addresses[i] or 0) for i in range(count)}
            size = RunSize(tokens, batch_size, keys)
            records = self._opened[number].run(network.decode(), named, size, recording, bool(captured))
            _report(native.OK if records else native.ENDED)
        except BaseException as error:
            _failed(f"a run of {network.decode()} failed", error)
        return native.OK

    def _forget(self, _: Any, number: int, recording: int) -> None:
        try:
            self._opened[number].forget(recording)
        except BaseException as error:
            _failed("a recording cannot be forgotten", error)

    def _close(self, _: Any, number: int) -> None:
        try:
            self._opened.pop(number).close()
        except BaseException as error:
            _failed("networks cannot be closed", error)


def _report(status: int) -> None:
    native.library().tide_report(status)


def _failed(what: str, error: BaseException) -> None:
    """Reports the error to the library, which raises it from the call that ran the callback."""
    _report(native.GENERATION_ERROR)
    if not isinstance(error, Exception):
        native.keep_interrupt(error)
    sentence = str(error) if isinstance(error, TideError) else f"{what}: {error}"
    native.library().tide_set_error(sentence.encode())
