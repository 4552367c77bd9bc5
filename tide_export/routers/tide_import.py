"""Takes over routers that TIDE itself has trained (`tide-export calibrate --from-tide router.pt`).

TIDE's file says neither which model it was made for nor how; it is checked against the model's depth and width, and
what is known is written down, so that from here on the routers are bound to the model's weights like any other.
"""

import os
from pathlib import Path

from tide_export.errors import RouterFileError
from tide_export.model.source import load_model
from tide_export.routers.router_set import RouterSet
from tide_export.version import __version__


def import_routers(model_name: str, path: str | os.PathLike[str]) -> RouterSet:
    """The routers in TIDE's file `path`, with model, weights hash and origin in their provenance.

    Raises:
        ModelError: as `load_model`.
        RouterFileError: not TIDE's file, damaged, or made for a model of another depth or width.
    """
    found = RouterSet.load(path)
    if found.provenance:
        raise RouterFileError(f"{path} is not TIDE's router.pt: it has a record of its own, use it as it is")
    source = load_model(model_name)
    found.check(source, path)
    provenance = {
        "model": source.name,
        "weights_sha256": source.weights_sha256,
        "num_layers": source.num_layers,
        "imported_from": f"TIDE {Path(path).name}",
        "versions": {"tide_export": __version__},
    }
    return RouterSet(found.routers, provenance)
