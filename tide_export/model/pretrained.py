"""Tells transformers where a source model is and what it may do: a folder, a hub id or a GGUF file.

`source.load_model` and `data.sequences.load_tokenizer` read everything through `opened`. Nothing is read here but the
config, whose sizes are bounded before transformers makes anything of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from traceback import extract_tb
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import AutoConfig, PretrainedConfig, dynamic_module_utils, modeling_gguf_pytorch_utils
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as hf_logging
from transformers.utils.import_utils import is_gguf_available

from tide_export.common.progress import quiet_transformers
from tide_export.errors import ModelError, UnsupportedModelError, first_line
from tide_export.model.older_code import older_code
from tide_export.model.paths import GGUF, check_model, is_gguf

WEIGHT_FILES = (GGUF, ".safetensors", ".bin")
MAX_LAYERS = 10_000
NUMBERS_PER_BYTE = 16  # of the model's files, at most: 2-bit weights, and tied ones registered several times
SPARE_NUMBERS = 2**22  # parameters of a model with next to no weights
SPARE_BUFFERS = 2**28  # numbers in buffers, such as a causal mask, which no file of weights holds

# Its bar is tqdm's own; transformers' obeys `quiet_transformers`.
modeling_gguf_pytorch_utils.tqdm = hf_logging.tqdm


@contextmanager
def opened(name: str, trust_remote_code: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path and the keyword arguments with which transformers' `from_pretrained` reads `name`.

    A GGUF file is read from an empty folder: transformers would prefer a tokenizer.json beside it to its own tokenizer.

    Raises:
        ModelError: the package that reads GGUF files is missing.
    """
    if not is_gguf(name):
        with older_code() if trust_remote_code else nullcontext():
            yield name, {"trust_remote_code": trust_remote_code}
        return
    if not is_gguf_available():
        raise ModelError(f"reading {name} needs the package 'gguf': pip install -e '.[gguf]' in the clone")
    with TemporaryDirectory() as empty:
        yield empty, {"gguf_file": str(Path(name).resolve())}


def read_config(name: str, trust_remote_code: bool) -> PretrainedConfig:
    """Reads the config.

    A wrong path, a folder that is no model and an unknown architecture are different errors.

    Raises:
        ModelError: no such model, or its config is damaged or asks for absurd sizes.
        UnsupportedModelError: transformers does not know the architecture, or only with code of the model's folder.
    """
    check_model(name)
    try:
        with quiet_transformers(), opened(name, trust_remote_code) as (path, options):
            values, _ = PretrainedConfig.get_config_dict(path, **options)
            _check_layers(values, name)
            return AutoConfig.for_model(**values) if is_gguf(name) else AutoConfig.from_pretrained(path, **options)
    except ModelError:
        raise
    except Exception as error:  # transformers, the config's own checks and a model's own code raise many kinds
        damaged = isinstance(error, OSError | MemoryError | RecursionError)
        kind = ModelError if damaged else UnsupportedModelError
        what = "GGUF file" if is_gguf(name) else "model"
        raise code_error(name, error) or kind(f"{what} {name!r} cannot be read: {first_line(error)}") from error


def code_error(name: str, error: Exception) -> ModelError | None:
    """Returns the error for what transformers or the Python code of model `name` raised.

    None for what is not about that code.
    """
    copies = dynamic_module_utils.HF_MODULES_CACHE
    if isinstance(error, OSError) and str(error.filename or "").startswith(copies):
        return ModelError(
            f"the Python code of model {name!r} cannot be copied to {copies} ({error.strerror}): set HF_MODULES_CACHE "
            "to a folder that can be written"
        )
    if "trust_remote_code=True" in str(error):  # in each of its refusals to run code
        return remote_code_refused(name)
    own = [frame for frame in extract_tb(error.__traceback__) if frame.filename.startswith(copies)]
    if own:
        return ModelError(
            f"the Python code of model {name!r} fails at {Path(own[-1].filename).name}:{own[-1].lineno} "
            f"({type(error).__name__}: {first_line(error)}): it may be written for another transformers than "
            f"{transformers.__version__}; look for newer code of this model, or omit --trust-remote-code"
        )
    return None


def remote_code_refused(name: str) -> UnsupportedModelError:
    """Returns the error for a model that needs its own code, which nobody has allowed."""
    return UnsupportedModelError(
        f"model {name!r} needs Python code of its own (auto_map): read that code, and only if you trust it give "
        "--trust-remote-code (trust_remote_code=True), which runs it"
    )


def uses_remote_code(path: str, config: PretrainedConfig) -> bool:
    """Tells whether transformers may run the model's own code for this config or its tokenizer."""
    return bool(getattr(config, "auto_map", None) or get_tokenizer_config(path).get("auto_map"))


@contextmanager
def bounded_sizes(name: str) -> Iterator[None]:
    """While open, models with far more parameters than the weight files of `name` can hold are not built.

    transformers builds a model without memory for its weights, and allocates them where the files have none.
    Models on the hub are not bounded.

    Raises:
        ModelError: while the model is built, which ends there.
    """
    path = Path(name)
    if not path.exists():
        yield
        return
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in WEIGHT_FILES]
    size = sum(file.stat().st_size for file in files)
    left = {"parameters": NUMBERS_PER_BYTE * size + SPARE_NUMBERS, "buffers": SPARE_BUFFERS + NUMBERS_PER_BYTE * size}
    thread = get_ident()

    def count(kind: str, tensor: torch.Tensor | None) -> None:
        if tensor is None or not tensor.is_meta or get_ident() != thread:
            return
        left[kind] -= tensor.numel() + 1
        if left[kind] < 0:
            raise ModelError(f"the config of model {name!r} asks for far more {kind} than its {size} bytes of weights")

    def count_parameter(_: nn.Module, __: str, tensor: torch.Tensor | None) -> None:
        count("parameters", tensor)

    def count_buffer(_: nn.Module, __: str, tensor: torch.Tensor | None) -> None:
        count("buffers", tensor)

    hooks = (
        register_module_parameter_registration_hook(count_parameter),
        register_module_buffer_registration_hook(count_buffer),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_layers(values: Any, name: str, key: str = "") -> None:
    """Refuses a number of layers for which the config's class would make lists without end."""
    if isinstance(values, dict):
        for key, value in values.items():
            _check_layers(value, name, str(key))
    elif isinstance(values, int) and "layer" in key and values > MAX_LAYERS:
        raise ModelError(f"the config of model {name!r} asks for {values} in {key}: at most {MAX_LAYERS} are read")
