"""Turns an exception of a model's code into one sentence.

It names the architecture, the module and the cause.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
from torch import nn

from tide_export.errors import TideError, TraceError, UnsupportedModelError, first_line

_TORCH = str(Path(torch.__file__).parent)
# Parts of the names or texts of torch's exceptions -> what the model does.
_CAUSES = {
    "DataDependent": "decides by the values of tensors what to compute",
    "data-dependent": "decides by the values of tensors what to compute",
    "inferred a static shape": "computes for a fixed number of tokens",
    "ConstraintViolation": "computes for a fixed number of tokens",
}
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)'")


@contextmanager
def explained(
    model: nn.Module, purpose: str, cure: str = "change its code, or report this with its config.json"
) -> Iterator[None]:
    """Raises any exception from within, but for the package's and the system's, as UnsupportedModelError.

    Args:
        purpose: what the model cannot do, for the sentence ("run on two tokens").
        cure: what the user can do, its end.
    """
    try:
        yield
    except (TideError, MemoryError, OSError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot {purpose}, so it cannot be exported: {_cause(model, error)}; {cure}"
        ) from error


def refuse_trace(model: nn.Module, error: Exception) -> NoReturn:
    """Raises what is to be said where PyTorch's exporter failed with `error`."""
    chain = list(_chain(error))
    kind = type(model).__name__
    for cause in chain:
        if isinstance(cause, TideError):
            raise cause from None
    for cause in chain:
        text = f"{type(cause).__name__} {cause}"
        reason = next((reason for part, reason in _CAUSES.items() if part in text), None)
        if reason is not None:
            module = next((found for cause in chain if (found := _module(model, cause))), "its code")
            raise UnsupportedModelError(f"{kind} cannot be exported: {module} {reason}") from error
    operators = [found[1] for cause in chain for found in _OPERATOR.finditer(str(cause))]
    if operators:
        raise UnsupportedModelError(
            f"{kind} cannot be exported: it computes with the operator {operators[0]}, which has no translation to ONNX"
        ) from error
    raise TraceError(
        f"PyTorch's exporter cannot trace {kind}, so it cannot be exported: {_cause(model, chain[-1])}; "
        "--debug shows more"
    ) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _cause(model: nn.Module, error: BaseException) -> str:
    """Returns the module in which `error` was raised, and its text.

    The text is empty if PyTorch speaks and not the model's code.
    """
    frames = list(_frames(error.__traceback__))
    line = first_line(error)
    by_torch = "torch" in line or not frames or frames[-1].f_code.co_filename.startswith(_TORCH)
    text = "" if by_torch else line
    return f"{_module(model, error) or 'the export'} raises {type(error).__name__}" + (f" ({text})" if text else "")


def _module(model: nn.Module, error: BaseException) -> str:
    """Returns the class and path of the innermost module of `model` that raised `error` in its forward.

    Empty if none did.
    """
    names = {id(module): name for name, module in model.named_modules()}
    inner = ""
    for frame in _frames(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            inner = f"its {type(module).__name__} ({names[id(module)]})"
    return inner


def _frames(traceback: TracebackType | None) -> Iterator:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
