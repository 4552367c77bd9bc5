"""Defines the report's colours for light and dark screens, distinguishable with any colour vision.

A checkpoint has one colour in all plots and examples: a step of viridis, early ones light. Other lines use the palette
of Okabe and Ito.
"""

from dataclasses import dataclass

from matplotlib import colormaps
from matplotlib.colors import to_hex, to_rgb


@dataclass(frozen=True)
class Theme:
    """Colours of one of the two looks, as `#rrggbb`."""

    name: str
    paper: str
    ink: str
    faint: str
    best: str  # the frontier
    single: str  # one threshold for all
    fixed: str  # exits at one checkpoint, no router
    perfect: str
    full: str  # tokens that run all layers
    deep: float  # position of the last checkpoint on viridis
    shallow: float  # position of the first

    def checkpoints(self, count: int) -> list[str]:
        """Returns one colour per checkpoint, the first the lightest."""
        steps = (
            [self.shallow]
            if count == 1
            else [self.shallow + (self.deep - self.shallow) * i / (count - 1) for i in range(count)]
        )
        return [to_hex(colormaps["viridis"](step)) for step in steps]


LIGHT = Theme(
    "light",
    "#ffffff",
    "#1b1f24",
    "#d5dae0",
    "#0072b2",
    "#d55e00",
    "#6b7480",
    "#00805f",
    "#aab2bc",
    deep=0.05,
    shallow=0.78,
)
DARK = Theme(
    "dark",
    "#161a20",
    "#e6e9ed",
    "#39414c",
    "#56b4e9",
    "#e69f00",
    "#a3adb9",
    "#2fc79a",
    "#6b7480",
    deep=0.32,
    shallow=0.97,
)


def text_on(background: str) -> str:
    """Returns black or white, the easier to read on `background` (relative luminance of WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(background)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#ffffff"
