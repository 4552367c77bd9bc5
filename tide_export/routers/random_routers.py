"""Creates random routers for `tide-export probe`, the tests and `tools/checks/parity.py`.

Calibrated routers of a good model rarely use every checkpoint; random ones take every path of the graph.
"""

from collections.abc import Sequence

import torch

from tide_export.model.source import SourceModel
from tide_export.routers.router import Lens, Router, summarize
from tide_export.routers.router_set import RouterSet


def random_routers(
    source: SourceModel,
    checkpoints: Sequence[int],
    ids: Sequence[int],
    bottleneck: int = 64,
    shortlist: int = 16,
    lens_rank: int = 0,
    seed: int = 0,
) -> RouterSet:
    """Creates seeded random routers whose logits on `ids` have mean 0 and standard deviation 2.

    Args:
        ids: token ids of a text.
        shortlist: rows of the head that the routers read; 0: TIDE's form.
        lens_rank: rank of a random lens at every checkpoint, which moves hidden states by a third of their size; 0:
            none.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    rows = source.head_rows() if shortlist else None
    routers, lenses = {}, {}
    for layers, raw in source.run(torch.tensor([list(ids)]), checkpoints).raw.items():
        if lens_rank:
            lens = lenses[layers] = Lens(raw.shape[-1], lens_rank).requires_grad_(False)
            lens.down.weight.copy_(draw(lens.down.weight))
            lens.up.weight.copy_(draw(lens.up.weight))
            lens.up.bias.copy_(0.1 * raw.std() * draw(lens.up.bias))
            lens.up.weight *= 0.3 * raw.std() / lens.up(lens.down(raw)).std()
        normalized = source.normalize(lenses[layers](raw) if lens_rank else raw)
        router = Router(normalized.shape[-1], bottleneck, rows[:shortlist] if rows is not None else None)
        router.requires_grad_(False)
        router.down.weight.copy_(draw(router.down.weight))
        router.down.weight /= (normalized @ router.down.weight.T).std()
        hidden = router.down(normalized)
        if router.shortlist is not None:
            summary = summarize(normalized, router.shortlist)
            router.confidence.weight.copy_(draw(router.confidence.weight))
            router.confidence.weight /= router.confidence(summary).std()
            hidden = hidden + router.confidence(summary)
        up = draw(router.up.weight)
        router.up.weight.copy_(2.0 * up / (torch.nn.functional.silu(hidden) @ up.T).std())
        router.up.bias.copy_(-router.logit(normalized).mean())
        routers[layers] = router
    return RouterSet(routers, {}, lenses)
