"""The C++ runtime behind the Python runtime's interface, through the driver, so that one test can be run on both."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tide_export import errors
from tide_export.runtime.decoding.generation import Generation
from tide_export.runtime.decoding.stats import ExitStats
from tide_export.runtime.sequence import ROOM, StepResult

COUNTED = (
    "exit_layer",
    "layers_run",
    "layer_tokens_run",
    "layer_tokens_total",
    "drafted",
    "accepted",
    "lookup_drafted",
)
COUNTED += ("lookup_accepted", "prompt_tokens", "num_layers", "prefill_seconds", "decode_seconds")


def words(**options: Any) -> list[str]:
    """Options of `Engine.generate` as tide_generate's."""
    given: list[str] = []
    for name, value in options.items():
        if name == "stop_token_ids" and value is not None:
            given += ["--stop-ids", listed(value)] if len(value) else ["--ignore-eos"]
        elif value is not None:
            given += [f"--{name.replace('_', '-')}", listed(value) if isinstance(value, list | tuple) else str(value)]
    return given


def prompts_of(prompts: Sequence[Sequence[int]]) -> list[str]:
    """Several prompts as tide_generate's options; an empty one is a comma."""
    return [word for ids in prompts for word in ("--ids", listed(ids) or ",")]


def listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))


class CppEngine:
    """A driver process with one bundle loaded.

    Attributes:
        log: what loading said.
    """

    def __init__(
        self,
        driver: Path,
        bundle: Path,
        threads: int | None = 1,
        verify: bool = True,
        networks: str | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`networks`: the bundle's segment networks, on "host" or a stand-in "gpu", instead of `options.provider`."""
        own = os.environ | (environment or {})
        self._process = subprocess.Popen([driver], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own)
        self._started = 0
        command = ["load"] if networks is None else ["networks", networks]
        given = [*words(threads=threads, **options), *([] if verify else ["--no-verify"])]
        try:
            self.log: list[str] = self.call(*command, str(bundle), *given)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process; a sanitizer's findings are its exit code."""
        self._process.communicate()
        assert self._process.returncode == 0

    def call(self, *line: str) -> Any:
        """The driver's answer.

        Raises:
            TideError: the subclass of the same name.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().rstrip("\n")
        kind, _, rest = answer.partition(" ")
        if kind == "ok":
            return json.loads(rest)
        assert kind == "error", f"the driver died: {self._process.wait()}"
        name, _, sentence = rest.partition(" ")
        raise getattr(errors, name, RuntimeError)(sentence)

    def generate(self, ids: Sequence[int], max_new_tokens: int = 64, **options: Any) -> Generation:
        return self.generation(self.call("generate", *self.request(ids, max_new_tokens, **options)))

    @property
    def max_batch_size(self) -> int:
        return int(self.call("max_batch_size"))

    def generate_batch(self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 64, **options: Any) -> list[Generation]:
        """`Engine.generate` of a list of prompts."""
        given = [*prompts_of(prompts), *words(max_new_tokens=max_new_tokens, **options)]
        return [self.generation(one) for one in self.call("generate_batch", *given)]

    def request(self, ids: Sequence[int], max_new_tokens: int, **options: Any) -> list[str]:
        return words(ids=list(ids) or None, max_new_tokens=max_new_tokens, **options)

    @staticmethod
    def generation(answer: dict[str, Any]) -> Generation:
        stats = answer["stats"]
        checkpoints = tuple(map(int, stats["exits_per_layer"]))
        made = ExitStats(checkpoints=checkpoints, **{name: stats[name] for name in COUNTED})
        own = made.as_dict()
        # What is computed from the counts is computed alike.
        assert {name: stats[name] for name in own} == {name: _close(stats[name], own[name]) for name in own}
        return Generation(answer["tokens"], made, answer["finish_reason"])

    def start(self, thresholds: Sequence[float], max_pending: int = 16, room: int = ROOM) -> "CppState":
        self._started += 1
        return CppState(self, self._started, thresholds, max_pending, room)


class CppState:
    def __init__(self, engine: CppEngine, number: int, thresholds: Sequence[float], limit: int, room: int) -> None:
        self._engine, self._number = engine, str(number)
        self._take(engine.call("start", self._number, listed(thresholds) or "none", str(limit), str(room)))

    def step(self, ids: Sequence[int], logits_to_keep: int = 1, full: bool = False) -> StepResult:
        keep = str(logits_to_keep)
        answer = self._take(self._engine.call("step", self._number, keep, "1" if full else "0", listed(ids)))
        rows = np.array(answer["rows"], np.float32).reshape(-1, answer["vocabulary"])
        scores = np.array(answer["scores"], np.float32)
        return StepResult(rows[-1], rows, answer["exit_layer"], answer["segments_run"], scores)

    def rewind(self, length: int) -> None:
        self._take(self._engine.call("rewind", self._number, str(length)))

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        self._take(self._engine.call("set_thresholds", self._number, listed(thresholds)))

    @property
    def length(self) -> int:
        return self.lengths[0]

    def _take(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.lengths: list[int] = answer["lengths"]
        self.computed: list[int] = answer["computed"]
        self.pending: list[int] = answer["pending"]
        self.capacity: int = answer["capacity"]
        return answer


def _close(given: Any, own: Any) -> Any:
    return given if isinstance(own, float) and abs(given - own) <= 1e-9 * max(1.0, abs(own)) else own
