"""Records the mode that `auto` means in a bundle: `export` and `tune` measure it, runtimes read it."""

from dataclasses import dataclass
from typing import Any, cast

MODES = ("full", "exit", "lossless")
EXIT_ERROR = "exit_speedup_error"  # in `evidence`: the standard error of `exit_speedup`


@dataclass(frozen=True)
class AutoMode:
    """The fastest mode with at most a share `epsilon` of changed tokens, measured on one machine."""

    mode: str  # one of MODES
    thresholds: tuple[float, ...]  # of mode exit, one per checkpoint, in [0, 1]; all 1: none keeps to `epsilon`
    epsilon: float  # in [0, 1): largest share of changed tokens
    provider: str  # that it was measured on; on any other, mode auto is full depth
    exit_speedup: float | None  # decoding speed over full depth's; None: not measured
    lossless_speedup: float | None
    machine: str  # processor and number of threads
    evidence: dict[str, Any]  # what was measured on which text, and `perplexity_epsilon`, the other bound
    slots: int | None = None  # sequences at once for which `mode` was faster too; None, not written: one

    def of(self, slots: int) -> "AutoMode | None":
        """Returns the mode for `slots` concurrent sequences; None: full depth, as no other was faster."""
        return self if slots <= (self.slots or 1) else None


def sentence(auto: AutoMode | None) -> str:
    """Describes what mode `auto` does and why, for one sequence and for several.

    Args:
        auto: as `Engine.auto`; None: not measured.
    """
    if auto is None:
        return "mode auto is full depth: what exits gain on this provider was not measured (tide-export tune does)"
    if auto.mode == "exit":
        change = _measured(auto) or bounds(auto)
        reason = f"exit, {auto.exit_speedup:.2f}{_error(auto)}x as fast as full depth, with {change}"
    elif auto.mode == "lossless":
        reason = f"lossless, {auto.lossless_speedup:.2f}x as fast as full depth, with its tokens"
    elif auto.exit_speedup is None and auto.lossless_speedup is None:
        return f"mode auto is full depth: {auto.evidence.get('reason', 'nothing else was measured')}"
    else:
        reason = "full depth: " + " and ".join(
            f"{mode} at {speedup:.2f}{error}x its speed"
            for mode, speedup, error in (
                (f"exits with {bounds(auto)} run", auto.exit_speedup, _error(auto)),
                ("lossless mode runs", auto.lossless_speedup, ""),
            )
            if speedup is not None
        )
    several = "" if auto.mode == "full" else f"; {_of_several(auto)}"
    return f"mode auto is {reason} ({auto.machine}){several}"


def _error(auto: AutoMode) -> str:
    error = auto.evidence.get(EXIT_ERROR)
    return "" if error is None else f" ± {error:.2f}"


def bounds(auto: AutoMode) -> str:
    """Returns the bounds of what exits may change, as words."""
    return bounds_of(auto.epsilon, auto.evidence.get("perplexity_epsilon"))


def bounds_of(epsilon: float, perplexity_epsilon: object) -> str:
    """Returns bounds as words.

    Args:
        perplexity_epsilon: no number: perplexity was not bounded, as in bundles of before.
    """
    changed = f"at most {100 * epsilon:g} % changed tokens"
    if not isinstance(perplexity_epsilon, int | float):
        return changed
    return f"{changed} and at most {100 * perplexity_epsilon:g} % more perplexity"


def _measured(auto: AutoMode) -> str:
    """Returns what the exits changed and the bounds, as words; empty if the evidence does not say."""
    names = "tokens", "temperature", "changed", "changed_error", "perplexity", "perplexity_error", "perplexity_epsilon"
    values = [auto.evidence.get(name) for name in names]
    if not all(isinstance(value, int | float) for value in values):
        return ""
    tokens, temperature, changed, error, perplexity, perplexity_error, most = cast(list[float], values)
    return (
        f"{100 * changed:.2f} ± {100 * error:.2f} % changed tokens (at most {100 * auto.epsilon:g} %) and perplexity "
        f"{100 * perplexity:+.2f} ± {100 * perplexity_error:.2f} % (at most {100 * most:+g} %) on {tokens:,} tokens "
        f"that the thresholds were not chosen on, temperature {temperature:g}"
    )


def _of_several(auto: AutoMode) -> str:
    known = auto.evidence.get("slots")
    pairs = known.items() if isinstance(known, dict) else ()
    speeds = " and ".join(f"{speed:.2f}x with {slots}" for slots, speed in pairs if isinstance(speed, float))
    if auto.slots is not None:
        return f"the same for up to {auto.slots} sequences at once{f': {speeds}' if speeds else ''}"
    missing = f"not measured (tide-export tune --mode {auto.mode} --slots does)"
    return f"full depth for several sequences at once: {f'there it runs at {speeds}' if speeds else missing}"
