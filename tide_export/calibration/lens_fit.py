"""Holds the lens of one checkpoint while `fit_lenses` updates and `lens_snapshot` saves it."""

import copy
from dataclasses import dataclass, field

import torch

from tide_export.routers.router import Lens


@dataclass
class LensFit:
    """The lens of one checkpoint while it is fitted.

    Attributes:
        size: root mean square of the hidden states; the lens is fitted to hidden states of unit size.
        curve: measurements on validation tokens, the first without a lens: `tokens` seen, `kl` in nats, and
            `may_exit`, the share of tokens that may exit by the label.
        best: the lens's weights at the measurement with the smallest `kl`.
        given_up: why it is no longer fitted; empty while it is.
    """

    lens: Lens
    optimizer: torch.optim.Optimizer
    size: float
    curve: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, torch.Tensor] = field(default_factory=dict)
    given_up: str = ""

    def best_measurement(self) -> dict[str, float]:
        return min(self.curve, key=lambda point: point["kl"])

    def translate(self, raw: torch.Tensor) -> torch.Tensor:
        """Applies the lens to raw hidden states [n, D]."""
        return self.lens(raw / self.size) * self.size

    def folded(self) -> Lens:
        """Returns the best weights as a frozen lens for raw hidden states, on the CPU."""
        lens = copy.deepcopy(self.lens).cpu()
        lens.load_state_dict(self.best)
        with torch.no_grad():
            lens.up.bias.mul_(self.size)
        return lens.eval().requires_grad_(False)
