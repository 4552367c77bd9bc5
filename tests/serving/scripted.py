"""A server whose model says what a test scripts: the logits of the tokens of a text are raised above all others."""

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from bundles import put_text
from running_server import Running

from tide_export.runtime.config import GenerationConfig

PUSH = 1000.0  # above all logits; a grammar may still forbid the token


@dataclass(frozen=True)
class Pause:
    """The model stops before this text until `reached` is set, by a client that has read what comes before it."""

    before: str
    reached: threading.Event = field(default_factory=threading.Event)


def with_template(bundle: Path, folder: Path, template: str) -> Path:
    """A copy of a bundle with another chat template."""
    shutil.copytree(bundle, folder)
    put_text(folder, "chat_template.jinja", template)
    return folder


@contextmanager
def saying(running: Running, *texts: str | Sequence[int], pause: Pause | None = None) -> Iterator[list[list[int]]]:
    """Scripts the next generations, each with a text or tokens and then an end; gives their prompts as they come."""
    submit, scripts, prompts = running.service.scheduler.submit, list(texts), list[list[int]]()
    tokenizer, ends = running.service.tokenizer, running.service.engine.manifest.model.eos_token_ids

    def scripted(ids: Any, config: GenerationConfig, **more: Any) -> Any:
        text = scripts.pop(0)
        tokens = [*(tokenizer.encode_plain(text) if isinstance(text, str) else text), ends[0]]
        prompts.append(list(ids))
        waits = {}
        if pause and isinstance(text, str):
            waits[len(tokenizer.encode_plain(text[: text.index(pause.before)]))] = pause.reached
        return submit(ids, replace(config, logits_processor=_pushing(len(ids), tokens, waits)), **more)

    running.service.scheduler.submit = scripted  # type: ignore[method-assign]
    try:
        yield prompts
    finally:
        running.service.scheduler.submit = submit  # type: ignore[method-assign]


def _pushing(
    start: int, tokens: Sequence[int], waits: Mapping[int, threading.Event]
) -> Callable[[Sequence[int], np.ndarray], np.ndarray]:
    def process(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if event := waits.get(len(ids) - start):
            event.wait(60)
        if start <= len(ids) < start + len(tokens):
            logits[tokens[len(ids) - start]] += PUSH
        return logits

    return process
