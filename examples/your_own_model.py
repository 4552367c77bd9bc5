"""Exports a model of your own and compares the bundle with it: python your_own_model.py MODEL TEXT BUNDLE"""

import sys

import tide_export


def main(model: str, text: str, bundle: str) -> None:
    config = tide_export.TideConfig(
        calibration_dataset=text,
        checkpoint_interval=3,  # a router after every third layer
        min_layers=3,  # the first of them may exit
        calibration_samples=200,  # more text makes better routers; this is for a first look
        calibration_length=128,
    )
    tide_export.export(model, bundle, config=config, overwrite=True)

    report = tide_export.validate(bundle, model, text, prompts=4, longest_prompt=32, new_tokens=8)
    print(report.render())
    if not report.holds:
        sys.exit("the bundle does not equal the model: please report it")


if __name__ == "__main__":
    main(*sys.argv[1:])
