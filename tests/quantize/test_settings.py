"""What may be asked of quantized weights, and what is refused before any work."""

from pathlib import Path

import pytest

from tide_export.bundle.manifest import Quantization
from tide_export.cli.main import main
from tide_export.errors import ConfigError
from tide_export.pipeline.flow import export
from tide_export.quantize.settings import quantization_settings


def test_defaults_and_choices() -> None:
    assert quantization_settings("fp32") is None
    assert quantization_settings("int4") == Quantization("rtn", 4, 32, True, 4, 5.0)
    assert quantization_settings("int4", symmetric=False) == Quantization("rtn", 4, 32, False, 4)
    assert quantization_settings("int8") == Quantization("rtn", 8, 64, True, 4)
    assert quantization_settings("int8", "gptq", 128, 1, False) == Quantization("gptq", 8, 128, False, 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "awq"}, "'awq' is none of rtn, gptq"),
        ({"block_size": 48}, "block size 48 is none of 16, 32, 64, 128, 256"),
        ({"block_size": 512}, "block size 512"),
        ({"accuracy_level": 5}, "accuracy level 5 is none of 0, 1, 2, 3, 4"),
        ({"budget": 3.0}, r"--bits 3 does not lie in 4.5..8: integers of 4 bits in blocks of 32 take 4.5 bits"),
        ({"budget": 8.5}, r"--bits 8.5 does not lie in 4.5..8"),
        ({"budget": float("nan")}, r"--bits nan does not lie in"),
        ({"budget": 4.5, "block_size": 16}, r"--bits 4.5 does not lie in 5..8"),
        ({"budget": 5.0, "symmetric": False}, "--bits is for weights int4 without zero points, not for --symmetric no"),
    ],
)
def test_values_out_of_range_are_named(given: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        quantization_settings("int4", **given)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--weights", "int8", "--target", "tensorrt"], "'int8' are for target onnxruntime alone: tensorrt takes"),
        (["--weights", "fp8"], "onnxruntime takes fp32, bf16, fp16, int8 or int4"),
        (["--weights", "int4", "--quantization", "hqq"], "'hqq' is none of rtn, gptq"),
        (["--weights", "int4", "--block-size", "33"], "block size 33 is none of"),
        (["--weights", "int8", "--bits", "5"], "--bits is for weights int4 without zero points, not for int8"),
        (["--bits", "5"], "--bits is for weights int4 without zero points, not for auto: omit one of the two"),
        (
            ["--weights", "int4", "--bits", "5", "--target", "tensorrt-rtx", "--no-engines"],
            "--bits is for target onnxruntime, and tensorrt-rtx takes no mixture: omit it",
        ),
        (["--block-size", "32"], "--block-size is for weights int8 and int4, not for auto"),
        (
            ["--weights", "fp16", "--target", "tensorrt", "--symmetric", "no"],
            "--symmetric is for weights int8 and int4",
        ),
    ],
)
def test_the_command_line_says_so_in_a_line(
    arguments: list[str], says: str, demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["export", str(demo_model), "-o", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_library_user_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="onnxruntime alone"):
        export("no-such-model", tmp_path / "out", targets=("tensorrt",), weights="int8")
