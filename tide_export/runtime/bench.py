"""`tide-export bench`: measures how much faster decoding is with early exits, on this machine.

Runs of the modes are interleaved, so that a busy moment affects all alike: `full` (no token exits), `exit` (the given
thresholds), `lossless` (exits are drafts, as the bundle was tuned) and `first` (every token exits at the first
checkpoint and no deeper segment is ever forced: the upper bound). Speed-ups are ratios of medians; milliseconds of
another run or machine are not comparable. Decoding is greedy and timed as a whole, so that steps in which a deep
segment catches up count in the average.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from tide_export.bundle.auto_mode import AutoMode, sentence
from tide_export.bundle.file_names import TOKENIZER_FILE
from tide_export.bundle.opened import Bundle
from tide_export.common.formatting import attributes, percent, table
from tide_export.common.values import whole_number
from tide_export.errors import ConfigError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.stats import NO_LAYER
from tide_export.runtime.tokenizer import BundleTokenizer

PROMPT = """\
Question: a train leaves the station at nine and travels at eighty kilometres an hour. A second train leaves one
hour later and travels at a hundred and twenty. When does the second train overtake the first? Explain each step and
write a function that computes it.

def overtaking_time(start_a, speed_a, start_b, speed_b):
    \"\"\"Return the time at which the second train overtakes the first.\"\"\"
"""


@dataclass(frozen=True)
class Mode:
    """Options of one mode, and the thresholds that they resolve to."""

    name: str
    config: GenerationConfig
    thresholds: list[float]
    max_pending: int


@dataclass(frozen=True)
class Timing:
    """Times one run of one mode."""

    prefill_ms: float
    decode_ms: float  # per token, averaged over the run
    layers: int  # decoder layers run while decoding; a catch-up over several pending tokens counts once
    exits: Counter[int]  # layers -> decoded tokens that exited there
    drafts: dict[str, tuple[int, int]]  # drafted and accepted tokens, by source
    saved_ms: dict[str, float]  # decoding time that drafts saved, by source, estimated from costs


@dataclass(frozen=True)
class BenchReport:
    """Runs of every mode; speed-ups are relative to the first, full depth."""

    bundle: str
    prompt: str  # the source of the prompt's ids
    prompt_tokens: int
    new_tokens: int
    threads: int | None
    depth: int
    auto: AutoMode | None  # mode auto on this provider
    modes: list[Mode]
    runs: dict[str, list[Timing]]

    def as_dict(self) -> dict[str, Any]:
        return attributes(self, "bundle", "prompt", "prompt_tokens", "new_tokens", "threads") | {
            "repeat": len(self.runs[self.modes[0].name]),
            "auto": None if self.auto is None else asdict(self.auto),
            "modes": [self._mode(mode) for mode in self.modes],
        }

    def _mode(self, mode: Mode) -> dict[str, Any]:
        runs, full = self.runs[mode.name], self.runs[self.modes[0].name]
        decode, prefill = median(run.decode_ms for run in runs), median(run.prefill_ms for run in runs)
        exits = runs[0].exits
        return {
            "name": mode.name,
            "thresholds": mode.thresholds,
            "max_pending": mode.max_pending,
            "prefill_ms": prefill,
            "decode_ms_per_token": decode,
            "prefill_speedup": median(run.prefill_ms for run in full) / prefill,
            "decode_speedup": median(run.decode_ms for run in full) / decode,
            "layers_per_token": runs[0].layers / self.new_tokens,
            "exits_per_layer": {str(layers): count for layers, count in sorted(exits.items())},
            "drafts": {
                name: {"drafted": count, "accepted": good, "saved_ms": median(run.saved_ms[name] for run in runs)}
                for name, (count, good) in runs[0].drafts.items()
            },
        }

    def _drafts(self) -> list[str]:
        """Returns a line of the accepted drafts by source; nothing if nothing was drafted."""
        runs = self.runs.get("lossless")
        if not runs:
            return []
        counts = [
            f"{good} of {count} by {source} (about {median(run.saved_ms[source] for run in runs):.1f} ms saved)"
            for source, (count, good) in runs[0].drafts.items()
            if count
        ]
        return [f"  drafts accepted: {', '.join(counts)}"] if counts else []

    def render(self) -> str:
        """Returns the table that the command prints."""
        rows = []
        for mode in map(self._mode, self.modes):
            exited = sum(
                count for layers, count in mode["exits_per_layer"].items() if NO_LAYER < int(layers) < self.depth
            )
            rows.append(
                [
                    mode["name"],
                    f"{mode['decode_ms_per_token']:.3f}",
                    f"{mode['decode_speedup']:.2f}x",
                    f"{mode['prefill_ms']:.2f}",
                    f"{mode['prefill_speedup']:.2f}x",
                    f"{mode['layers_per_token']:.2f}",
                    percent(exited, self.new_tokens),
                ]
            )
        repeat = len(self.runs[self.modes[0].name])
        threads = "default threads" if self.threads is None else f"{self.threads} threads"
        headers = ["mode", "ms/token", "speed-up", "prefill ms", "speed-up", "layers/token", "tokens exited"]
        return "\n".join(
            [
                f"{self.bundle}: {self.prompt_tokens} prompt tokens ({self.prompt})",
                f"{self.new_tokens} tokens decoded greedily, medians of {repeat} interleaved runs, {threads}",
                "",
                table(headers, rows),
                "",
                "  exit: the given thresholds; lossless: exits are drafts, verified, so the tokens are those of full;",
                "  first: every token exits at the first checkpoint (the upper bound)",
                "  Greedy text repeats itself, which drafts gain from: draft and tune measure sampled text",
                *self._drafts(),
                sentence(self.auto),
            ]
        )


def bench(
    bundle: str | os.PathLike[str],
    *,
    prompt: str | None = None,
    prompt_tokens: int = 64,
    new_tokens: int = 64,
    repeat: int = 9,
    threshold: float | Sequence[float] | None = None,
    min_layers: int | None = None,
    max_pending: int | None = None,
    provider: str = "auto",
    threads: int | None = None,
    verify: bool = True,
    plugins: str | os.PathLike[str] | None = None,
    device: int | None = None,
) -> BenchReport:
    """Times the modes of a bundle, `repeat` runs each after one warm-up run.

    Args:
        prompt: text to continue; None: a built-in one, or random ids (seed 0) for a bundle without a tokenizer.
        prompt_tokens: length to which the prompt is cut or repeated.
        threshold, min_layers, max_pending: options of mode `exit`; None: the bundle's.
        provider, threads, verify, plugins, device: as in `tide_export.load`.

    Raises:
        ConfigError: a number is below 1, or the tokens exceed the model's context.
        BundleError, ProviderError: as `tide_export.load` raises them.
        GenerationError: a threshold is outside [0, 1], their number is wrong, or an option has no effect here.
    """
    for name, value in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens), ("repeat", repeat)):
        whole_number(name, value, minimum=1, error=ConfigError)
    engine = load(bundle, provider=provider, threads=threads, verify=verify, plugins=plugins, device=device)
    manifest = engine.manifest
    exit_options: dict[str, Any] = {"threshold": threshold, "min_layers": min_layers, "max_pending": max_pending}
    engine.resolved(GenerationConfig(mode="exit", **exit_options))
    context = manifest.model.context_length
    if context is not None and prompt_tokens + new_tokens > context:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {new_tokens} new ones do not fit the model's context of {context}"
        )
    modes = _modes(engine, exit_options, prompt_tokens + new_tokens, new_tokens + 1)
    ids, origin = _prompt_ids(engine.bundle, prompt, prompt_tokens)
    runs: dict[str, list[Timing]] = {mode.name: [] for mode in modes}
    for i in range(repeat + 1):
        for mode in modes:
            timing = _run(engine, mode, ids, new_tokens)
            if i > 0:  # the first round allocates memory and fills caches
                runs[mode.name].append(timing)
    depth = manifest.model.num_layers
    return BenchReport(str(bundle), origin, prompt_tokens, new_tokens, threads, depth, engine.auto, modes, runs)


def _modes(engine: Engine, exit_options: Mapping[str, Any], total_tokens: int, max_new_tokens: int) -> list[Mode]:
    manifest = engine.manifest

    def mode(name: str, kind: str, **options: Any) -> Mode:
        config = GenerationConfig(max_new_tokens=max_new_tokens, mode=kind, stop_token_ids=(), **options)
        resolved = engine.resolved(config)
        drafting = resolved["drafting"]
        pending = resolved["max_pending"] if drafting is None else drafting["max_drafts"]
        return Mode(name, config, resolved["thresholds"], pending)

    modes = [mode("full", "full")]
    if manifest.checkpoints:
        modes.append(mode("exit", "exit", **exit_options))
    modes.append(mode("lossless", "lossless"))
    if manifest.checkpoints:
        modes.append(mode("first", "exit", threshold=0.0, min_layers=0, max_pending=total_tokens))
    return modes


def _prompt_ids(bundle: Bundle, prompt: str | None, count: int) -> tuple[list[int], str]:
    """Returns `count` prompt ids and their source."""
    if prompt is None and TOKENIZER_FILE not in bundle.files:
        ids = np.random.default_rng(0).integers(0, bundle.manifest.model.vocab_size, count).tolist()
        return ids, "random ids, seed 0: the bundle has no tokenizer"
    ids = BundleTokenizer(bundle).encode(PROMPT if prompt is None else prompt)
    source = "the built-in text" if prompt is None else "the given text"
    if count > len(ids):
        source += ", repeated"  # repetition makes prompt lookup look better than it is
    repeated = ids * -(-count // len(ids))
    return repeated[:count], source


def _run(engine: Engine, mode: Mode, prompt: list[int], new_tokens: int) -> Timing:
    # The first token comes from the step over the prompt.
    stats = engine.generate(prompt, mode.config).stats
    return Timing(
        prefill_ms=1e3 * stats.prefill_seconds,
        decode_ms=1e3 * stats.decode_seconds / new_tokens,
        layers=sum(stats.layers_run[1:]),
        exits=Counter(stats.exit_layer[1:]),
        drafts=stats.drafts,
        saved_ms={source: 1e3 * seconds for source, seconds in stats.saved_seconds.items()},
    )
