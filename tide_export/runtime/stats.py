"""Counts the exits of a generation (under TIDE's names), the layers that were run, and seconds.

A token that exits may leave pending work to a later step, so exits alone do not give the time. `layers_run` counts the
layer passes of each step: in decoding, a pass over one token or eight pending ones takes about the same time.
`layer_tokens_run` counts positions times layers that were ever computed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tide_export.common.formatting import attributes

NO_LAYER = 0  # the exit layer of a draft by prompt lookup or a drafter
RATES = ("exit_rate", "layers_run_per_token", "layers_skipped_per_token", "acceptance_rate", "tokens_per_second")
DRAFTS = {
    "exit": "early exits",
    "drafter": "by the drafter",
    "lookup": "by prompt lookup",
    "answers": "from earlier answers",
}
DERIVED = ("total_tokens", "remaining_tokens", "total_exited", *RATES)  # properties that `as_dict` gives


@dataclass
class ExitStats:
    """Counts exits, layers and seconds of one generation.

    The layers of a token are those of the step that produced it.
    """

    checkpoints: tuple[int, ...]  # layers before each
    num_layers: int
    prompt_tokens: int = 0
    exit_layer: list[int] = field(default_factory=list)  # per token: layers its logits went through
    layers_run: list[int] = field(default_factory=list)  # per token: layer passes its step executed
    layer_tokens_run: int = 0  # positions x layers computed so far, the prompt's included
    layer_tokens_total: int = 0  # positions x layers at full depth
    drafted: int = 0  # lossless mode: tokens drafted, by any source
    accepted: int = 0  # drafts that the full model accepted
    lookup_drafted: int = 0  # tokens drafted by prompt lookup
    lookup_accepted: int = 0  # drafts by prompt lookup that were accepted
    learned_drafted: int = 0  # tokens drafted by the bundle's drafter
    learned_accepted: int = 0  # drafts by the drafter that were accepted
    answers_drafted: int = 0  # tokens drafted from answers to earlier requests of a scheduler
    answers_accepted: int = 0  # drafts from these that were accepted
    exit_saved_seconds: float = 0.0  # by costs, of `decode_seconds`: what drafts saved, negative where they cost more
    lookup_saved_seconds: float = 0.0
    learned_saved_seconds: float = 0.0
    answers_saved_seconds: float = 0.0
    prefill_seconds: float = 0.0  # the step over the prompt, which gives the first token
    decode_seconds: float = 0.0  # all later steps

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ExitStats":
        """Reads the statistics that `as_dict` returns."""
        names = [each.name for each in fields(cls) if each.name != "checkpoints"]
        checkpoints = tuple(map(int, values["exits_per_layer"]))
        return cls(checkpoints, **{name: values[name] for name in names})

    @property
    def total_tokens(self) -> int:
        """Tokens generated."""
        return len(self.exit_layer)

    @property
    def exits_per_layer(self) -> dict[int, int]:
        """Tokens that exited at each checkpoint, by the layers before it; the last layer is no exit."""
        return {layers: self.exit_layer.count(layers) for layers in self.checkpoints}

    @property
    def total_exited(self) -> int:
        """Tokens that exited at some checkpoint."""
        return sum(self.exits_per_layer.values())

    @property
    def remaining_tokens(self) -> int:
        """Tokens at full depth: neither an early exit nor a draft without layers."""
        return self.total_tokens - self.total_exited - self.exit_layer.count(NO_LAYER)

    @property
    def exit_rate(self) -> float:
        """Share of tokens that exited, 0 to 1."""
        return self.total_exited / self.total_tokens if self.total_tokens else 0.0

    @property
    def drafts(self) -> dict[str, tuple[int, int]]:
        """Drafts made and accepted, by source: "exit", "drafter", "lookup" and "answers"."""
        others = {
            "drafter": (self.learned_drafted, self.learned_accepted),
            "lookup": (self.lookup_drafted, self.lookup_accepted),
            "answers": (self.answers_drafted, self.answers_accepted),
        }
        drafted, accepted = (sum(counts) for counts in zip(*others.values(), strict=True))
        return {"exit": (self.drafted - drafted, self.accepted - accepted), **others}

    @property
    def saved_seconds(self) -> dict[str, float]:
        """Decoding time that drafts saved, by source as in `drafts`, estimated from their costs."""
        return {
            "exit": self.exit_saved_seconds,
            "drafter": self.learned_saved_seconds,
            "lookup": self.lookup_saved_seconds,
            "answers": self.answers_saved_seconds,
        }

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that were accepted, 0 to 1; 0 outside lossless mode."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def layers_run_per_token(self) -> float:
        """Mean layers per generated token, those for pending tokens included."""
        return sum(self.layers_run) / self.total_tokens if self.total_tokens else 0.0

    @property
    def layers_skipped_per_token(self) -> float:
        """Mean layers per generated token that were saved against full depth."""
        return self.num_layers - self.layers_run_per_token if self.total_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first per second; 0 if there is only one."""
        return (self.total_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def summary(self) -> str:
        """Returns the statistics as lines of text."""
        lines = [
            f"{self.total_tokens} tokens generated after a prompt of {self.prompt_tokens}",
            f"exit rate {self.exit_rate:.1%}: {self.total_exited} exited, {self.remaining_tokens} at full depth",
        ]
        rows = [(f"after layer {layers:>3} of {self.num_layers}", n) for layers, n in self.exits_per_layer.items()]
        rows.append((f"after layer {self.num_layers:>3} of {self.num_layers}", self.remaining_tokens))
        counted = {
            "drafter": self.learned_drafted,
            "prompt lookup": self.lookup_drafted,
            "earlier answers": self.answers_drafted,
        }
        if names := [name for name, drafted in counted.items() if drafted]:
            rows.append((" and ".join(names), self.exit_layer.count(NO_LAYER)))
        for where, count in rows:
            share = count / self.total_tokens if self.total_tokens else 0.0
            lines.append(f"  {where}: {count:>5} tokens {share:>7.1%}")
        lines.append(
            f"layers per token: {self.layers_run_per_token:.2f} of {self.num_layers} run, "
            f"{self.layers_skipped_per_token:.2f} skipped"
        )
        if self.drafted:
            lines.append(f"drafts: {self.accepted} of {self.drafted} accepted ({self.acceptance_rate:.1%})")
            counts = {DRAFTS[source]: drafts for source, drafts in self.drafts.items() if drafts[0]}
            if list(counts) != [DRAFTS["exit"]]:
                lines[-1] += ": " + ", ".join(f"{good} of {all_} {name}" for name, (all_, good) in counts.items())
            saved = {DRAFTS[source]: self.saved_seconds[source] for source, drafts in self.drafts.items() if drafts[0]}
            lines.append("time saved, by costs: " + ", ".join(f"{time:.3f} s {name}" for name, time in saved.items()))
        never = max(self.layer_tokens_total - self.layer_tokens_run, 0)
        lines.append(f"never computed: {never} of {self.layer_tokens_total} (positions x layers, prompt included)")
        speed = f"{self.tokens_per_second:.1f} tokens/s" if self.decode_seconds > 0 else "one step only"
        lines.append(f"prefill {self.prefill_seconds:.3f} s, decode {self.decode_seconds:.3f} s ({speed})")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns all statistics as JSON types (checkpoints become string keys)."""
        values = asdict(self) | attributes(self, *DERIVED)
        del values["checkpoints"]
        return values | {"exits_per_layer": {str(layers): count for layers, count in self.exits_per_layer.items()}}
