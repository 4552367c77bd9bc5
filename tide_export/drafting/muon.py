"""Muon in the type of numbers that a device multiplies fast.

PyTorch's own always iterates in bfloat16. On a CPU without instructions for it, as every one that has AVX2 alone, that
takes fifty times as long as in float32 (Zen 3, matrices of 896 x 4864), and training a drafter was little else.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch


class Muon(torch.optim.Muon):
    """PyTorch's Muon (arXiv 2502.16982) with iterations in a given type."""

    def __init__(self, weights: Iterable[torch.nn.Parameter], dtype: torch.dtype, **options: Any) -> None:
        """Creates the optimizer.

        Args:
            weights: matrices.
            dtype: of the iterations; in all processes that train the same weights the same.
            options: PyTorch's.
        """
        super().__init__(weights, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Changes every weight that has a gradient; `closure` computes them before and returns their loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._change(weight, weight.grad, group)
        return loss

    def _change(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = orthogonal(
            gradient.lerp(buffer, group["momentum"]).to(self.dtype),
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
        )
        rows, columns = weight.shape
        scale = math.sqrt(max(1, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * scale)


def orthogonal(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> torch.Tensor:
    """Returns the matrix with singular values near 1 in place of its own, by Newton-Schulz iterations.

    Args:
        matrix: [N, M].
        coefficients: of the polynomial a x + b x^3 + c x^5 that each iteration applies to the singular values.
        steps: the iterations.
        epsilon: the least norm that it is divided by.
    """
    a, b, c = coefficients
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=epsilon)
    for _ in range(steps):
        products = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(products, products, products, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
