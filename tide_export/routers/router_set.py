"""Reads and writes the routers and lenses of one model, and reads TIDE's `router.pt`."""

import json
import logging
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from tide_export.common.files import failure, replace_files
from tide_export.common.values import parse_json
from tide_export.errors import RouterFileError, one_line
from tide_export.model.source import SourceModel
from tide_export.routers.router import Lens, LensArrays, Router, RouterArrays

logger = logging.getLogger("tide_export")

FORMAT = "tide_export.routers/2"
CUMULATIVE = "cumulative"  # in the metadata of such a file


@dataclass(frozen=True)
class RouterSet:
    """Holds the routers and lenses of one model.

    Attributes:
        routers: checkpoint (the number of layers before it) -> its router, ascending.
        provenance: JSON-serializable record of the calibration: source model, weights hash, dataset, config, versions,
            per-checkpoint report. Empty for a file of TIDE.
        lenses: checkpoint -> its lens; empty if hidden states exit unchanged.
        cumulative: whether a router's result is the probability p_k of an exit there of what has not exited before, so
            that the score is that of an exit there or before, 1 - (1 - p_1) .. (1 - p_k) (`routers.model_gate`).
    """

    routers: dict[int, Router]
    provenance: dict[str, Any] = field(default_factory=dict)
    lenses: dict[int, Lens] = field(default_factory=dict)
    cumulative: bool = False

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(sorted(self.routers))

    @property
    def hidden_size(self) -> int:
        return self.routers[self.checkpoints[0]].down.in_features

    @property
    def strategy(self) -> str:
        """TIDE's `exit_strategy`: "identity" or "lens"."""
        return "lens" if self.lenses else "identity"

    def exit_state(self, source: SourceModel, layers: int, raw: torch.Tensor) -> torch.Tensor:
        """Computes what the head reads [..., D'] at an exit after `layers` layers from `raw` [..., D]."""
        lens = self.lenses.get(layers)
        return source.normalize(raw if lens is None else lens.to(raw.device)(raw))

    def arrays(self) -> dict[int, RouterArrays]:
        """Returns checkpoint -> the router's weights."""
        return {layers: router.arrays() for layers, router in self.routers.items()}

    def lens_arrays(self) -> dict[int, LensArrays]:
        """Returns checkpoint -> the lens's weights."""
        return {layers: lens.arrays() for layers, lens in self.lenses.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all weights by their names in the file; the routers share one shortlist."""
        tensors: dict[str, torch.Tensor] = {}
        for layers, router in self.routers.items():
            for name, tensor in router.state_dict().items():
                tensors[name if name == "shortlist" else f"routers.{layers}.{name}"] = tensor
        for layers, lens in self.lenses.items():
            tensors |= {f"lenses.{layers}.{name}": tensor for name, tensor in lens.state_dict().items()}
        return {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}

    def sizes(self) -> str:
        """Describes the sizes of routers and lenses in KiB."""

        def kib(prefix: str) -> str:
            return f"{sum(t.nbytes for name, t in self.tensors().items() if name.startswith(prefix)) / 1024:.0f} KiB"

        parts = [f"{len(self.routers)} routers {kib('routers.')}"]
        if any(router.shortlist is not None for router in self.routers.values()):
            parts.append(f"shortlist {kib('shortlist')}")
        if self.lenses:
            parts.append(f"{len(self.lenses)} lenses {kib('lenses.')}")
        return ", ".join(parts)

    def save(self, path: str | os.PathLike) -> None:
        """Writes safetensors with the provenance in the metadata; replaces an existing file atomically.

        Raises:
            RouterFileError: the folder does not exist or cannot be written.
        """
        target = Path(path)
        metadata = {"format": FORMAT, "provenance": json.dumps(self.provenance, sort_keys=True)}
        metadata |= {CUMULATIVE: "true"} if self.cumulative else {}
        try:
            replace_files({target: save(self.tensors(), metadata)})
        except OSError as error:
            raise RouterFileError(f"cannot write router file {target}: {failure(error, target.parent)}") from error

    @classmethod
    def load(cls, path: str | os.PathLike) -> "RouterSet":
        """Reads a file that `save` wrote, or TIDE's `router.pt` (its layer index l becomes checkpoint l + 1).

        Raises:
            RouterFileError: the file is missing, truncated, corrupt, or not a router file.
        """
        path = Path(path)
        if not path.is_file():
            raise RouterFileError(f"no router file at {path}")
        return _load_tide(path) if path.suffix in (".pt", ".pth", ".bin") else _load_safetensors(path)

    def check(self, source: SourceModel, path: str | os.PathLike) -> None:
        """Checks that the routers, read from `path`, belong to `source`.

        Raises:
            RouterFileError: they belong to a model of another depth, width or weights.
        """
        if not self.checkpoints:
            return
        if self.checkpoints[-1] >= source.num_layers:
            raise RouterFileError(
                f"router file {path} has a checkpoint after layer {self.checkpoints[-1]} but {source.name} has "
                f"{source.num_layers} layers: it was made for a deeper model"
            )
        if self.hidden_size != source.normalized_size:
            raise RouterFileError(
                f"router file {path} is for hidden size {self.hidden_size} but {source.name} has "
                f"{source.normalized_size}"
            )
        for layers, lens in self.lenses.items():
            if lens.down.in_features != source.hidden_size:
                raise RouterFileError(
                    f"router file {path}: the lens at checkpoint {layers} is for hidden size {lens.down.in_features} "
                    f"but {source.name} has {source.hidden_size}"
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

    def check_quantization(self, source: SourceModel, path: str | os.PathLike) -> None:
        """Warns if the routers were calibrated on another quantization of the weights than `source` has."""
        current = None if source.quantized is None else source.quantized.record
        if self.provenance and self.provenance.get("quantization") != current:
            logger.warning("router file %s was calibrated on weights of another precision: its scores may be off", path)


def _load_safetensors(path: Path) -> RouterSet:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise RouterFileError(f"router file {path} is truncated or corrupt: {error}") from error
    if metadata.get("format") != FORMAT:
        raise RouterFileError(
            f"{path} is not a router file of this release (format {metadata.get('format')!r}, not {FORMAT!r}): "
            "calibrate again"
        )
    parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {"routers": {}, "lenses": {}}
    shortlist = tensors.pop("shortlist", None)
    if shortlist is not None and (shortlist.ndim != 2 or len(shortlist) < 2):
        raise RouterFileError(f"router file {path} has a misshapen shortlist")
    try:
        for key, tensor in tensors.items():
            kind, layers, name = key.split(".", 2)
            parts[kind].setdefault(int(layers), {})[name] = tensor
        provenance = parse_json(metadata.get("provenance", "{}"))
    except (ValueError, KeyError) as error:
        raise RouterFileError(f"router file {path} is corrupt: {error}") from error
    if not isinstance(provenance, dict):
        raise RouterFileError(f"router file {path} is corrupt: its provenance is not an object")
    routers = _build(parts["routers"], path, shortlist)
    lenses = {layers: _build_lens(weights, layers, path) for layers, weights in sorted(parts["lenses"].items())}
    if not lenses.keys() <= routers.keys():
        raise RouterFileError(f"router file {path} holds lenses for {list(lenses)} but routers for {list(routers)}")
    return RouterSet(routers, provenance, lenses, metadata.get(CUMULATIVE) == "true")


def _load_tide(path: Path) -> RouterSet:
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about the pickle of a damaged file
            saved = torch.load(path, map_location="cpu", weights_only=True)
        weights = {int(layer) + 1: dict(parts) for layer, parts in saved["router_layers"].items()}
    except Exception as error:  # torch.load raises many kinds for a damaged or foreign file
        raise RouterFileError(
            f"router file {path} is not a TIDE router.pt, or is damaged ({one_line(error, 150)})"
        ) from error
    return RouterSet(_build(weights, path, None))


def _build(
    weights: dict[int, dict[str, torch.Tensor]], path: Path, shortlist: torch.Tensor | None
) -> dict[int, Router]:
    if not weights:
        raise RouterFileError(f"router file {path} holds no router")
    routers = {}
    for layers, parts in sorted(weights.items()):
        down, up = parts.get("down.weight"), parts.get("up.weight")
        if layers < 1:
            raise RouterFileError(f"router file {path} has a router after {layers} layers: checkpoints count from 1")
        what = f"router file {path}: the router at checkpoint {layers}"
        if down is None or up is None or down.ndim != 2 or tuple(up.shape) != (1, down.shape[0]):
            raise RouterFileError(f"{what} has missing or misshapen weights")
        if shortlist is not None and shortlist.shape[1] != down.shape[1]:
            raise RouterFileError(f"{what} is of another width than the shortlist")
        filled = {"up.bias": torch.zeros(1), **parts} | ({} if shortlist is None else {"shortlist": shortlist})
        router = Router(down.shape[1], down.shape[0], shortlist)
        _fill(router, filled, what)
        routers[layers] = router
    if len({router.down.weight.shape for router in routers.values()}) != 1:
        raise RouterFileError(f"router file {path} mixes routers of different widths")
    return routers


def _build_lens(parts: dict[str, torch.Tensor], layers: int, path: Path) -> Lens:
    what = f"router file {path}: the lens at checkpoint {layers}"
    down = parts.get("down.weight")
    if down is None or down.ndim != 2:
        raise RouterFileError(f"{what} has missing or misshapen weights")
    lens = Lens(down.shape[1], down.shape[0])
    _fill(lens, parts, what)
    return lens


def _fill(module: nn.Module, parts: dict[str, torch.Tensor], what: str) -> None:
    """Loads a file's weights into `module`; RouterFileError if some are missing, misshapen or not finite."""
    expected = module.state_dict()
    if parts.keys() != expected.keys() or any(parts[name].shape != expected[name].shape for name in expected):
        raise RouterFileError(f"{what} has missing or misshapen weights")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in parts.values()):
        raise RouterFileError(f"{what} holds NaN or infinity")
    module.load_state_dict({name: tensor.float() for name, tensor in parts.items()})
    module.eval().requires_grad_(False)
