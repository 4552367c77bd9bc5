"""Formats numbers for the report, and escapes text for HTML."""

import html
import math

MISSING = "-"
NARROW = "\u202f"  # a space that does not break, between a number and its unit


def percent(share: float, digits: int = 1) -> str:
    """0.981 as `98.1 %`; a dash for what is not a number."""
    return MISSING if math.isnan(share) else f"{_plain(100 * share, digits)}{NARROW}%"


def change(share: float) -> str:
    """As `percent`, with its sign: `+0.4 %`."""
    return MISSING if math.isnan(share) else f"{_plain(100 * share, 1, sign='+')}{NARROW}%"


def number(value: float, digits: int = 1) -> str:
    """With so many decimals; a dash for what is not a number."""
    return MISSING if math.isnan(value) else _plain(value, digits)


def flops(count: float) -> str:
    """Floating-point operations as `57.3 MFLOP`."""
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{NARROW}{unit}"
    return f"{count / 1e3:.3g}{NARROW}kFLOP"


def threshold(value: float) -> str:
    """A threshold; `off` where no score can be above it."""
    if value >= 1.0:
        return "off"
    # One that rounds to 1.000 would read as one that lets nothing leave.
    return f"{value:.3f}" if value < 0.9995 else f"{value:.6f}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 document`, `12,000 documents`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def escaped(text: object) -> str:
    """Text of anyone's as HTML, also inside an attribute: nothing of it is markup, nothing of it is lost from sight.

    Characters that HTML may not hold are shown by their pictures (U+2400 ...); halves of a pair become U+FFFD.
    """
    shown = "".join(
        chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "\u2421" if c == "\x7f" else c for c in str(text)
    )
    return html.escape(shown.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), quote=True)


def made_visible(text: str) -> str:
    """A token on its own, with blanks one can see: `⏎` for a newline, `⇥` for a tab, `␣` for a space."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "(nothing)"


def _plain(value: float, digits: int, sign: str = "") -> str:
    """Without the minus of a zero."""
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}"
