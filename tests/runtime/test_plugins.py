"""The library of TensorRT plugins: found or refused with one sentence, before TensorRT sees it.

The libraries here are stand-ins that a C compiler makes; the real one is in tests/plugins.
"""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tide_export.bundle.file_names import PLANS_FOLDER, plan_file
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.bundle.plan_fields import PlansInfo, PluginsInfo, Profile
from tide_export.bundle.store import write_manifest
from tide_export.cli.main import main
from tide_export.common.version import __version__
from tide_export.errors import BuildError, ConfigError, ProviderError
from tide_export.names.networks import AFTER_SEGMENTS, segment_name
from tide_export.pipeline.flow import export
from tide_export.plans import build
from tide_export.plans import rebuild as rebuilding
from tide_export.plans.worker import build as build_one
from tide_export.runtime.engine import open_engine
from tide_export.runtime.tensorrt import plans as on_tensorrt
from tide_export.runtime.tensorrt import plugins as looking
from tide_export.runtime.tensorrt.flavours import TENSORRT, TENSORRT_RTX
from tide_export.runtime.tensorrt.plugins import find_plugins, plugins_to_build_with, plugins_to_load, register

REPORTED = {"weights_bytes": 9, "activation_bytes": 9, "layers": 2, "constants": 9, "profiles": 1}
REPORTED |= {"attentions": 1, "fused_attention_kernels": 1, "copied": {}}
NEEDED = PluginsInfo(__version__, "0" * 64, ("segment_00",))


@pytest.fixture(scope="module")
def ours(compile_library) -> Path:
    return compile_library("ours")


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(looking.VARIABLE, raising=False)
    monkeypatch.setattr(looking, "INSTALLED", ())


def test_what_is_named_comes_before_the_variable_and_that_before_what_is_installed(
    ours: Path, compile_library, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_plugins(None) is None
    installed, by_variable = compile_library("installed"), compile_library("by_variable")
    monkeypatch.setattr(looking, "INSTALLED", (installed.with_name("none.so"), installed))
    assert find_plugins(None).path == installed
    monkeypatch.setenv(looking.VARIABLE, str(by_variable))
    assert find_plugins(None).path == by_variable
    found = find_plugins(ours)
    assert (found.path, found.version, found.tensorrt) == (ours, __version__, "11.1")
    assert len(found.sha256) == 64
    assert find_plugins("none") is None
    monkeypatch.setenv(looking.VARIABLE, "none")
    assert find_plugins(None) is None


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda make, ours: ours.with_name("away.so"), "does not exist: build it .*, or do without it: --plugins none"),
        (lambda make, ours: make("old", "0.0.9"), f"belongs to tide_export 0.0.9, but this is {__version__}: build it"),
        (lambda make, ours: Path(__file__), "is damaged or no plugin library of tide_export: .* invalid ELF header"),
        (
            lambda make, ours: make(
                "dies", more="void abort(void); __attribute__((constructor)) void f(void){abort();}"
            ),
            r"is damaged or no plugin library of tide_export: opening it crashes \(SIGABRT\)",
        ),
    ],
)
def test_a_library_that_cannot_be_used_is_refused(ours: Path, compile_library, made, says: str) -> None:
    with pytest.raises(ProviderError, match=says) as caught:
        find_plugins(made(compile_library, ours))
    assert "\n" not in str(caught.value)


def test_a_library_without_the_versions_is_refused(tmp_path: Path, compile_library) -> None:
    other = tmp_path / "other.so"
    source = tmp_path / "other.c"
    source.write_text("int other;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", other, source], check=True)
    with pytest.raises(
        ProviderError, match=r"no plugin library of tide_export: .*undefined symbol: tide_plugins_version"
    ):
        find_plugins(other)


def test_a_library_for_another_tensorrt_is_refused(compile_library) -> None:
    later = compile_library("later", tensorrt="12.0")
    with pytest.raises(
        ProviderError, match=r"was compiled for TensorRT 12\.0 and 11\.1\.0\.106 is installed: build it"
    ):
        plugins_to_build_with(TENSORRT, "11.1.0.106", later)


def test_tensorrt_rtx_has_no_plugins(ours: Path, demo_bundle: Path, tmp_path: Path, capsys) -> None:
    assert plugins_to_build_with(TENSORRT_RTX, "1.7.1", None) is None
    assert plugins_to_build_with(TENSORRT_RTX, "1.7.1", "none") is None
    with pytest.raises(ConfigError, match="TensorRT for RTX has no plugins"):
        plugins_to_build_with(TENSORRT_RTX, "1.7.1", ours)


def test_an_installed_library_is_no_matter_to_tensorrt_rtx(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "INSTALLED", (ours,))
    assert plugins_to_build_with(TENSORRT_RTX, "1.7.1", None) is None


def test_a_missing_library_is_one_line_of_build(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(rebuilding, "require_builder", lambda flavour: "11.1.0.106")
    assert main(["build", str(demo_bundle), "--target", "tensorrt", "--plugins", "away.so", "-q"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the plugin library 'away.so' does not exist" in line


def test_a_library_that_no_engine_would_use_is_refused(tmp_path: Path, demo_model: Path, demo_bundle: Path) -> None:
    for options in ({}, {"targets": ("tensorrt",), "engines": False}):
        with pytest.raises(ConfigError, match="--plugins is for building plans of target tensorrt"):
            export(str(demo_model), tmp_path / "out", plugins="x.so", **options)
    with pytest.raises(ProviderError, match=r"no plan of bundle .* holds plugins: omit --plugins"):
        open_engine(open_bundle(demo_bundle, verify=False), "cpu", plugins="x.so")
    open_engine(open_bundle(demo_bundle, verify=False), "cpu", plugins="none")


def bundle_with_engines(demo_bundle: Path, folder: Path, plugins: PluginsInfo | None) -> Bundle:
    shutil.copytree(demo_bundle, folder)
    (folder / PLANS_FOLDER).mkdir()
    for part in (*(segment_name(k) for k in range(4)), *AFTER_SEGMENTS):
        (folder / plan_file(part)).write_bytes(b"engine")
    manifest = open_bundle(demo_bundle, verify=False).manifest
    profiles = (Profile("decode", 1, 1, 1, 8),)
    engines = PlansInfo("tensorrt", "11.1.0.106", ("8.9",), manifest.model.weights_sha256, profiles, 1.0, plugins)
    write_manifest(folder, replace(manifest, engines=engines))
    return open_bundle(folder, verify=False)


class Registry:
    """TensorRT's, as far as it is asked."""

    def __init__(self, takes: bool = True) -> None:
        self.takes, self.loaded = takes, []

    def get_creator(self, name: str, version: str, namespace: str):
        return self.loaded if self.loaded and self.takes else None

    def load_library(self, path: str):
        self.loaded.append(path)
        return self if self.takes else None


def test_engines_with_plugins_need_the_library(
    demo_bundle: Path, tmp_path: Path, ours: Path, compile_library, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    bundle = bundle_with_engines(demo_bundle, tmp_path / "bundle", NEEDED)
    registry = Registry()
    library = SimpleNamespace(__version__="11.1.0.106", get_plugin_registry=lambda: registry)
    monkeypatch.setattr(on_tensorrt, "import_library", lambda flavour: library)
    monkeypatch.setattr(on_tensorrt, "compute_capability", lambda gpu=0: (8, 9))
    monkeypatch.setattr(on_tensorrt, "select_gpu", lambda gpu: None)

    arguments = ["generate", str(bundle.path), "--prompt", "a", "--provider", "tensorrt", "--no-verify", "-q"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"hold plugins of tide_export {__version__} and there is no plugin library here: name it with" in line
    assert f"`tide-export build {bundle.path} --plugins none`" in line
    assert main([*arguments, "--plugins", str(compile_library("older", "0.0.1"))]) == 2
    assert "belongs to tide_export 0.0.1" in capsys.readouterr().err
    assert registry.loaded == []

    class Stop(Exception):
        pass

    def stop(flavour, library):
        raise Stop

    monkeypatch.setattr(on_tensorrt, "_Runtime", stop)
    for _ in range(2):  # a second bundle in the same process
        with pytest.raises(Stop):
            on_tensorrt.open_plans(bundle, "tensorrt", {}, ours)
    assert registry.loaded == [str(ours)], "before an engine is read, and once"


def test_engines_with_plugins_of_another_release_are_refused(ours: Path) -> None:
    with pytest.raises(ProviderError, match=r"hold plugins of tide_export 0\.0\.9, but the library '.*' is of 0\.1"):
        plugins_to_load(Path("b"), replace(NEEDED, version="0.0.9"), "11.1", ours)


def test_a_library_tensorrt_does_not_take_is_an_error() -> None:
    library = SimpleNamespace(get_plugin_registry=lambda: Registry(takes=False))
    with pytest.raises(ProviderError, match=r"TensorRT cannot load the plugin library 'x\.so'"):
        register(library, "x.so")


def test_the_builder_loads_the_library_before_it_parses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trt = pytest.importorskip("polygraphy.mod.trt_importer")
    registry = Registry()
    monkeypatch.setattr(trt, "lazy_import_trt", lambda: SimpleNamespace(get_plugin_registry=lambda: registry))
    job = {"plugins": "x.so", "timing_cache": None}
    with pytest.raises(KeyError, match="profiles"):  # what comes next
        build_one({"name": "segment_00"}, job, lambda *args, **values: None)
    assert registry.loaded == ["x.so"]


@pytest.mark.parametrize("taken", [1, 0])
def test_the_manifest_says_which_engines_hold_plugins(
    taken: int, demo_bundle: Path, tmp_path: Path, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder's answers are made up; what is asked of it and recorded is not."""
    manifest = open_bundle(demo_bundle, verify=False).manifest
    jobs = []

    def answer(job, flavour, version, advance):
        jobs.append(job)
        plugins = {network["name"]: taken * (network["name"] in names_routed) for network in job["networks"]}
        return {name: REPORTED | {"plugins": number} for name, number in plugins.items()}

    names_routed = ("segment_00", "segment_01", "segment_02")
    monkeypatch.setattr(build, "require_builder", lambda flavour: "11.1.0.106")
    monkeypatch.setattr(build, "run_worker", answer)
    monkeypatch.setattr(build, "_check_built", lambda *arguments: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = find_plugins(ours)
    if not taken:
        with pytest.raises(BuildError, match=r"TensorRT did not take the plugin TideExit of '.*' in segment_00"):
            build.build_plans(tmp_path, manifest, TENSORRT, library)
        return
    info = build.build_plans(tmp_path, manifest, TENSORRT, library)
    assert info.plugins == PluginsInfo(__version__, library.sha256, names_routed)
    assert [job["plugins"] for job in jobs] == [str(ours)]
    (tmp_path / PLANS_FOLDER).rmdir()
    assert build.build_plans(tmp_path, manifest, TENSORRT).plugins is None
    assert jobs[1]["plugins"] is None
