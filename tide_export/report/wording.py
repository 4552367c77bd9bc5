"""Formats numbers for the report, and escapes text for HTML."""

import html
import math

MISSING = "-"
NARROW = "\u202f"  # a space that does not break, between a number and its unit


def percent(share: float, digits: int = 1) -> str:
    """Formats 0.981 as `98.1 %`, and NaN as a dash."""
    return MISSING if math.isnan(share) else f"{_plain(100 * share, digits)}{NARROW}%"


def change(share: float) -> str:
    """Formats 0.004 as `+0.4 %`, and NaN as a dash."""
    return MISSING if math.isnan(share) else f"{_plain(100 * share, 1, sign='+')}{NARROW}%"


def number(value: float, digits: int = 1) -> str:
    """Formats a number with `digits` decimals, and NaN as a dash."""
    return MISSING if math.isnan(value) else _plain(value, digits)


def flops(count: float) -> str:
    """Formats floating-point operations as `57.3 MFLOP`."""
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{NARROW}{unit}"
    return f"{count / 1e3:.3g}{NARROW}kFLOP"


def threshold(value: float) -> str:
    """Formats a threshold; `off` if no score can be above it."""
    if value >= 1.0:
        return "off"
    # Rounded to 1.000 it would look like one that turns exits off.
    return f"{value:.3f}" if value < 0.9995 else f"{value:.6f}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """Formats a count as `1 document` or `12,000 documents`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(items: list[str]) -> str:
    """Joins items as `a`, `a and b` or `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def escaped(text: object) -> str:
    """Escapes untrusted text for HTML, also inside attributes, and keeps all of it visible.

    Characters that HTML forbids become their pictures (U+2400 ...); unpaired surrogates become U+FFFD.
    """
    shown = "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "\u2421" if c == "\x7f" else c for c in str(text)
    )
    return html.escape(shown.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), quote=True)


def made_visible(text: str) -> str:
    """Shows the blanks of a token: `⏎` for a newline, `⇥` for a tab, `␣` for a space."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "(nothing)"


def _plain(value: float, digits: int, sign: str = "") -> str:
    """Formats a rounded number, without the sign of a negative zero."""
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}"
