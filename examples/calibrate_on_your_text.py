"""Fits routers on your text, reports what they gain, exports with them: calibrate_on_your_text.py MODEL TEXT BUNDLE"""

import sys
from pathlib import Path

import tide_export


def main(model: str, text: str, bundle: str) -> None:
    folder = Path(bundle).parent
    config = tide_export.TideConfig(
        calibration_dataset=text,
        checkpoint_interval=3,
        min_layers=3,
        calibration_samples=200,
        calibration_length=128,
    )
    routers = folder / "routers.safetensors"
    tide_export.calibrate(model, routers, config=config, report=folder / "gains.html")
    print(f"read {folder / 'gains.html'} before you go on: its first sentence says whether it pays")

    # Thresholds and min_layers are defaults of the bundle: every call may use others.
    tide_export.export(model, bundle, routers=routers, config=tide_export.TideConfig(min_layers=3), overwrite=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
