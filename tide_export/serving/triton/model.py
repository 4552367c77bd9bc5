"""Serves requests of /v1/completions through Triton's python backend.

A request has the tensor `input_ids` or the parameter `prompt`, and further fields of /v1/completions as parameters. Its
responses have `text_output` (UTF-8), `token_ids` and `finish_reason` (empty except in the last one). Triton's process
imports this module; `triton_python_backend_utils` exists only there.
"""

import asyncio
import contextlib
import ctypes
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton
from pydantic import ValidationError

from tide_export.errors import TideError, first_line
from tide_export.runtime.engine import load
from tide_export.serving.config import ServerConfig
from tide_export.serving.protocol import ApiError, CompletionRequest, refusal
from tide_export.serving.service import Piece, Service

LOADING = ("provider", "threads", "plugins", "device")  # parameters for `load`; the others are fields of `ServerConfig`
POLL_SECONDS = 0.02  # between checks whether the client has disconnected, which Triton does not report
GONE = ApiError(499, "the client has gone")


class TritonPythonModel:
    """Runs one bundle; Triton calls the three public methods."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the bundle in the model's version folder.

        Raises:
            TritonModelException: it cannot be loaded or served.
        """
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        loading: dict[str, Any] = {name: parameters.pop(name) for name in LOADING if name in parameters}
        folder = Path(args["model_repository"], args["model_version"], "bundle")
        try:
            loading |= {name: int(loading[name]) for name in ("threads", "device") if name in loading}
            engine = load(folder, **loading)
            self._service = Service(engine, ServerConfig(model_name=args["model_name"], **parameters))
        except ValidationError as error:
            raise triton.TritonModelException(str(refusal(error))) from None
        except (TideError, ValueError) as error:
            raise triton.TritonModelException(first_line(error)) from None
        self._service.scheduler.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tide-triton", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Starts requests; their senders send the responses later."""
        for request in requests:
            ids = triton.get_input_tensor_by_name(request, "input_ids")
            fields = json.loads(request.parameters() or "{}")
            if ids is not None:
                fields["prompt"] = np.from_dlpack(ids).tolist()  # its `as_numpy` is wrong with numpy 2
            asyncio.run_coroutine_threadsafe(self._answer(request.get_response_sender(), fields), self._loop)

    def finalize(self) -> None:
        """Cancels the running requests."""
        self._service.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _answer(self, sender: Any, fields: dict[str, Any]) -> None:
        try:
            await self._generate(sender, self._read(fields))
        except ApiError as error:
            _send(sender, triton.InferenceResponse(error=_triton_error(error)))
        except Exception as error:  # unreported, it would leave the client waiting for ever
            _send(sender, triton.InferenceResponse(error=triton.TritonError(first_line(error))))
        finally:
            with contextlib.suppress(triton.TritonModelException):
                sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _read(self, fields: dict[str, Any]) -> CompletionRequest:
        """Reads a request; ApiError if a field is refused."""
        values = {name: value if name == "prompt" else _plain(value) for name, value in fields.items()}
        try:
            request = CompletionRequest.model_validate({"model": self._service.model} | values)
        except ValidationError as error:
            raise refusal(error) from None
        if request.n != 1:
            raise ApiError(400, "n: a request has one choice here; send one for each")
        return request

    async def _generate(self, sender: Any, request: CompletionRequest) -> None:
        prompts = await asyncio.to_thread(self._service.prompts, request)
        if len(prompts) != 1:
            raise ApiError(400, "prompt: a request has one prompt here; send one for each")
        (handle,) = await asyncio.to_thread(self._service.submit, request, prompts[0])

        async def leave_with_client() -> None:
            while not sender.is_cancelled():
                await asyncio.sleep(POLL_SECONDS)
            handle.cancel()

        watch, pieces = asyncio.create_task(leave_with_client()), list[Piece]()
        try:
            async for piece in self._service.pieces(handle):
                pieces.append(piece)
                if request.stream or piece.finish_reason is not None:
                    _send(sender, _response(pieces))
                    pieces = []
        except ApiError:
            if sender.is_cancelled():
                raise GONE from None
            raise
        finally:
            watch.cancel()


def _response(pieces: list[Piece]) -> Any:
    tokens = [token for piece in pieces for token in piece.tokens]
    text, reason = "".join(piece.text for piece in pieces), pieces[-1].finish_reason or ""
    values: dict[str, np.ndarray] = {
        "text_output": np.frombuffer(text.encode(), np.uint8),
        "token_ids": np.array(tokens, np.int64),
        "finish_reason": np.frombuffer(reason.encode(), np.uint8),
    }
    return triton.InferenceResponse([_tensor(name, value) for name, value in values.items()])


def _tensor(name: str, value: np.ndarray) -> Any:
    """Passes an array to Triton by DLPack, because stubs built before numpy 2 misread the size of arrays.

    The stub frees the memory, so numpy's destructor, which does not recognise the consumed capsule, is removed.
    """
    capsule = value.copy().__dlpack__()
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return triton.Tensor.from_dlpack(name, capsule)


def _send(sender: Any, response: Any) -> None:
    """Sends a response, unless the client has disconnected."""
    with contextlib.suppress(triton.TritonModelException):
        sender.send(response)


def _plain(value: Any) -> Any:
    """Returns a parameter's value; lists and objects are given as JSON text."""
    if isinstance(value, str) and value[:1] in "[{":
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(value)
    return value


def _triton_error(error: ApiError) -> Any:
    codes = {404: "NOT_FOUND", 429: "UNAVAILABLE", 499: "CANCELLED", 500: "INTERNAL", 503: "UNAVAILABLE"}
    return triton.TritonError(str(error), getattr(triton.TritonError, codes.get(error.status, "INVALID_ARG")))
