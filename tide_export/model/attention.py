"""Chooses which registered attention function of transformers a model computes with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from tide_export.common.progress import quiet_transformers
from tide_export.errors import UnsupportedModelError


def reference_attention(config: PretrainedConfig) -> str | None:
    """Returns the attention that serves as the reference for a model of `config`.

    "eager", or None for its default.

    The default is for architectures that do not use transformers' attention interface: each of their attention classes
    is separate code, and users run the default. Falcon's eager attention adds ALiBi twice in transformers 5.23.
    """
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "eager" if kind is None or kind._can_set_attn_implementation() else None


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """While open, `model` computes attention by the registered function `name`.

    Raises:
        UnsupportedModelError: the architecture does not support it.
    """
    before = model.config._attn_implementation
    try:
        with quiet_transformers():  # its warning is an error in `refuse_ignored_attention`
            model.set_attn_implementation(name)
    except (ValueError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(does_not_use_interface(model)) from error
    try:
        yield
    finally:
        with quiet_transformers():
            model.set_attn_implementation(before)


def does_not_use_interface(model: PreTrainedModel) -> str:
    """Returns the message for a model whose attention cannot be replaced."""
    return (
        f"{type(model).__name__} does not compute its attention through transformers' attention interface, "
        "so it cannot be traced"
    )
