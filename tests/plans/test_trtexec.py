"""The commands for `trtexec`, against the networks as the parser of TensorRT for RTX reads them."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tide_export.bundle.file_names import plan_file
from tide_export.bundle.opened import open_bundle
from tide_export.cli.main import main
from tide_export.errors import BundleError
from tide_export.names.networks import AFTER_SEGMENTS, segment_name
from tide_export.plans.trtexec import OPTIONS, trtexec_lines

PARTS = [*(segment_name(k) for k in range(4)), *AFTER_SEGMENTS]


def profiles_of(arguments: list[str]) -> list[list[dict[str, list[int]]]]:
    """Minimum, optimum and maximum shapes of each profile, read as trtexec reads them."""
    profiles: list[list[dict[str, list[int]]]] = []
    for argument in arguments:
        option, _, value = argument.partition("=")
        if option == "--profile":
            assert int(value) == len(profiles)
            profiles.append([])
        elif option in ("--minShapes", "--optShapes", "--maxShapes"):
            assert option == ("--minShapes", "--optShapes", "--maxShapes")[len(profiles[-1])]
            shapes = [entry.split(":") for entry in value.split(",")]
            profiles[-1].append({name: [int(dim) for dim in dims.split("x")] for name, dims in shapes})
    return profiles


@pytest.fixture(scope="module")
def commands(demo_bundle: Path) -> dict[str, list[str]]:
    lines = trtexec_lines(open_bundle(demo_bundle, verify=False).manifest, "demo")
    return dict(zip(PARTS, map(shlex.split, lines), strict=True))


@pytest.mark.parametrize("part", ["segment_00", "segment_01", "segment_03", *AFTER_SEGMENTS])
def test_its_shapes_fit_the_network_that_the_parser_reads(part: str, commands, demo_bundle: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    program, onnx, engine, *options = commands[part]
    assert (program, engine) == ("trtexec", f"--saveEngine={plan_file(part)}")
    assert options[: len(OPTIONS)] == list(OPTIONS)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(demo_bundle / onnx.removeprefix("--onnx=")))
    inputs = {tensor.name: list(tensor.shape) for tensor in map(network.get_input, range(network.num_inputs))}
    config, profiles = builder.create_builder_config(), profiles_of(options)
    assert len(profiles) == (5 if part not in AFTER_SEGMENTS else 2)
    for profile in profiles:
        parsed = builder.create_optimization_profile()
        for shapes in profile:
            assert shapes.keys() == {name for name, dims in inputs.items() if -1 in dims}
            for name, dims in shapes.items():
                known = [dim for dim, free in zip(dims, inputs[name], strict=True) if free != -1]
                assert known == [free for free in inputs[name] if free != -1], name
        for name in profile[0]:
            parsed.set_shape(name, *(shapes[name] for shapes in profile))
        assert parsed
        assert config.add_optimization_profile(parsed) >= 0
    assert config.num_optimization_profiles == len(profiles)


def test_inspect_prints_a_command_a_network(demo_bundle: Path, commands, capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(demo_bundle), "--no-verify", "--trtexec"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [shlex.split(line) for line in printed] == list(commands.values())
    assert all("'--decomposableAttentions=*'" in line for line in printed)  # a shell would expand it


def test_networks_for_cuda_have_none(demo_bundle: Path) -> None:
    manifest = replace(open_bundle(demo_bundle, verify=False).manifest, targets=("onnxruntime", "cuda"))
    with pytest.raises(BundleError, match="are for provider cuda, which needs no plans: export it with --target"):
        trtexec_lines(manifest, "p")


def test_a_bundle_without_networks_has_none(tiny_llama) -> None:
    with pytest.raises(BundleError, match="'p' holds no segment networks: export it with --target tensorrt"):
        trtexec_lines(replace(open_bundle(tiny_llama.exact, verify=False).manifest, networks=None), "p")
