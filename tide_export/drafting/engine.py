"""What a training asks of a runtime's engine."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tide_export.runtime.config import GenerationConfig


class Answered(Protocol):
    """What an engine returns for a prompt when asked for states."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def states(self) -> np.ndarray | None: ...


class AnswerEngine(Protocol):
    """The part of `runtime.engine.Engine` that answers a list of prompts."""

    def generate(self, ids: Sequence[Sequence[int]], config: GenerationConfig) -> Sequence[Answered]: ...
