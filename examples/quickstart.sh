#!/bin/sh
# The demo model from export to a measurement: sh examples/quickstart.sh [BUNDLE]
set -eu
cd "$(dirname "$0")/.."
bundle=${1:-out/demo}

# A minute: fits routers after layers 3, 6 and 9, traces the model, writes the bundle and compares it with the model.
[ -d "$bundle" ] || tide-export export demo/demo-llama -o "$bundle" --recipe calibration/recipes/demo-llama.toml

# The text on stdout; on stderr after which layer each token left, and how many layers were skipped.
tide-export generate "$bundle" --prompt "def read_lines(path):" --max-new-tokens 48 --echo --mode exit

# Full depth, exits, lossless mode, and the most that exits could give, interleaved.
tide-export bench "$bundle" --repeat 3
