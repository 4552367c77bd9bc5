"""Writes the `trtexec` commands that build a bundle's plans as `tide-export build` does."""

import shlex
from collections.abc import Mapping, Sequence

from tide_export.bundle.file_names import network_file, plan_file
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.network_spec import of_network, specs
from tide_export.bundle.profiles import profiles_for
from tide_export.errors import BundleError
from tide_export.plans.build import shapes
from tide_export.runtime.tensorrt.flavours import TENSORRT

# Attention without a fused kernel, as in float32, is decomposed; TensorFloat-32 would round float32 matmuls.
OPTIONS = (
    *("--noTF32", "--decomposableAttentions=*", "--maxAuxStreams=0"),
    *("--profilingVerbosity=detailed", "--skipInference"),
)


def trtexec_lines(manifest: Manifest, source: str) -> list[str]:
    """Returns the command of every segment network and of the head, to run in the bundle's folder.

    Args:
        manifest: the bundle's manifest.
        source: name of the bundle, for messages.

    Raises:
        BundleError: it holds no segment networks for TensorRT.
    """
    info = manifest.networks
    if info is None:
        raise BundleError(f"bundle '{source}' holds no segment networks: export it with --target tensorrt")
    if manifest.has_cuda_networks:
        raise BundleError(
            f"the networks of bundle '{source}' are for provider cuda, which needs no plans: export it with --target "
            "tensorrt"
        )
    profiles, lines = profiles_for(info, TENSORRT.decode_tokens), []
    for name, spec in specs(manifest, info).items():
        parts = [f"--onnx={network_file(name)}", f"--saveEngine={plan_file(name)}", *OPTIONS]
        for index, profile in enumerate(of_network(name, profiles, info)):
            parts += [f"--profile={index}", *_shape_options(shapes(spec, profile))]
        lines.append(shlex.join(["trtexec", *parts]))
    return lines


def _shape_options(shapes_of_inputs: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
    """Returns the options for the minimum, optimum and maximum shapes of every input."""
    options = []
    for position, option in enumerate(("--minShapes", "--optShapes", "--maxShapes")):
        listed = [f"{name}:{'x'.join(map(str, given[position]))}" for name, given in shapes_of_inputs.items()]
        options.append(f"{option}={','.join(listed)}")
    return options
