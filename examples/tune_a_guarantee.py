"""Stores thresholds with at most 10 % changed tokens: python tune_a_guarantee.py BUNDLE TEXT

TEXT must be text like that the bundle will meet, and none that its routers were fitted on.
"""

import sys

import tide_export


def main(bundle: str, text: str) -> None:
    report = tide_export.tune(
        bundle,
        text,
        epsilon=0.1,  # largest share of changed tokens
        perplexity_epsilon=0.3,  # by which they may raise perplexity: 30 %, much, so that the demo model passes
        delta=0.1,  # risk that this promise is wrong
        prompts=60,  # more prompts let it end nearer to epsilon, that is, skip more layers
        prompts_per_document=10,
        positions=8,
    )
    print(report.render())

    engine = tide_export.load(bundle)  # uses the stored thresholds from now on
    print(engine.generate([5, 17, 3], max_new_tokens=16, mode="exit").stats.summary())


if __name__ == "__main__":
    main(*sys.argv[1:])
