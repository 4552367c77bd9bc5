"""Providers in C++: the one that is named runs the bundle or is refused with Python's sentence."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundles import edit
from cpp_builds import CppBuild
from cpp_engine import CppEngine

from tide_export import names
from tide_export.bundle.engine_fields import EnginesInfo, Profile
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import write_manifest
from tide_export.errors import BundleError, ConfigError, GenerationError, ProviderError
from tide_export.runtime.engine import load
from tide_export.runtime.tensorrt.flavours import RTX_CAPABILITIES
from tide_export.version import __version__

VERSION = "11.1.0.106"
PROFILES = (
    *(Profile("decode", 1, 1, 1, 1), Profile("catch-up", 1, 16, 32, 1), Profile("prefill", 1, 512, 1024, 1)),
    *(Profile("batch-decode", 1, 1, 1, 8), Profile("batch-catch-up", 1, 16, 32, 8)),
)
PARTS = (*(names.segment(k) for k in range(4)), *names.AFTER_SEGMENTS)


@pytest.fixture(scope="module")
def built(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo bundle with files in the place of engines."""
    bundle = tmp_path_factory.mktemp("providers") / "bundle"
    shutil.copytree(demo_bundle, bundle)
    (bundle / names.ENGINES_FOLDER).mkdir()
    for part in PARTS:
        (bundle / names.engine_file(part)).write_bytes(b"engine" * 1000)
    manifest = open_bundle(demo_bundle, verify=False).manifest
    engines = EnginesInfo("tensorrt", VERSION, ("8.9",), manifest.model.weights_sha256, PROFILES, 12.5)
    write_manifest(bundle, replace(manifest, engines=engines))
    return bundle


@pytest.fixture
def changed(built: Path, tmp_path: Path) -> Callable[..., Path]:
    """A bundle with changed fields of its engines."""

    def change(**changes: Any) -> Path:
        bundle = tmp_path / "changed"
        shutil.copytree(built, bundle, copy_function=os.link)
        manifest = open_bundle(bundle, verify=False).manifest
        assert manifest.engines is not None
        (bundle / "tide.json").unlink()
        (bundle / "tide.json").write_text(replace(manifest, engines=replace(manifest.engines, **changes)).to_json())
        return bundle

    return change


def refused(cpp: CppBuild, bundle: Path, kind: type[Exception], sentence: str, **options: Any) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        CppEngine(cpp.driver, bundle, verify=False, **options).close()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"provider": "abacus"}, "provider must be one of auto, cpu, cuda, tensorrt, tensorrt-rtx, not 'abacus'"),
        (
            {"provider": "tensorrt"},
            "holds no TensorRT engines: build them with `tide-export build .* --target tensorrt`",
        ),
        ({"provider": "tensorrt-rtx"}, "holds no TensorRT engines: .* --target tensorrt-rtx`, or use provider 'cpu'"),
        ({"plugins": "a.so"}, "no engine of bundle .* holds plugins: omit plugins"),
        ({"provider": "tensorrt", "threads": 2}, "threads are for the CPU, and provider 'tensorrt' runs on the GPU"),
        ({"provider": "cuda", "threads": 2}, "threads are for the CPU, and provider 'cuda' runs on the GPU"),
        ({"provider": "cpu", "device": 1}, "device is the number of a GPU: name a provider that runs on one"),
    ],
)
def test_what_a_bundle_without_engines_is_refused_for(cpp, tiny_bundle: Path, options, sentence: str) -> None:
    refused(cpp, tiny_bundle, ProviderError, sentence, **({"threads": None} | options))
    if "plugins" not in options and options["provider"] != "abacus":  # whose sentences name what Python has
        with pytest.raises(ProviderError, match=sentence):
            load(tiny_bundle, **options)


def test_a_bundle_without_engines_runs_on_the_cpu_and_nothing_is_said(cpp, tiny_bundle: Path) -> None:
    for provider in ("auto", "cpu"):
        engine = CppEngine(cpp.driver, tiny_bundle, provider=provider, plugins="none")
        assert engine.log == []
        assert engine.generate([1, 2], max_new_tokens=3).tokens
        engine.close()


def test_auto_takes_the_cpu_where_engines_do_not_run_and_says_why_once(cpp, built: Path) -> None:
    engine = CppEngine(cpp.driver, built, verify=False)
    (line,) = engine.log
    assert line.startswith(f"running '{built}' with ONNX Runtime on the CPU, not with tensorrt: this tide_runtime was ")
    assert engine.generate([1, 2], max_new_tokens=3).tokens
    engine.close()
    done = subprocess.run(
        [cpp.program, built, "--ids", "1,2", "--no-verify"], capture_output=True, text=True, check=True
    )
    assert done.stderr == f"tide_runtime: {line}\n"
    refused(cpp, built, ConfigError, "threads must be a whole number from 1 to 1024, not 0", threads=0)


def test_a_build_without_cuda_says_so(cpp, built: Path) -> None:
    sentence = "built without CUDA: configure it with -DTIDE_WITH_CUDA=ON, or use provider 'cpu'"
    for options in ({}, {"device": 1}):
        refused(cpp, built, ProviderError, sentence, provider="cuda", threads=None, **options)


def test_engines_are_asked_for_by_name(cpp, built: Path, changed) -> None:
    without = (
        r"built without TensorRT: configure it with -DTIDE_WITH_TENSORRT=ON and TensorRT's headers in TENSORRT_ROOT"
    )
    refused(cpp, built, ProviderError, without, provider="tensorrt", threads=None)
    other = (
        "are of TensorRT: use provider 'tensorrt', or build others with `tide-export build .* --target tensorrt-rtx`"
    )
    refused(cpp, built, ProviderError, other, provider="tensorrt-rtx", threads=None)
    with pytest.raises(ProviderError, match=other):
        load(built, "tensorrt-rtx", verify=False)
    refused(cpp, changed(weights_sha256="0" * 64), BundleError, "were built from other weights than its model's")


def test_a_truncated_engine_is_refused(cpp, changed) -> None:
    bundle = changed()
    engine = bundle / names.engine_file("segment_01")
    data = engine.read_bytes()
    engine.unlink()  # it is shared
    engine.write_bytes(data[:-1])
    refused(cpp, bundle, BundleError, r"engines/segment_01\.engine' is truncated: 5999 of 6000 bytes")


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (("networks",), None, "field 'engines' needs the field 'networks'"),
        (("networks", "weights"), "fp8", "field 'networks.weights' must be one of fp32, fp16, bf16"),
        (("networks", "matrices"), "int8", "field 'networks.matrices' must be one of int4, fp8"),
        (("networks", "capacity"), 0, "field 'networks.capacity' must be 1 or more"),
        (
            ("networks", "max_slot_tokens"),
            129,
            "field 'networks.max_slot_tokens' must fit max_batch_size times into max_tokens",
        ),
        (
            ("networks", "max_batch_size"),
            4,
            "field 'engines.profiles' must have the batch size networks.max_batch_size",
        ),
        (("engines", "flavour"), "abacus", "field 'engines.flavour' must be one of tensorrt, tensorrt-rtx"),
        (("engines", "profiles"), [], "field 'engines.profiles' must not be empty"),
        (("engines", "profiles", 0, "max_tokens"), 0, "field 'engines.profiles' must have min_tokens <= opt_tokens"),
        (("engines", "profiles", 0, "name"), 7, "field 'engines.profiles.0.name' must be a string, not 7"),
        (("engines", "seconds"), ..., "field 'engines.seconds' is missing"),
        (("engines", "plugins"), {"version": "1", "sha256": "", "engines": ["tail"]}, "must be some of the engines"),
        (("files", "engines/head.engine"), ..., "field 'files' does not list engines/head.engine"),
        (("files", "segments/head.onnx"), ..., "field 'files' does not list segments/head.onnx"),
    ],
)
def test_manifests_of_networks_and_engines_are_read_strictly(cpp, changed, keys, value, sentence: str) -> None:
    bundle = changed()
    edit(bundle, *keys, value=value)
    refused(cpp, bundle, BundleError, sentence)
    with pytest.raises(BundleError, match=sentence):
        load(bundle, verify=False)


# --- before a library is asked ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(cpp: CppBuild, tiny_bundle: Path) -> Any:
    engine = CppEngine(cpp.driver, tiny_bundle)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("version", "device", "sentence"),
    [
        (
            "11.2.0.1",
            "8,9",
            r"built by TensorRT 11\.1\.0\.106 and run on no other, but 11\.2\.0\.1 is installed: build",
        ),
        (VERSION, "0,0", "TensorRT needs an NVIDIA GPU and its driver, and there is none here"),
        (VERSION, "9,0", r"built for GPUs of compute capability 8\.9, this one has 9\.0: build them again with"),
    ],
)
def test_a_machine_that_engines_do_not_run_on(driver, built: Path, version: str, device: str, sentence: str) -> None:
    driver.call("machine", str(built), VERSION, "8,9")
    with pytest.raises(ProviderError, match=sentence):
        driver.call("machine", str(built), version, device)


def test_a_log_that_throws_ends_the_load(driver, built: Path) -> None:
    expected = driver.generate([1, 2], max_new_tokens=4).tokens
    assert driver.call("load_log_throws", str(built), "--no-verify")
    assert driver.generate([1, 2], max_new_tokens=4).tokens == expected, "the engine before it stays"


@pytest.mark.parametrize("listed", [(), RTX_CAPABILITIES])
def test_engines_of_tensorrt_for_rtx_run_on_the_gpus_it_knows(driver, changed, listed) -> None:
    bundle = changed(flavour="tensorrt-rtx", compute_capabilities=listed)
    for device in ("8,0", "12,1"):
        driver.call("machine", str(bundle), VERSION, device)
    for device in ("7,5", "8,7", "9,0", "10,0"):
        here = device.replace(",", "\\.")
        with pytest.raises(
            ProviderError,
            match=rf"8\.0, 8\.6, 8\.9, 12\.0, 12\.1, this one has {here}: build others with .*-target tensorrt`",
        ):
            driver.call("machine", str(bundle), VERSION, device)


BEYOND = [
    ("1025", "1", "1025 tokens", 1024),
    ("33", "2", "33 tokens of each of 2 sequences", 32),
    ("1", "9", "9 sequences", 8),
]


def test_a_run_takes_the_narrowest_profile_and_none_beyond_the_widest(driver, built: Path) -> None:
    assert driver.call("profiles", str(built), "1,2,32,33,1024", "1") == [0, 1, 1, 2, 2, 0, 1, 1]
    assert driver.call("profiles", str(built), "1,2,32", "8") == [3, 4, 4, 0, 1, 1]
    for tokens, batch_size, what, most in BEYOND:
        sentence = f"a run over {what} exceeds the engine's profiles, which take {most} at most"
        with pytest.raises(GenerationError, match=sentence):
            driver.call("profiles", str(built), tokens, batch_size)


def test_networks_unlike_their_manifest_are_refused(cpp, changed, tiny_bundle: Path) -> None:
    bundle = changed()
    edit(bundle, "networks", "exit_size", value=64)
    sentence = r"segment_00.onnx': input exit_states is float32 \['batch', 1, 1280, 128\], but its manifest calls for"
    refused(cpp, bundle, BundleError, sentence, networks="host")
    edit(bundle, "networks", "weights", value="bf16")
    refused(cpp, bundle, ProviderError, "are bfloat16, which ONNX Runtime does not run on the CPU", networks="host")
    refused(cpp, tiny_bundle, ProviderError, "holds no segment networks: export it with --target", networks="host")


def test_the_plugin_library_is_found_and_asked(
    driver, compile_library, cpp: CppBuild, tiny_bundle: Path, monkeypatch
) -> None:
    ours = compile_library("ours")
    digest = hashlib.sha256(ours.read_bytes()).hexdigest()
    assert driver.call("plugins", str(ours)) == [__version__, "11.1", digest]
    assert driver.call("plugins", "-") is None
    assert driver.call("plugins", "none") is None
    monkeypatch.setenv("TIDE_PLUGINS", str(ours))
    engine = CppEngine(cpp.driver, tiny_bundle)
    assert engine.call("plugins", "-") == [__version__, "11.1", digest]
    assert engine.call("plugins", "none") is None
    engine.close()


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            lambda make: make("x").with_name("away.so"),
            r"does not exist: build it \(plugins/README\.md\), or do without",
        ),
        (lambda make: make("old", "0.0.9"), f"belongs to tide_export 0.0.9, but this is {__version__}: build it from"),
        (lambda make: Path(__file__), "is damaged or no plugin library of tide_export: .*invalid ELF header"),
        (lambda make: cut(make("cut")), "is damaged or no plugin library of tide_export: "),
        (
            lambda make: make("dies", more="void abort(void); __attribute__((constructor)) void f(void){abort();}"),
            r"is damaged or no plugin library of tide_export: opening it crashes \(SIGABRT\)",
        ),
    ],
    ids=["away", "old", "no library", "cut", "dies"],
)
def test_a_plugin_library_that_cannot_be_used(driver, compile_library, made, sentence: str) -> None:
    with pytest.raises(ProviderError, match=sentence):
        driver.call("plugins", str(made(compile_library)))


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:9000])
    return path


def test_onnx_runtime_leaves_nothing_to_send(cpp: CppBuild, tiny_bundle: Path, tmp_path: Path) -> None:
    left = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    environment = left | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([cpp.program, tiny_bundle, "--ids", "5,1"], env=environment, check=True, capture_output=True)
    assert [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name] == []
