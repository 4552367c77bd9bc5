"""The model that Triton's python backend runs: the requests of /v1/completions over the same `Service`.

A request has the tensor `input_ids` or the parameter `prompt`, and further fields of /v1/completions as parameters. Its
responses have `text_output` (UTF-8), `token_ids` and `finish_reason` (empty but in the last one). Triton's process
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
POLL_SECONDS = 0.02  # between looks at whether a client has left: Triton does not say so by itself
GONE = ApiError(499, "the client has gone")


class TritonPythonModel:
    """One bundle. Triton calls the three public methods."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the bundle beside the model's file. Raises TritonModelException: it cannot be loaded or served."""
        config = json.loads(args["model_config"])
        given = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        loading: dict[str, Any] = {name: given.pop(name) for name in LOADING if name in given}
        folder = Path(args["model_repository"], args["model_version"], "bundle")
        try:
            loading |= {name: int(loading[name]) for name in ("threads", "device") if name in loading}
            engine = load(folder, **loading)
            self._service = Service(engine, ServerConfig(model_name=args["model_name"], **given))
        except ValidationError as error:
            raise triton.TritonModelException(str(refusal(error))) from None
        except (TideError, ValueError) as error:
            raise triton.TritonModelException(first_line(error)) from None
        self._service.scheduler.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tide-triton", daemon=True)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Takes requests; their responses come later, by their senders."""
        for request in requests:
            ids = triton.get_input_tensor_by_name(request, "input_ids")
            fields = json.loads(request.parameters() or "{}")
            if ids is not None:
                fields["prompt"] = np.from_dlpack(ids).tolist()  # its `as_numpy` is wrong with numpy 2
            asyncio.run_coroutine_threadsafe(self._answer(request.get_response_sender(), fields), self._loop)

    def finalize(self) -> None:
        """Cancels what runs."""
        self._service.scheduler.close(drain=False)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _answer(self, sender: Any, fields: dict[str, Any]) -> None:
        try:
            await self._generate(sender, self._read(fields))
        except ApiError as error:
            _send(sender, triton.InferenceResponse(error=_triton_error(error)))
        except Exception as error:  # nobody else would see it, and the client would wait for ever
            _send(sender, triton.InferenceResponse(error=triton.TritonError(first_line(error))))
        finally:
            with contextlib.suppress(triton.TritonModelException):
                sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _read(self, fields: dict[str, Any]) -> CompletionRequest:
        """The request. Raises ApiError: it is none."""
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
    """A tensor by DLPack: given the array, stubs that were built before numpy 2 would read its size from a wrong place.

    The stub frees the memory, under a name of the capsule that numpy's destructor does not know.
    """
    capsule = value.copy().__dlpack__()
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return triton.Tensor.from_dlpack(name, capsule)


def _send(sender: Any, response: Any) -> None:
    """Sends a response, unless the client has gone."""
    with contextlib.suppress(triton.TritonModelException):
        sender.send(response)


def _plain(value: Any) -> Any:
    """A parameter's value; a list or object is given as its JSON text, as parameters are single values."""
    if isinstance(value, str) and value[:1] in "[{":
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(value)
    return value


def _triton_error(error: ApiError) -> Any:
    codes = {404: "NOT_FOUND", 429: "UNAVAILABLE", 499: "CANCELLED", 500: "INTERNAL", 503: "UNAVAILABLE"}
    return triton.TritonError(str(error), getattr(triton.TritonError, codes.get(error.status, "INVALID_ARG")))
