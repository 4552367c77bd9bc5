"""The routers: one small MLP per checkpoint, their file, and the import of TIDE's own `router.pt`.

Written by `calibrate`, read by `export`, by the oracle and by `validate`. A router reads the *normed* hidden state,
exactly what the head would see, and answers with a score in [0, 1]: Linear(D, R, no bias) -> SiLU -> Linear(R, 1, no
bias) -> sigmoid (TIDE 0.2.1, `router.py`).
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from tide_export.errors import RouterFileError
from tide_export.model import SourceModel

FORMAT = "tide_export.routers/1"


class Router(nn.Module):
    """One checkpoint's router; `forward` maps normed states [..., D] to scores [...]."""

    def __init__(self, hidden_size: int, bottleneck: int):
        super().__init__()
        self.down = nn.Linear(hidden_size, bottleneck, bias=False)
        self.up = nn.Linear(bottleneck, 1, bias=False)

    def logit(self, normed: torch.Tensor) -> torch.Tensor:
        """The score before the sigmoid, [...]."""
        return self.up(nn.functional.silu(self.down(normed))).squeeze(-1)

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.logit(normed))


@dataclass(frozen=True)
class RouterSet:
    """The routers of one model.

    Attributes:
        routers: layers run at the checkpoint -> its router, ascending.
        provenance: JSON-able record of how they were made: source model, weights hash, dataset, config, versions,
            per-checkpoint report. Empty for routers imported from TIDE, which records nothing.
    """

    routers: dict[int, Router]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(sorted(self.routers))

    @property
    def hidden_size(self) -> int:
        return self.routers[self.checkpoints[0]].down.in_features

    @property
    def bottleneck(self) -> int:
        return self.routers[self.checkpoints[0]].down.out_features

    def arrays(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Layers run -> down [D, R] and up [R, 1] in float32, laid out for `x @ weight`."""

        def weights(part: nn.Linear) -> np.ndarray:
            return part.weight.detach().float().cpu().numpy().T

        return {layers: (weights(router.down), weights(router.up)) for layers, router in self.routers.items()}

    def save(self, path: str | os.PathLike) -> None:
        """Writes safetensors with the provenance in its metadata; a file already there is replaced atomically.

        Raises:
            RouterFileError: the folder does not exist or cannot be written.
        """
        target = Path(path)
        tensors = {
            f"routers.{layers}.{part}.weight": getattr(router, part).weight.detach().float().contiguous()
            for layers, router in self.routers.items()
            for part in ("down", "up")
        }
        metadata = {"format": FORMAT, "provenance": json.dumps(self.provenance, sort_keys=True)}
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial, metadata=metadata)
            partial.replace(target)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise RouterFileError(f"cannot write router file {target}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike) -> "RouterSet":
        """Reads our safetensors, or TIDE's `router.pt` (its layer index l becomes checkpoint l + 1).

        Raises:
            RouterFileError: missing, truncated, corrupt, or not a router file.
        """
        path = Path(path)
        if not path.is_file():
            raise RouterFileError(f"no router file at {path}")
        return _load_tide(path) if path.suffix in (".pt", ".pth", ".bin") else _load_safetensors(path)

    def check(self, source: SourceModel, path: str | os.PathLike) -> None:
        """Refuses routers made for another depth, width or model than `source`.

        Raises:
            RouterFileError: naming `path` and what differs.
        """
        if self.checkpoints[-1] >= source.num_layers:
            raise RouterFileError(
                f"router file {path} has a checkpoint after layer {self.checkpoints[-1]} but {source.name} has "
                f"{source.num_layers} layers: it was made for a deeper model"
            )
        if self.hidden_size != source.normed_size:
            raise RouterFileError(
                f"router file {path} is for hidden size {self.hidden_size} but {source.name} has {source.normed_size}"
            )
        depth = self.provenance.get("num_layers")
        if depth is not None and depth != source.num_layers:
            raise RouterFileError(
                f"router file {path} was made for a model of {depth} layers but {source.name} has {source.num_layers}"
            )
        weights = self.provenance.get("weights_sha256")
        if weights is not None and weights != source.weights_sha256:
            raise RouterFileError(
                f"router file {path} was calibrated on {self.provenance.get('model', 'another model')!r}, "
                f"whose weights differ from those of {source.name}: calibrate again"
            )


def _load_safetensors(path: Path) -> RouterSet:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise RouterFileError(f"router file {path} is truncated or corrupt: {error}") from error
    if metadata.get("format") != FORMAT:
        raise RouterFileError(f"{path} is not a router file of this version (format {metadata.get('format')!r})")
    weights: dict[int, dict[str, torch.Tensor]] = {}
    try:
        for key, tensor in tensors.items():
            _, layers, name = key.split(".", 2)
            weights.setdefault(int(layers), {})[name] = tensor
        provenance = json.loads(metadata.get("provenance", "{}"))
    except ValueError as error:
        raise RouterFileError(f"router file {path} is corrupt: {error}") from error
    if not isinstance(provenance, dict):
        raise RouterFileError(f"router file {path} is corrupt: its provenance is no record")
    return RouterSet(_build(weights, path), provenance)


def _load_tide(path: Path) -> RouterSet:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        weights = {int(layer) + 1: dict(parts) for layer, parts in state["router_layers"].items()}
    except Exception as error:  # torch.load raises many kinds for a damaged or foreign file
        reason = " ".join(str(error).split())[:150]
        raise RouterFileError(f"router file {path} is not a TIDE router.pt, or is damaged ({reason})") from error
    return RouterSet(_build(weights, path))


def _build(weights: dict[int, dict[str, torch.Tensor]], path: Path) -> dict[int, Router]:
    if not weights:
        raise RouterFileError(f"router file {path} holds no router")
    routers = {}
    for layers, parts in sorted(weights.items()):
        down, up = parts.get("down.weight"), parts.get("up.weight")
        if layers < 1:
            raise RouterFileError(f"router file {path} has a router after {layers} layers: checkpoints count from 1")
        if down is None or up is None or down.ndim != 2 or tuple(up.shape) != (1, down.shape[0]):
            raise RouterFileError(
                f"router file {path}: the router at checkpoint {layers} has missing or misshapen weights"
            )
        if not (bool(torch.isfinite(down).all()) and bool(torch.isfinite(up).all())):
            raise RouterFileError(f"router file {path}: the router at checkpoint {layers} holds NaN or infinity")
        router = Router(down.shape[1], down.shape[0])
        router.load_state_dict({"down.weight": down.float(), "up.weight": up.float()})
        routers[layers] = router.eval().requires_grad_(False)
    if len({router.down.weight.shape for router in routers.values()}) != 1:
        raise RouterFileError(f"router file {path} mixes routers of different widths")
    return routers
