"""An engine must hold the tensors, shapes and profiles that its manifest describes."""

import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tide_export.bundle.network_spec import RunSize, kv_aliases, of_network, specs
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.profiles import profiles_for
from tide_export.errors import BundleError
from tide_export.names import segment_networks as names
from tide_export.names.networks import HEAD
from tide_export.runtime.tensorrt.plans import _check_plan


class FoundEngine:
    """A loaded engine as the runtime inspects it, from a bundle's manifest."""

    def __init__(self, spec, profiles) -> None:
        self.spec, self.profiles = spec, profiles
        self.tensors = [*((name, "INPUT") for name in spec.inputs), *((name, "OUTPUT") for name in spec.outputs)]
        self.num_io_tensors, self.num_optimization_profiles = len(self.tensors), len(profiles)
        self.aliases: Callable[[str], str | None] = lambda output: kv_aliases(spec)[output]

    def get_tensor_name(self, index: int) -> str:
        return self.tensors[index][0]

    def get_tensor_mode(self, name: str):
        return types.SimpleNamespace(name=dict(self.tensors)[name])

    def _of(self, name: str):
        return self.spec.inputs.get(name) or self.spec.outputs[name]

    def get_tensor_dtype(self, name: str):
        types_of = {"float32": "FLOAT", "int64": "INT64", "int32": "INT32"}
        return types.SimpleNamespace(name=types_of[self._of(name).dtype])

    def get_tensor_shape(self, name: str) -> list[int]:
        return [-1 if isinstance(dim, str) else dim for dim in self._of(name).shape]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases(name)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        chosen = self.profiles[profile]
        return [tuple(self._of(name).dims(RunSize(chosen.max_tokens, chosen.batch_size, self.spec.keys)))] * 3


def test_an_engine_for_fewer_sequences_than_in_its_manifest_is_refused(demo_bundle: Path) -> None:
    manifest = open_bundle(demo_bundle, verify=False).manifest
    assert manifest.networks is not None
    for name, spec in specs(manifest, manifest.networks).items():
        profiles = of_network(name, profiles_for(manifest.networks), manifest.networks)
        _check_plan(FoundEngine(spec, profiles), spec, profiles, "x.engine")
        fewer = tuple(replace(profile, batch_size=min(profile.batch_size, 4)) for profile in profiles)
        tensor = r"exit_states of \[4, 1, 1280, 128\]" if name == HEAD else r"past_lengths of \[4\]"
        if names.LOGITS not in spec.inputs:  # which has a row for each position, whatever its sequence
            with pytest.raises(BundleError, match=f"takes {tensor} at most in profile"):
                _check_plan(FoundEngine(spec, fewer), spec, profiles, "x.engine")
        shorter = tuple(replace(profile, max_tokens=1) for profile in profiles)
        with pytest.raises(BundleError, match="at most in profile"):
            _check_plan(FoundEngine(spec, shorter), spec, profiles, "x.engine")
        with pytest.raises(BundleError, match=f"has 1 optimization profiles, not the {len(profiles)}"):
            _check_plan(FoundEngine(spec, profiles[:1]), spec, profiles, "x.engine")


def test_an_engine_may_list_no_aliases_but_no_wrong_ones(demo_bundle: Path) -> None:
    manifest = open_bundle(demo_bundle, verify=False).manifest
    assert manifest.networks is not None
    profiles = profiles_for(manifest.networks)
    spec = specs(manifest, manifest.networks)["segment_01"]
    engine = FoundEngine(spec, profiles)
    for none in (None, ""):
        engine.aliases = lambda output, none=none: none
        _check_plan(engine, spec, profiles, "x.engine")
    engine.aliases = lambda output: "past_key_values.3.value"
    with pytest.raises(BundleError, match=r"'x.engine' does not update past_key_values\.3\.key in place"):
        _check_plan(engine, spec, profiles, "x.engine")


def test_the_library_has_what_the_runtime_reads_of_an_engine() -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    getters = [name for name in vars(FoundEngine) if name.startswith("get_")]
    assert [name for name in [*getters, "num_optimization_profiles"] if not hasattr(trt.ICudaEngine, name)] == []
