#!/bin/sh
# The whole way in a few minutes, with the small models beside this file and no network: export, check, generate, measure.
# `make demo` calls it with its own virtual environment on the PATH; the folder to write is the argument.
set -eu
cd "$(dirname "$0")/.."
out=${1:-out/demo}
prompt='import unittest

class TestStack(unittest.TestCase):

    def test_'

say() { printf '\n== %s\n' "$1"; }

say "export demo/demo-llama: fit routers after layers 3, 6 and 9 of 12, trace, cut, compose, write $out"
tide-export export demo/demo-llama -o "$out" --recipe calibration/recipes/demo-llama.toml --overwrite

say "inspect: what is in the bundle"
tide-export inspect "$out"

say "validate: full depth equals Hugging Face, every exit equals TIDE's rule (on files the routers have not seen)"
tide-export validate "$out" --model demo/demo-llama --dataset calibration/text/python-stdlib-validation.jsonl \
    --prompts 8 --new-tokens 24

say "generate: the text, then where each token left and how many layers were skipped"
tide-export generate "$out" --echo --prompt "$prompt" --max-new-tokens 96 --temperature 0.6 --top-p 0.9 --seed 1 \
    --mode exit

say "export demo/demo-looped: a model made to answer early, 4 layers that run 4 times; routers after loops 1, 2 and 3"
tide-export export demo/demo-looped -o "$out-looped" --trust-remote-code --weights int4 --overwrite \
    --dataset calibration/text/python-stdlib.jsonl

say "measure: speed against changed tokens on that text, in each mode and at several thresholds, interleaved"
python tools/benchmarks/modes.py "$out-looped" --dataset calibration/text/python-stdlib-validation.jsonl --prompts 40 \
    --thresholds 0.7,0.8,0.9,0.95 --out "$out-gained"

say "gained"
python demo/gained.py "$out-looped" "$out-gained"
