"""Imports routers that TIDE itself has trained (`tide-export calibrate --from-tide router.pt`).

TIDE's file does not name its model. It is checked against the model's depth and width, and the model's name and weights
hash are recorded, so that from here on the routers are bound to the model's weights like any others.
"""

import os
from pathlib import Path

from tide_export.errors import RouterFileError
from tide_export.model.source import load_model
from tide_export.routers.router_set import RouterSet
from tide_export.version import __version__


def import_routers(model_name: str, path: str | os.PathLike[str], trust_remote_code: bool = False) -> RouterSet:
    """Reads the routers in TIDE's file `path` and records model, weights hash and origin in their provenance.

    Raises:
        ModelError: as `load_model`.
        RouterFileError: not TIDE's file, damaged, or made for a model of another depth or width.
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
