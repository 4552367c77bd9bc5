"""Imports routers that TIDE trained (`tide-export calibrate --from-tide router.pt`).

TIDE's file does not name its model, so only depth and width can be checked. The model's name and weights hash are then
recorded, which binds the routers to the model like any others.
"""

import os
from pathlib import Path

from tide_export.common.version import __version__
from tide_export.errors import RouterFileError
from tide_export.model.source import load_model
from tide_export.routers.router_set import RouterSet


def import_routers(model_name: str, path: str | os.PathLike[str], trust_remote_code: bool = False) -> RouterSet:
    """Reads the routers in TIDE's file `path` and records model, weights hash and source.

    Raises:
        ModelError: as `load_model` raises it.
        RouterFileError: it is not TIDE's file, is damaged, or is for a model of another depth or width.
    """
    imported = RouterSet.load(path)
    if imported.provenance:
        raise RouterFileError(f"{path} is not TIDE's router.pt but a router file of tide_export: use it as it is")
    source = load_model(model_name, trust_remote_code=trust_remote_code)
    imported.check(source, path)
    provenance = {
        "model": source.name,
        "weights_sha256": source.weights_sha256,
        "num_layers": source.num_layers,
        "imported_from": f"TIDE {Path(path).name}",
        "versions": {"tide_export": __version__},
        **({"remote_code": True} if source.remote_code else {}),
    }
    return RouterSet(imported.routers, provenance)
