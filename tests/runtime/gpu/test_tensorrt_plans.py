"""`runtime.tensorrt.plans` on stand-ins for TensorRT's package, whose engines run in ONNX Runtime, and for CUDA. The
stand-in refuses what TensorRT refuses, and overwrites its working memory."""

import ctypes
import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import byref, c_int, c_void_p
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bundles import with_manifest
from caller_networks import CallersNetworks
from fake_cudart import ALIGNMENT, FakeCudart
from generations import PROMPTS, alone, exits, facts, together, tokens_of
from judge import TEXT
from tiny_engines import TinyLlama

from tide_export.bundle.file_names import PLANS_FOLDER, plan_file
from tide_export.bundle.network_spec import BATCH, KEYS, TENSORRT_TYPES, TOKENS, NetworkSpec, RunSize, of_network
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import NetworksInfo, PlansInfo, PluginsInfo, Profile
from tide_export.bundle.profiles import profiles_for, run_sizes
from tide_export.bundle.store import write_manifest
from tide_export.common.version import __version__
from tide_export.errors import BuildError, GenerationError, ProviderError
from tide_export.plans import compare
from tide_export.runtime.engine import Engine, load
from tide_export.runtime.scheduler import SchedulerLimits
from tide_export.runtime.tensorrt import cudart as calls
from tide_export.runtime.tensorrt import plans as opening

CONTEXT_BYTES = 1 << 20  # that a context keeps, beside the working memory
DTYPES = {dtype: name for name, dtype in TENSORRT_TYPES.items()}


class Bindings:
    """What of NVIDIA's package cuda-bindings is used, on the stand-in."""

    cudaError_t = SimpleNamespace(cudaSuccess=0, cudaErrorMemoryAllocation=2)

    def __init__(self, cudart: FakeCudart) -> None:
        self._functions = cudart.functions

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        count = c_int()
        return self._functions.cudaGetDeviceCount(byref(count)), count.value

    def cudaSetDevice(self, gpu: int) -> tuple[int]:
        return (self._functions.cudaSetDevice(gpu),)

    def cudaMalloc(self, size: int) -> tuple[int, int | None]:
        address = c_void_p()
        return self._functions.cudaMalloc(byref(address), ctypes.c_size_t(size)), address.value

    def cudaFree(self, address: int) -> tuple[int]:
        return (self._functions.cudaFree(c_void_p(address)),)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        return (self._functions.cudaStreamSynchronize(c_void_p(stream)),)


class Context:
    """An execution context. What was recorded of it fails once its shapes or addresses have changed: TensorRT's
    documentation leaves undefined what it does then."""

    def __init__(self, engine: "FoundEngine", library: "Library") -> None:
        self._engine, self._library = engine, library
        self.memory: tuple[int, int] | None = None
        self.nvtx_verbosity = library.ProfilingVerbosity.DETAILED
        self._profile: Profile | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._last: RunSize | None = None
        self.changes = 0
        functions, address = library.cudart.functions, c_void_p()
        assert functions.cudaMalloc(byref(address), ctypes.c_size_t(CONTEXT_BYTES)) == 0, "out of memory"
        weakref.finalize(self, functions.cudaFree, address)

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = address, size

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = self._engine.profiles[profile]
        return True

    def set_input_shape(self, name: str, dims: tuple[int, ...]) -> bool:
        self.changes += 1
        assert self._profile is not None
        most = {TOKENS: self._profile.max_tokens, BATCH: self._profile.batch_size, KEYS: self._engine.spec.keys}
        self._shapes[name] = dims
        return all(
            1 <= given <= most[size] if isinstance(size, str) else given == size
            for given, size in zip(dims, self._engine.spec.inputs[name].shape, strict=True)
        )

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.changes += 1
        self._addresses[name] = address
        return address % ALIGNMENT == 0

    def execute_async_v3(self, stream: int) -> bool:
        spec, sizes = self._engine.spec, {TOKENS: 1, BATCH: 1, KEYS: 1}
        for name, tensor in spec.inputs.items():
            sizes |= {size: dim for size, dim in zip(tensor.shape, self._shapes[name], strict=True) if size in sizes}
        run, cudart = RunSize(*sizes.values()), self._library.cudart
        assert all(tensor.dims(run) == self._shapes[name] for name, tensor in spec.inputs.items())
        if cudart.functions.fake_cuda_is_capturing(c_void_p(stream)) and self._last != run:
            return False
        if spec.name == self._library.copying and self._library.plugins is not None:
            self._library.plugins.copy(ctypes.c_long(1000 * run[1]))
        if self.nvtx_verbosity != self._library.ProfilingVerbosity.NONE:
            return False
        if self.memory is None or self.memory[1] < self._engine.device_memory_size_v2:
            return False
        (address, size), addresses, self._last = self.memory, dict(self._addresses), run
        captured = cudart.functions.fake_cuda_is_capturing(c_void_p(stream))
        context, changes, networks = weakref.ref(self), self.changes, self._library.networks

        def work() -> None:
            now = context()
            if captured and (now is None or now.changes != changes):
                raise RuntimeError("a recorded execution context was changed or destroyed")
            ctypes.memset(address, 0xFF, size)
            networks.run(spec.name, addresses, run, 0, False)

        cudart.queue(stream, work)
        return addresses.keys() == {*spec.inputs, *spec.outputs}


class FoundEngine:
    """An engine of a network, which runs in ONNX Runtime."""

    def __init__(self, library: "Library", spec: NetworkSpec, profiles: tuple[Profile, ...]) -> None:
        self._library, self.spec, self.profiles = library, spec, profiles
        self._described = {**spec.inputs, **spec.outputs}
        self._tensors = [*((name, "INPUT") for name in spec.inputs), *((name, "OUTPUT") for name in spec.outputs)]
        self.num_io_tensors, self.num_optimization_profiles = len(self._tensors), len(profiles)
        self.device_memory_size_v2 = 100_000 + 1000 * len(spec.inputs)
        self.contexts = weakref.WeakSet[Context]()

    def get_tensor_name(self, index: int) -> str:
        return self._tensors[index][0]

    def get_tensor_mode(self, name: str) -> Any:
        return SimpleNamespace(name=dict(self._tensors)[name])

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=DTYPES[self._described[name].dtype])

    def get_tensor_shape(self, name: str) -> list[int]:
        return [-1 if isinstance(dim, str) else dim for dim in self._described[name].shape]

    def get_aliased_input_tensor(self, name: str) -> None:
        return None

    def get_tensor_profile_shape(self, name: str, number: int) -> list[tuple[int, ...]]:
        profile = self.profiles[number]
        return [self.spec.inputs[name].dims(RunSize(profile.max_tokens, profile.batch_size, self.spec.keys))] * 3

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(strategy=None)
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(config, "strategy", strategy)
        return config

    def create_execution_context(self, config: Any) -> Context | None:
        if config.strategy != self._library.ExecutionContextAllocationStrategy.USER_MANAGED:
            return None
        context = Context(self, self._library)
        self.contexts.add(context)
        return context


class Library:
    """What of the package `tensorrt` is used."""

    __version__ = "11.1"

    class ILogger:
        class Severity(Enum):
            INTERNAL_ERROR, ERROR = range(2)

    class ExecutionContextAllocationStrategy(Enum):
        STATIC, USER_MANAGED = range(2)

    class ProfilingVerbosity(Enum):
        LAYER_NAMES_ONLY, NONE, DETAILED = range(3)

    def __init__(self, cudart: FakeCudart, networks: CallersNetworks, info: Any) -> None:
        self.cudart, self.networks = cudart, networks
        self.plugins: ctypes.CDLL | None = None
        self.copying = ""  # the network whose plugin does not work in place
        self.build(info)

    def build(self, info: NetworksInfo) -> None:
        """Builds engines for runs of these sizes."""
        self.engines = {
            name: FoundEngine(self, spec, of_network(name, profiles_for(info), info))
            for name, spec in self.networks.specs.items()
        }

    def Runtime(self, log: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: self.engines[bytes(data).decode()])

    def get_plugin_registry(self) -> Any:
        def load_library(path: str) -> None:
            self.plugins = ctypes.CDLL(path)

        return SimpleNamespace(get_creator=lambda *_: self.plugins, load_library=load_library)


@pytest.fixture
def library(tiny_llama: TinyLlama, cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> Library:
    bundle = open_bundle(tiny_llama.exact)
    library = Library(cudart, CallersNetworks(bundle), bundle.manifest.networks)
    monkeypatch.setattr(opening, "import_library", lambda flavour: library)
    monkeypatch.setattr(opening, "compute_capability", lambda gpu=0: (8, 9))
    monkeypatch.setattr(calls, "import_cudart", lambda: Bindings(cudart))
    return library


@pytest.fixture
def built(tiny_llama: TinyLlama, library: Library, tmp_path: Path) -> Path:
    """A tiny Llama's bundle with engines."""
    folder = tmp_path / "bundle"
    shutil.copytree(tiny_llama.exact, folder)
    return with_plans(folder, library)


def with_plans(folder: Path, library: Library) -> Path:
    """Adds engines to a bundle."""
    (folder / PLANS_FOLDER).mkdir()
    for name in library.engines:
        (folder / plan_file(name)).write_bytes(name.encode())
    manifest = open_bundle(folder).manifest
    profiles = profiles_for(manifest.networks)
    engines = PlansInfo("tensorrt", library.__version__, ("8.9",), manifest.model.weights_sha256, profiles, 1.0)
    write_manifest(folder, replace(manifest, engines=engines))
    return folder


@pytest.mark.parametrize(
    "options",
    [{"mode": "full"}, {"mode": "exit"}, {"mode": "exit", "max_pending": 2}, {"mode": "lossless"}, {"logprobs": 1}],
    ids=str,
)
def test_engines_give_the_graph_s_tokens(
    graph: Engine, built: Path, cudart: FakeCudart, thresholds: list[float], options: dict[str, Any]
) -> None:
    options = options | ({"threshold": thresholds, "min_layers": 0} if options.get("mode") == "exit" else {})
    engine, before = load(built, provider="tensorrt", verify=False), cudart.calls("cudaGraphLaunch")
    assert engine.provider == "tensorrt"
    expected = alone(graph, **options)
    assert [facts(one) for one in alone(engine, **options)] == [facts(one) for one in expected]
    found = together(engine, **options)
    assert tokens_of(found) == tokens_of(expected)
    if options.get("mode") != "lossless":  # when drafts are verified depends on the others
        assert [exits(one) for one in found] == [exits(one) for one in expected]
    assert cudart.calls("cudaGraphLaunch") - before > 50, "runs are recorded and replayed"


def test_a_recorded_run_has_an_execution_context_of_its_own(
    built: Path, library: Library, thresholds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which lasts as long as the recording; with one for all runs of a profile, recordings are of changed contexts."""
    options = {"threshold": thresholds, "min_layers": 0}
    engine = load(built, provider="tensorrt", verify=False)
    alone(engine, **options)
    kept = sum(len(found.contexts) for found in library.engines.values())
    assert kept > len(library.engines) * 3
    del engine
    assert not any(found.contexts for found in library.engines.values())
    run = opening.TrtNetwork.run
    monkeypatch.setattr(
        opening.TrtNetwork,
        "run",
        lambda self, addresses, size, recording, captured: run(self, addresses, size, 0, captured),
    )
    engine = load(built, provider="tensorrt", verify=False)
    with pytest.raises(GenerationError, match="a recorded execution context was changed or destroyed"):
        alone(engine, **options)


def test_the_contexts_of_a_set_of_buffers_share_one_working_memory(
    built: Path, library: Library, thresholds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the size of the engine that needs most, whatever the number of networks, profiles and contexts; it is freed
    with the engine."""
    sizes: list[int] = []
    allocate = Bindings.cudaMalloc
    monkeypatch.setattr(Bindings, "cudaMalloc", lambda self, size: (sizes.append(size), allocate(self, size))[1])
    needs, before = {engine.device_memory_size_v2 for engine in library.engines.values()}, library.cudart.allocated
    engine = load(built, provider="tensorrt", verify=False)
    alone(engine, threshold=thresholds)
    together(engine, threshold=thresholds)
    assert len(needs) > 2
    assert sizes == [max(needs)] * 2, "one sequence alone and a batch run on streams of their own"
    contexts = [context for found in library.engines.values() for context in found.contexts]
    assert len(contexts) > 8
    assert len({context.memory for context in contexts}) == 2
    del engine, contexts
    assert library.cudart.allocated == before


def test_the_gpu_that_was_asked_for(graph: Engine, built: Path, cudart: FakeCudart) -> None:
    cudart.devices, cudart.only = 2, 1
    engine = load(built, provider="tensorrt", verify=False, device=1)
    assert tokens_of(alone(engine, PROMPTS[:2])) == tokens_of(alone(graph, PROMPTS[:2]))
    with pytest.raises(ProviderError, match="there is no GPU 2: CUDA finds 2, numbered from 0"):
        load(built, provider="tensorrt", verify=False, device=2)


@pytest.mark.parametrize("copying", ["segment_01", ""])
def test_a_plugin_that_does_not_work_in_place_is_told_once(
    built: Path, library: Library, compile_library: Callable[..., Path], caplog: pytest.LogCaptureFixture, copying: str
) -> None:
    manifest, library.copying = open_bundle(built).manifest, copying
    assert manifest.engines is not None
    engines = replace(manifest.engines, plugins=PluginsInfo(__version__, "0" * 64, ("segment_01",)))
    write_manifest(built, replace(manifest, engines=engines))
    engine = load(built, provider="tensorrt", verify=False, plugins=compile_library("ours"))
    caplog.clear()
    alone(engine, PROMPTS[:2])
    alone(engine, PROMPTS[:2])
    sentence = "TensorRT does not let the plugin in segment_01 update exit_states in place: a run over 1 sequences"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ([f"{sentence} copies 1000 bytes"] if copying else [])


def test_copies_that_the_builder_reported_are_told_again(built: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = open_bundle(built).manifest
    assert manifest.engines is not None
    write_manifest(built, replace(manifest, engines=replace(manifest.engines, copied={"segment_01": 8192})))
    load(built, provider="tensorrt", verify=False)
    sentence = "TensorRT copies buffers that segment_01 is to update in place: 8192 bytes in a run over one sequence"
    assert sentence in caplog.messages


@pytest.mark.parametrize(
    ("wrongly", "says"),
    [
        (lambda logits: logits * 1.01, None),  # as much as FP8 changes
        (lambda logits: logits * 1.5, r"off by \d"),
        (lambda logits: logits * np.nan, "off by nan"),
    ],
    ids=["as FP8 is", "wrong", "not finite"],
)
def test_plans_in_fp8_are_compared_with_the_graph(
    built: Path, library: Library, monkeypatch: pytest.MonkeyPatch, wrongly: Callable[[Any], Any], says: str | None
) -> None:
    def spoil(run: Any, tensors: Any) -> None:
        if "logits" in tensors:
            logits = tensors["logits"]
            logits[...] = wrongly(logits)

    library.networks.after = spoil
    monkeypatch.setattr(compare, "compute_capability", lambda: (8, 9))
    compare.check_fp8_plans(built, None)  # not FP8
    assert not library.networks.runs
    manifest = open_bundle(built).manifest
    write_manifest(built, replace(manifest, networks=replace(manifest.networks, matrices="fp8")))
    with nullcontext() if says is None else pytest.raises(BuildError, match=f"TensorRT 11.1 computes wrongly.*{says}"):
        compare.check_fp8_plans(built, None)
    assert library.networks.runs


def test_plans_in_fp8_that_no_gpu_here_runs_are_not_compared(
    built: Path, library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = open_bundle(built).manifest
    write_manifest(built, replace(manifest, networks=replace(manifest.networks, matrices="fp8")))
    for here in (None, (9, 0)):
        monkeypatch.setattr(compare, "compute_capability", lambda here=here: here)
        compare.check_fp8_plans(built, None)
        assert caplog.messages.pop() == (
            "the FP8 plans are not compared with the model, as no GPU here runs them; to do so: validate --provider "
            "tensorrt"
        )
    assert not library.networks.runs


def requests_of_a_trace(thresholds: list[float]) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of 1 to 39 tokens, for 4 to 39 more, in all modes and with several ways to choose tokens."""
    random, exits = np.random.default_rng(60), {"threshold": thresholds, "min_layers": 0, "max_pending": 4}
    kinds: list[dict[str, Any]] = [exits, exits, exits | {"temperature": 0.8, "top_k": 20}, exits | {"logprobs": 2}]
    kinds += [{"mode": "full"}, {"mode": "lossless", "threshold": thresholds}]
    return [
        (
            random.integers(0, len(TEXT), random.integers(1, 40)).tolist(),
            kinds[random.integers(len(kinds))]
            | {"max_new_tokens": int(random.integers(4, 40)), "seed": number, "stop_token_ids": []},
        )
        for number in range(80)
    ]


@pytest.mark.parametrize("budget", [None, 10])
def test_a_serving_trace_keeps_few_contexts_and_recordings(
    graph: Engine,
    tiny_llama: TinyLlama,
    library: Library,
    cudart: FakeCudart,
    thresholds: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget: int | None,
) -> None:
    """Of requests that come and go in eight slots. Without blocks of slots and contexts that recordings share there are
    93 recordings and 612 contexts."""
    if budget is not None:
        monkeypatch.setenv("TIDE_CUDA_GRAPHS", str(budget))
    info = open_bundle(tiny_llama.exact).manifest.networks
    assert info is not None
    wide = replace(info, **run_sizes(info.capacity, 16, 8)._asdict())
    library.build(wide)
    folder = with_plans(with_manifest(tiny_llama.exact, tmp_path, networks=wide), library)
    engine, requests = load(folder, provider="tensorrt", verify=False), requests_of_a_trace(thresholds)
    scheduler, random = engine.scheduler(SchedulerLimits(slots=8, prompt_tokens=40)), np.random.default_rng(61)
    handles, most, before = list[Any](), Counter[str](), (cudart.objects, cudart.allocated)
    while len(handles) < len(requests) or scheduler.running or scheduler.waiting:
        arriving = int(random.integers(1, 4)) if random.random() < 0.25 else 0
        handles += [scheduler.submit(ids, **options) for ids, options in requests[len(handles) :][:arriving]]
        scheduler.step()
        contexts = sum(len(found.contexts) for found in library.engines.values())
        most |= Counter(contexts=contexts, recordings=cudart.objects - before[0], bytes=cudart.allocated - before[1])
    print(f"budget {budget} MiB: {dict(most)}, {cudart.calls('cudaGraphLaunch')} launches")
    for handle, (ids, options) in list(zip(handles, requests, strict=True))[::8]:
        assert handle.result().tokens == graph.generate(ids, **options).tokens
    assert most["recordings"] < (80 if budget is None else 40)
    assert most["contexts"] < (120 if budget is None else 60)
