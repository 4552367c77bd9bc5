"""Runs a composed graph in ONNX Runtime without a bundle around it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `families`
