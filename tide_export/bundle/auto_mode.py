"""Records the mode that `auto` means in a bundle: `export` and `tune` measure it, runtimes read it."""

from dataclasses import dataclass
from typing import Any

MODES = ("full", "exit", "lossless")


@dataclass(frozen=True)
class AutoMode:
    """The fastest mode that changes at most a share `epsilon` of the tokens, measured on one machine."""

    mode: str  # one of MODES
    thresholds: tuple[float, ...]  # of mode exit, one per checkpoint, in [0, 1]; all 1: none keeps to `epsilon`
    epsilon: float  # in [0, 1): largest share of tokens that exits may change
    provider: str  # that it was measured on; on any other, mode auto is full depth
    exit_speedup: float | None  # decoding speed over full depth's; None: not measured
    lossless_speedup: float | None
    machine: str  # processor and number of threads
    evidence: dict[str, Any]  # what was measured on which text
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
    share = f"{100 * auto.epsilon:g} % of the tokens"
    if auto.mode == "exit":
        reason = f"exit, {auto.exit_speedup:.2f}x as fast as full depth, changing at most {share}"
    elif auto.mode == "lossless":
        reason = f"lossless, {auto.lossless_speedup:.2f}x as fast as full depth, with its tokens"
    elif auto.exit_speedup is None and auto.lossless_speedup is None:
        return f"mode auto is full depth: {auto.evidence.get('reason', 'nothing else was measured')}"
    else:
        reason = "full depth: " + " and ".join(
            f"{mode} at {speedup:.2f}x its speed"
            for mode, speedup in (
                (f"exits that change at most {share} run", auto.exit_speedup),
                ("lossless mode runs", auto.lossless_speedup),
            )
            if speedup is not None
        )
    several = "" if auto.mode == "full" else f"; {_of_several(auto)}"
    return f"mode auto is {reason} ({auto.machine}){several}"


def _of_several(auto: AutoMode) -> str:
    known = auto.evidence.get("slots")
    pairs = known.items() if isinstance(known, dict) else ()
    speeds = " and ".join(f"{speed:.2f}x with {slots}" for slots, speed in pairs if isinstance(speed, float))
    if auto.slots is not None:
        return f"the same for up to {auto.slots} sequences at once{f': {speeds}' if speeds else ''}"
    missing = f"not measured (tide-export tune --mode {auto.mode} --slots does)"
    return f"full depth for several sequences at once: {f'there it runs at {speeds}' if speeds else missing}"
