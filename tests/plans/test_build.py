"""Real engines of TensorRT for RTX, built without a GPU; and how a builder's death is told."""

import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import tiers
from drafters import random_drafter
from families import build as make_model
from tiny_engines import bundle_of, pieces_of, segments_of

from tide_export.bundle.file_names import MANIFEST_FILE, SEGMENTS_FOLDER, network_file, plan_file
from tide_export.bundle.inspect import describe, render
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.network_spec import aliases, specs
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import BuiltPlan
from tide_export.bundle.profiles import with_batch_size
from tide_export.bundle.store import write_manifest
from tide_export.cli.main import main
from tide_export.drafting.bundle import write_drafter
from tide_export.errors import BuildError, BundleError, ConfigError, ProviderError
from tide_export.names import segment_networks as names
from tide_export.names.networks import AFTER_SEGMENTS, CANDIDATES, DRAFTER, HEAD, segment_name
from tide_export.plans import build
from tide_export.plans.build import _check_built, _timing_cache, _warn, require_builder, run_worker
from tide_export.plans.rebuild import rebuild
from tide_export.routers.random_routers import random_routers
from tide_export.runtime.tensorrt import flavours, gpu
from tide_export.runtime.tensorrt.flavours import TENSORRT, TENSORRT_RTX
from tide_export.runtime.tensorrt.gpu import compute_capability
from tide_export.runtime.tensorrt.plans import _Runtime


def half_precision(folder: Path, weights: str) -> Path:
    """A bundle of a tiny model of two segments, whose head is tied to its embedding, with a drafter."""
    source = make_model("llama (3.1)")
    routers = random_routers(source, (2,), range(3, 43), bottleneck=16, lens_rank=4)
    pieces = pieces_of(source, routers.checkpoints)
    bundle_of(source, routers, folder, pieces)
    bundle = segments_of(source, routers, folder, pieces, weights, TENSORRT_RTX.name)
    tokens = np.arange(0, source.vocab_size, 2)
    drafter = random_drafter(576, source.hidden_size, tokens, weights_sha256=bundle.manifest.model.weights_sha256)
    write_drafter(folder, drafter)  # with one K/V head it is not fused
    return folder


# By bundle: most tokens and sequences of its profiles; and by segment, layers of attention and how many are fused.
PROFILE_NAMES = ("decode", "catch-up", "prefill", "batch-decode", "batch-catch-up")
PROFILES = {
    "demo": [(2, 1), (32, 1), (1024, 1), (1, 8), (32, 8)],
    "half": [(2, 1), (8, 1), (33, 1), (1, 3), (4, 3)],
}
ATTENTION = {
    "demo": {segment_name(k): (3, 0) for k in range(4)},  # none is fused in float32
    "half": {segment_name(0): (2, 2), segment_name(1): (1, 1), DRAFTER: (1, 1)},
}


@pytest.fixture(scope="module", params=tiers.exhaustive_beyond(1, ["fp16", "bf16", "demo"]))
def unbuilt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return request.getfixturevalue("demo_bundle")
    return half_precision(tmp_path_factory.mktemp("half") / "bundle", request.param)


@pytest.fixture(scope="module")
def built(unbuilt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a bundle with engines of TensorRT for RTX."""
    bundle = tmp_path_factory.mktemp("built") / "bundle"
    shutil.copytree(unbuilt, bundle)
    assert main(["build", str(bundle), "--target", "tensorrt-rtx", "-q"]) == 0
    return bundle


@pytest.fixture
def kind(unbuilt: Path, demo_bundle: Path) -> str:
    return "demo" if unbuilt == demo_bundle else "half"


def parts_of(kind: str) -> list[str]:
    return [*ATTENTION[kind], *AFTER_SEGMENTS]


def test_every_network_becomes_an_engine(built: Path, unbuilt: Path, kind: str) -> None:
    opened, before = open_bundle(built), open_bundle(unbuilt)
    manifest = opened.manifest
    assert manifest.targets == (*before.manifest.targets[:1], "tensorrt-rtx")
    assert manifest.engines is not None
    assert manifest.engines.flavour == "tensorrt-rtx"
    assert manifest.engines.version == require_builder(TENSORRT_RTX)
    assert manifest.engines.weights_sha256 == manifest.model.weights_sha256
    assert manifest.engines.compute_capabilities == flavours.RTX_CAPABILITIES
    assert tuple(profile.name for profile in manifest.engines.profiles) == PROFILE_NAMES
    profiles = [(profile.max_tokens, profile.batch_size) for profile in manifest.engines.profiles]
    assert profiles == PROFILES[kind]
    assert manifest.networks is not None
    assert (manifest.networks.max_batch_size, manifest.networks.max_slot_tokens) == profiles[-1][::-1]
    for part in parts_of(kind):
        assert manifest.files[plan_file(part)].size > 100_000
    assert {file: info for file, info in manifest.files.items() if not file.startswith("engines/")} == (
        before.manifest.files
    )


def test_the_weights_are_in_memory_once_for_all_profiles(built: Path, kind: str) -> None:
    """By the builder's own figures: a profile of one shape alone had a copy in another layout."""
    engines = open_bundle(built, verify=False).manifest.engines
    assert engines is not None
    assert engines.built is not None
    for part, engine in engines.built.items():
        network = onnx.load(str(built / network_file(part)))
        stored = sum(onnx.numpy_helper.to_array(weight).nbytes for weight in network.graph.initializer)
        if part not in (HEAD, CANDIDATES, DRAFTER):  # the first two have none
            assert 0.9 * stored < engine.weights_bytes < 1.1 * stored, part
            assert engine.activation_bytes > 0
        assert engine.layers > 1
    attention = {part: (one.attention_layers, one.fused_attention_layers) for part, one in engines.built.items()}
    assert attention == ATTENTION[kind] | dict.fromkeys(AFTER_SEGMENTS, (0, 0))
    segment, (layers, fused) = engines.built["segment_01"], ATTENTION[kind]["segment_01"]
    lines = [line.split() for line in render(describe(built, verify=False)).splitlines()]
    (shown,) = (line for line in lines if line[:1] == ["segment_01"] and "fused" in line)
    assert shown[5:] == [str(segment.layers), str(fused), "of", str(layers), "fused"]


def test_what_a_builder_reports_that_users_should_know_is_logged(caplog) -> None:
    lean, copied = BuiltPlan(100 << 20, 0, 9, 4, 4), BuiltPlan(190 << 20, 0, 9, 4, 3)
    _warn(TENSORRT_RTX, {"segment_00": lean, "segment_01": copied}, {"segment_00": 95 << 20, "segment_01": 95 << 20})
    growth, decomposed = caplog.messages
    assert growth.startswith("TensorRT for RTX stores the weights of segment_01 in 199.2 MB of GPU memory, 2.0 times")
    assert decomposed.startswith("TensorRT for RTX has no fused attention for segment_01 and uses several kernels")


def test_a_tied_head_multiplies_by_the_embedding_as_it_lies(built: Path) -> None:
    """It holds no copy, and its plan has no kernel that transposes it in every run, for which it has one and events."""
    engines = open_bundle(built, verify=False).manifest.engines
    assert engines is not None
    assert engines.built is not None
    head = engines.built[HEAD]
    assert head.weights_bytes < 1000
    assert head.layers <= 4 * 2, "of two profiles"


def test_buffers_are_updated_in_place_by_the_builder_s_own_plan(built: Path) -> None:
    """Which names each of them where it is written."""
    engines = open_bundle(built, verify=False).manifest.engines
    assert engines is not None
    assert engines.copied is None


def test_an_engine_holds_the_tensors_it_is_bound_by(built: Path) -> None:
    """As far as can be read without a GPU: the plan names its inputs and outputs, those of further profiles too."""
    opened = open_bundle(built, verify=False)
    assert opened.manifest.networks is not None
    for part, spec in specs(opened.manifest, opened.manifest.networks).items():
        plan = opened.file(plan_file(part)).read_bytes()
        for tensor in (*spec.inputs, *spec.outputs):
            assert tensor.encode() in plan, (part, tensor)
        assert (b"[profile 4]" in plan) == (part not in AFTER_SEGMENTS)
        assert b"[profile 1]" in plan
        assert b"[profile 5]" not in plan


def test_an_engine_has_a_header_the_library_knows(built: Path, kind: str) -> None:
    """It requires a GPU; a damaged header is reported without one."""
    trt = pytest.importorskip("tensorrt_rtx", reason="the extra `rtx` is not installed")
    runtime = _Runtime(TENSORRT_RTX, trt)
    for part in parts_of(kind):
        engine = (built / plan_file(part)).read_bytes()
        if compute_capability() is None:
            with pytest.raises(ProviderError, match="CUDA"):
                runtime.load(engine, part)
        with pytest.raises(BundleError, match="it is no plan, or a damaged one"):
            runtime.load(bytes(8) + engine[8:], part)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found["inputs"].pop(names.PAST_LENGTHS), "'segment_01' has no input past_lengths"),
        (lambda found: found["outputs"].update(more=["FLOAT", [1]]), "'segment_01' has the output more"),
        (
            lambda found: found["inputs"].update(pending_states=["HALF", [-1, 1, 1280, 128]]),
            "pending_states is float16",
        ),
        (
            lambda found: found["inputs"].update(pending_states=["FLOAT", [-1, 1, 1280, 64]]),
            r"float32 \['batch', 1, 1280, 64",
        ),
        (
            lambda found: found["inputs"].update(pending_states=["FLOAT", [1, 1, 1280, 128]]),
            r"pending_states is float32 \[1,",
        ),
        (lambda found: found.update(profiles=3), "took 3 of the 5 optimization profiles of segment_01"),
        (lambda found: found["aliases"].popitem(), "does not update the buffers of segment_01 in place"),
    ],
)
def test_an_engine_unlike_its_network_is_refused(demo_bundle: Path, change, says: str) -> None:
    manifest = open_bundle(demo_bundle, verify=False).manifest
    assert manifest.networks is not None
    spec = specs(manifest, manifest.networks)["segment_01"]
    types = {"float32": "FLOAT", "int64": "INT64", "int32": "INT32"}

    def as_found(tensors) -> dict[str, list]:
        free = {name: [-1 if isinstance(dim, str) else dim for dim in tensor.shape] for name, tensor in tensors.items()}
        return {name: [types[tensor.dtype], free[name]] for name, tensor in tensors.items()}

    found = {"inputs": as_found(spec.inputs), "outputs": as_found(spec.outputs), "aliases": aliases(spec)}
    found |= {"profiles": 5, "plugins": 0}
    _check_built("segment_01", spec, found, 5)
    change(found)
    with pytest.raises((BuildError, BundleError), match=says):
        _check_built("segment_01", spec, found, 5)


JOB = {"networks": [{"name": "segment_00"}], "timing_cache": None, "compute_capabilities": ()}
BEGIN = (
    "import json,os,sys,signal; json.load(sys.stdin); print(json.dumps({'event':'building','network':'segment_00'}))"
)


@pytest.mark.parametrize(
    ("death", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed while building segment_00 (SIGSEGV)"),
        ("os.abort()", "crashed while building segment_00 (SIGABRT)"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "was killed while building segment_00, most likely because memory ran",
        ),
        ("sys.exit(3)", "ended with exit code 3 while building segment_00"),
        ("None", "ended with exit code 0 while building segment_00"),
    ],
)
def test_a_builder_s_crash_is_one_sentence_with_its_last_log_lines(death: str, says: str) -> None:
    script = f"{BEGIN}; print('thinking\\\\nno kernel\\\\nfor this', file=sys.stderr); sys.stdout.flush(); {death}"
    with pytest.raises(BuildError) as error:
        run_worker(JOB, TENSORRT_RTX, "1.7", lambda amount: None, ("-c", script.replace("\\\\n", "\\n")))
    assert says in str(error.value)
    assert "its last log lines: thinking | no kernel | for this" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_builder_that_crashes_before_it_reads_is_reported_too() -> None:
    big = {**JOB, "timing_cache": "x" * 1_000_000}
    with pytest.raises(BuildError, match="crashed before it built anything"):
        run_worker(big, TENSORRT_RTX, "1.7", lambda amount: None, ("-c", "import os; os.abort()"))


@pytest.mark.parametrize(
    ("raised", "says"),
    [("MemoryError()", "not enough memory"), ("ProviderError('TensorRT cannot load it')", "TensorRT cannot load it")],
)
def test_what_goes_wrong_in_the_builder_is_its_sentence(raised: str, says: str) -> None:
    script = (
        "from tide_export.plans import worker; from tide_export.errors import ProviderError\n"
        f"def fail(*args): raise {raised}\n"
        "worker.build = fail; raise SystemExit(worker.main())"
    )
    with pytest.raises(BuildError, match=f"TensorRT for RTX 1.7 cannot build segment_00: {says}"):
        run_worker(JOB, TENSORRT_RTX, "1.7", lambda amount: None, ("-c", script))


def test_a_network_tensorrt_refuses_leaves_the_bundle_as_it_was(built: Path, tmp_path: Path, capsys) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(built, bundle)
    spoil(bundle)
    before = (bundle / MANIFEST_FILE).read_bytes()
    assert main(["build", str(bundle), "-q"]) == 2
    line = capsys.readouterr().err
    assert "cannot build segment_01" in line
    assert len(line.splitlines()) == 1
    assert (bundle / MANIFEST_FILE).read_bytes() == before
    open_bundle(bundle)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bundle"]


def spoil(bundle: Path) -> None:
    """Gives segment 1 an unknown operator, in a bundle whose hashes fit."""
    path = bundle / network_file("segment_01")
    model = onnx.load(str(path), load_external_data=False)
    model.graph.node[0].op_type = "Abacus"
    path.write_bytes(model.SerializeToString())
    write_manifest(bundle, Manifest.from_json((bundle / MANIFEST_FILE).read_text()))


def test_progress_adds_up_to_the_networks(demo_bundle: Path, tmp_path: Path) -> None:
    begin, end = ({"event": kind, "network": "segment_00"} for kind in ("building", "built"))
    events = [begin, *[{"event": "step", "of": 4}] * 9, end]
    script = f"import json,sys; json.load(sys.stdin); [print(json.dumps(event)) for event in {events!r}]"
    amounts: list[float] = []
    run_worker(JOB, TENSORRT_RTX, "1.7", amounts.append, ("-c", script))
    assert sum(amounts) == pytest.approx(1.0)
    assert len(amounts) == 4


def test_the_batch_size_can_change_when_engines_are_built(demo_bundle: Path, tmp_path: Path, monkeypatch) -> None:
    info = open_bundle(demo_bundle, verify=False).manifest.networks
    assert info is not None
    assert with_batch_size(info, 8) == info
    assert (with_batch_size(info, 64).max_batch_size, with_batch_size(info, 64).max_slot_tokens) == (64, 16)
    assert with_batch_size(info, 1).max_batch_size == 1
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle, bundle)
    with pytest.raises(ConfigError, match="batch_size must be a whole number from 1 to 256, not 0"):
        rebuild(bundle, "tensorrt-rtx", batch_size=0)
    manifest = open_bundle(bundle, verify=False).manifest
    write_manifest(bundle, replace(manifest, networks=with_batch_size(info, 1)))
    with pytest.raises(BuildError, match=r"take one sequence at a time .* export it again with --batch-size"):
        rebuild(bundle, "tensorrt-rtx", batch_size=4)


def test_tensorrt_not_installed_says_which_package_for_which_flavour(monkeypatch: pytest.MonkeyPatch) -> None:
    for flavour, package, extra in ((TENSORRT, "tensorrt", "gpu"), (TENSORRT_RTX, "tensorrt-rtx", "rtx")):
        monkeypatch.setattr(flavours.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
        with pytest.raises(ProviderError, match=rf"pip install {package}, or -e '\.\[{extra}\]' in the clone"):
            require_builder(flavour)


def test_timings_are_kept_per_version_and_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus = {"NVIDIA H100 80GB HBM3": "NVIDIA-H100-80GB-HBM3", "NVIDIA RTX A6000 (x)": "NVIDIA-RTX-A6000-x"}
    for name, shown in gpus.items():

        def give(buffer, size: int, handle, name: str = name) -> int:
            buffer.value = name.encode()
            return 0

        driver = types.SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGet=lambda *_: 0, cuDeviceGetName=give)
        monkeypatch.setattr(gpu, "_driver", lambda driver=driver: driver)
        gpu.device_name.cache_clear()
        assert _timing_cache(TENSORRT, "11.4") == str(tmp_path / "tide_export" / f"tensorrt-11.4-{shown}.timing")
    gpu.device_name.cache_clear()
    monkeypatch.setattr(gpu, "_driver", lambda: None)
    assert gpu.device_name() == "none"
    gpu.device_name.cache_clear()


def test_a_cache_that_cannot_be_written_only_costs_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert _timing_cache(TENSORRT, "11.4") is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert _timing_cache(TENSORRT, "11.4") is None
    assert flavours.kernel_cache(flavours.TENSORRT_RTX, "1.7") is None


def test_tensorrt_without_a_gpu_says_where_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "import_library", lambda flavour: types.SimpleNamespace(__version__="11.1"))
    monkeypatch.setattr(build, "compute_capability", lambda: None)
    with pytest.raises(
        BuildError, match=r"builds for the GPU it finds and there is none here: run `tide-export build`"
    ):
        require_builder(TENSORRT)


def test_networks_of_the_other_flavour_are_told(
    demo_bundle: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    for target, count in (("tensorrt-rtx", 1), (None, 0)):
        caplog.clear()
        with pytest.raises((ConfigError, ProviderError)):  # one takes no plugins, the other's package is not here
            rebuild(demo_bundle, target, plugins="libtide_plugins.so")
        assert [one.levelname for one in caplog.records if "are for another flavour" in one.message] == [
            "WARNING"
        ] * count


def test_a_bundle_without_networks_cannot_be_built(tmp_path: Path, demo_bundle: Path) -> None:
    with pytest.raises(BundleError, match="does not exist"):
        rebuild(tmp_path / "none", "tensorrt-rtx")
    bundle = tmp_path / "bundle"
    shutil.copytree(demo_bundle, bundle)
    shutil.rmtree(bundle / SEGMENTS_FOLDER)
    manifest = open_bundle(demo_bundle, verify=False).manifest
    write_manifest(bundle, replace(manifest, networks=None, targets=("onnxruntime",)))
    with pytest.raises(BuildError, match="holds no segment networks to build from"):
        rebuild(bundle, "tensorrt-rtx")
