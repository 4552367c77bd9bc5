"""Runs the C++ runtime through its test driver with the Python runtime's interface, so that a test can run on both."""

import json
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tide_export import errors
from tide_export.runtime.generation import Generation
from tide_export.runtime.generation import TokenLogprobs
from tide_export.runtime.stats import ExitStats
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


SECONDS = ("prefill_seconds", "decode_seconds", "tokens_per_second")


def facts(generation: Generation) -> tuple[list[int], str, dict[str, Any]]:
    """Everything but times."""
    stats = {name: value for name, value in generation.stats.as_dict().items() if name not in SECONDS}
    return generation.tokens, generation.finish_reason, stats


def words(**options: Any) -> list[str]:
    """Options of `Engine.generate` as arguments of tide_generate."""
    arguments: list[str] = []
    for name, value in options.items():
        if name == "stop_token_ids" and value is not None:
            arguments += ["--stop-ids", listed(value)] if len(value) else ["--ignore-eos"]
        elif name == "logit_bias":
            arguments += ["--logit-bias", listed([f"{token}:{bias}" for token, bias in value.items()])]
        elif name == "logits_processor":
            arguments += ["--processor", value.__name__]
        elif value is not None:
            arguments += [
                f"--{name.replace('_', '-')}",
                listed(value) if isinstance(value, list | tuple) else str(value),
            ]
    return arguments


def prompts_of(prompts: Sequence[Sequence[int]]) -> list[str]:
    """Prompts as arguments of tide_generate; an empty one is a comma."""
    return [word for ids in prompts for word in ("--ids", listed(ids) or ",")]


def listed(values: Sequence[Any]) -> str:
    return ",".join(map(str, values))


class CppEngine:
    """A driver process with one bundle loaded.

    Attributes:
        log: the sentences logged by loading.
    """

    def __init__(
        self,
        driver: Path,
        bundle: Path | None,
        threads: int | None = 1,
        verify: bool = True,
        networks: str | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Loads `bundle`, if any. `networks`: runs its segment networks on "host" or a stand-in "gpu", without
        `options.provider`."""
        env = os.environ | (environment or {})
        self._process = subprocess.Popen([driver], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._started = 0
        command = ["load"] if networks is None else ["networks", networks]
        arguments = [*words(threads=threads, **options), *([] if verify else ["--no-verify"])]
        try:
            self.log: list[str] = self.call(*command, str(bundle), *arguments) if bundle is not None else []
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Ends the process, which exits with an error if a sanitizer found one."""
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

    def generate_batch(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Generation]:
        """`Engine.generate` of a list of prompts."""
        answer = self.call("generate_batch", *prompts_of(prompts), *words(**{"max_new_tokens": 64} | options))
        return [self.generation(one) for one in answer]

    def request(self, ids: Sequence[int], max_new_tokens: int, **options: Any) -> list[str]:
        return words(ids=list(ids) or None, max_new_tokens=max_new_tokens, **options)

    @staticmethod
    def generation(answer: dict[str, Any]) -> Generation:
        stats = answer["stats"]
        checkpoints = tuple(map(int, stats["exits_per_layer"]))
        counted = ExitStats(checkpoints=checkpoints, **{name: stats[name] for name in COUNTED})
        python = counted.as_dict()  # with the rates, which C++ must compute from the counts as Python does
        assert {name: stats[name] for name in python} == {name: _close(stats[name], python[name]) for name in python}
        logprobs = [TokenLogprobs(one["logprob"], tuple(map(tuple, one["top"]))) for one in answer.get("logprobs", ())]
        return Generation(answer["tokens"], counted, answer["finish_reason"], logprobs or None)

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


class CppBatch:
    """`Batch` in the driver of an engine, of which there is one at a time; `CppBatch.load` opens its bundle."""

    def __init__(self, engine: CppEngine, share: float, slots: int):
        self._engine, self.free_slots = engine, slots
        self._take(engine.call("batch_start", str(share), str(slots)))

    @staticmethod
    def load(engine: CppEngine, bundle: Path, *networks: str) -> None:
        """`networks`: as of `CppEngine`."""
        engine.call("batch_load", str(bundle), *networks)

    def join(self, thresholds: Sequence[float], max_pending: int) -> int:
        self.free_slots -= 1
        slot = int(self._engine.call("batch_join", listed(thresholds), str(max_pending)))
        self._take(self._engine.call("batch_describe", str(slot)))
        return slot

    def leave(self, slot: int) -> None:
        self.free_slots += 1
        self._take(self._engine.call("batch_leave", str(slot)))

    def step(
        self, new: Mapping[int, Sequence[int]], logits_to_keep: Mapping[int, int], full: Collection[int]
    ) -> dict[int, StepResult]:
        line = [
            (str(slot), str(logits_to_keep.get(slot, 0)), str(int(slot in full)), listed(new[slot]) or "none")
            for slot in sorted(new)
        ]
        answer = self._engine.call("batch_step", *(word for words in line for word in words))
        self._take(answer["sequences"])
        results = {}
        for slot, one in zip(sorted(new), answer["results"], strict=True):
            rows = np.array(one["rows"], np.float32).reshape(-1, one["vocabulary"])
            results[slot] = StepResult(rows[-1], rows, one["exit_layer"], one["segments_run"])
        return results

    def rewind(self, slot: int, length: int) -> None:
        self._take(self._engine.call("batch_rewind", str(slot), str(length)))

    def _take(self, answer: dict[str, Any]) -> None:
        self.sequences = {
            int(slot): SimpleNamespace(**one, rewind=partial(self.rewind, int(slot))) for slot, one in answer.items()
        }


def _close(cpp: Any, python: Any) -> Any:
    """`cpp` if it is a float close to `python`, else `python`."""
    return cpp if isinstance(python, float) and abs(cpp - python) <= 1e-9 * max(1.0, abs(python)) else python
