"""Exports a model with routers that TIDE trained: python import_tide_routers.py MODEL ROUTERS BUNDLE

ROUTERS is TIDE's router.pt. Its router after layer l (from 0) is the checkpoint l + 1 (layers run) here.
"""

import sys

import tide_export


def main(model: str, routers: str, bundle: str) -> None:
    tide_export.export(model, bundle, routers=routers, config=tide_export.TideConfig(min_layers=3), overwrite=True)

    engine = tide_export.load(bundle)
    print(f"checkpoints after {engine.manifest.checkpoints} layers")
    # TIDE's rule with TIDE's routers, token for token; the layers it skips are not run.
    print(engine.generate([5, 17, 3], max_new_tokens=16, mode="exit", threshold=0.85).stats.summary())


if __name__ == "__main__":
    main(*sys.argv[1:])
