"""`tools/benchmarks/equal_bits.py` on a tiny bundle: three variants give the same tokens. No test looks at a time."""

import re
from pathlib import Path

import pytest
from families import build
from tiny_configs import CHECKPOINTS
from tiny_engines import TinyLlama, bundle_of

from tide_export.bundle.manifest import Quantization
from tide_export.quantize.flow import quantize_model
from tide_export.routers.random_routers import random_routers


def test_three_variants_are_timed_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import equal_bits

    source = build("llama")
    quantize_model(source, Quantization("rtn", 4, 16, True, 4))
    routers = random_routers(source, CHECKPOINTS, list(range(5, 45)), bottleneck=16)
    bundle_of(source, routers, tmp_path / "bundle")
    options = ["--threads", "1", "--rounds", "2", "--streams", "1,3", "--prompt-tokens", "9", "--new-tokens", "5"]
    equal_bits.main([str(tmp_path / "bundle"), *options])
    said = capsys.readouterr().out
    assert [name for name in equal_bits.VARIANTS if f"{name}, tokens/s" in said] == list(equal_bits.VARIANTS)
    assert re.findall(r"^ +(\d+) .* (\d+), (\d+), (\d+) *$", said, re.MULTILINE) == [(n, "0", "0", "0") for n in "13"]
    assert not list(tmp_path.glob("tmp*"))


def test_a_bundle_without_integers_is_refused(tiny_llama: TinyLlama) -> None:
    import equal_bits

    with pytest.raises(SystemExit, match="has no matmuls in 4 or 8 bits: export it with --weights int4 or int8"):
        equal_bits.main([str(tiny_llama.exact), "--rounds", "1"])
