"""`runtime.tensorrt.engines` on stand-ins for TensorRT, whose engines run in ONNX Runtime, and for the CUDA runtime:
loaded, checked and run as on a GPU. The stand-in refuses what TensorRT refuses, and overwrites its working memory."""

import ctypes
import shutil
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_prompts import TEXT
from fake_cudart import FakeCudart

from tide_export import names
from tide_export.bundle.engine_fields import EnginesInfo, Profile
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.profiles import profiles_for, with_batch_size
from tide_export.bundle.store import write_manifest
from tide_export.runtime.engine import Engine
from tide_export.runtime.network_spec import BATCH, TENSORRT_TYPES, TOKENS, NetworkSpec, of_network, specs
from tide_export.runtime.tensorrt import engines as opening

SLOTS = 3
DTYPES = {dtype: name for name, dtype in TENSORRT_TYPES.items()}


class Context:
    """An execution context."""

    def __init__(self, engine: "FoundEngine", fake: FakeCudart) -> None:
        self.engine, self.fake = engine, fake
        self.memory: tuple[int, int] | None = None
        self.profile: Profile | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.last: tuple[int, int] | None = None

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = address, size

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = self.engine.profiles[profile]
        return True

    def set_input_shape(self, name: str, dims: tuple[int, ...]) -> bool:
        assert self.profile is not None
        most = {TOKENS: self.profile.max_tokens, BATCH: self.profile.batch_size}
        shape = self.engine.spec.inputs[name].shape
        self.shapes[name] = dims
        return all(
            1 <= given <= most[size] if isinstance(size, str) else given == size
            for given, size in zip(dims, shape, strict=True)
        )

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address % 256 == 0

    def execute_async_v3(self, stream: int) -> bool:
        spec, sizes = self.engine.spec, {TOKENS: 1, BATCH: 1}
        for name, tensor in spec.inputs.items():
            sizes |= {size: dim for size, dim in zip(tensor.shape, self.shapes[name], strict=True) if size in sizes}
        run = sizes[TOKENS], sizes[BATCH]
        assert all(tensor.dims(*run) == self.shapes[name] for name, tensor in spec.inputs.items())
        if self.fake.capture is not None and self.last != run:
            return False
        if self.memory is None or self.memory[1] < self.engine.device_memory_size_v2:
            return False
        (address, size), addresses, self.last = self.memory, dict(self.addresses), run

        def work() -> None:
            ctypes.memset(address, 0xFF, size)
            self.engine.network.run(addresses, *run)

        self.fake.enqueue(work)
        return addresses.keys() == {*spec.inputs, *spec.outputs}


class FoundEngine:
    """An engine of a network, which runs in ONNX Runtime."""

    def __init__(self, library: "Library", spec: NetworkSpec, profiles: tuple[Profile, ...], network: Any) -> None:
        self.library, self.spec, self.profiles, self.network = library, spec, profiles, network
        self.described = {**spec.inputs, **spec.outputs}
        self.tensors = [*((name, "INPUT") for name in spec.inputs), *((name, "OUTPUT") for name in spec.outputs)]
        self.num_io_tensors, self.num_optimization_profiles = len(self.tensors), len(profiles)
        self.device_memory_size_v2 = 100_000 + 1000 * len(spec.inputs)
        self.contexts: list[Context] = []

    def get_tensor_name(self, index: int) -> str:
        return self.tensors[index][0]

    def get_tensor_mode(self, name: str) -> Any:
        return SimpleNamespace(name=dict(self.tensors)[name])

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=DTYPES[self.described[name].dtype])

    def get_tensor_shape(self, name: str) -> list[int]:
        return [-1 if isinstance(dim, str) else dim for dim in self.described[name].shape]

    def get_aliased_input_tensor(self, name: str) -> None:
        return None

    def get_tensor_profile_shape(self, name: str, number: int) -> list[tuple[int, ...]]:
        profile = self.profiles[number]
        return [self.spec.inputs[name].dims(profile.max_tokens, profile.batch_size)] * 3

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(strategy=None)
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(config, "strategy", strategy)
        return config

    def create_execution_context(self, config: Any) -> Context | None:
        if config.strategy != self.library.ExecutionContextAllocationStrategy.USER_MANAGED:
            return None
        self.contexts.append(Context(self, self.library.fake))
        return self.contexts[-1]


class Library:
    """What the package `tensorrt` has, as far as it is used."""

    __version__ = "11.1"

    class ILogger:
        class Severity(Enum):
            INTERNAL_ERROR, ERROR = range(2)

    class ExecutionContextAllocationStrategy(Enum):
        STATIC, USER_MANAGED = range(2)

    def __init__(self, fake: FakeCudart, networks: Engine, info: Any) -> None:
        self.fake, self.engines = fake, dict[str, FoundEngine]()
        _, sessions = networks.backend._open_device()
        for name, spec in specs(networks.manifest, info).items():
            profiles = of_network(name, profiles_for(info), info)
            self.engines[name] = FoundEngine(self, spec, profiles, sessions[name])

    def Runtime(self, log: Any) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda data: self.engines[bytes(data).decode()])


@pytest.fixture
def library(engines, fake: FakeCudart) -> Library:
    _, networks, _ = engines
    return Library(fake, networks, with_batch_size(networks.manifest.networks, SLOTS))


@pytest.fixture
def on_engines(engines, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A tiny Llama's engines."""
    _, networks, _ = engines
    folder = tmp_path / "bundle"
    shutil.copytree(networks.bundle.path, folder)
    (folder / names.ENGINES_FOLDER).mkdir()
    for name in library.engines:
        (folder / names.engine_file(name)).write_bytes(name.encode())
    info, manifest = with_batch_size(networks.manifest.networks, SLOTS), networks.manifest
    built = EnginesInfo("tensorrt", "11.1", ("8.9",), manifest.model.weights_sha256, profiles_for(info), 1.0)
    write_manifest(folder, replace(manifest, networks=info, engines=built))
    monkeypatch.setattr(opening, "import_library", lambda flavour: library)
    monkeypatch.setattr(opening, "compute_capability", lambda gpu=0: (8, 9))
    bundle = open_bundle(folder, verify=False)
    return Engine(bundle, opening.open_engines(bundle, "tensorrt"))


@pytest.mark.parametrize(
    "options",
    [{"mode": "full"}, {"mode": "exit"}, {"mode": "exit", "max_pending": 2}, {"mode": "lossless"}, {"logprobs": 1}],
    ids=str,
)
def test_engines_give_the_graph_s_tokens(engines, on_engines: Engine, fake: FakeCudart, options) -> None:
    graph, _, thresholds = engines
    options = options | ({"threshold": thresholds} if options.get("mode") == "exit" else {})
    prompts = [TEXT[:1], TEXT[3:40], TEXT[20:26]]
    for prompt in [*prompts, prompts]:
        expected, found = (one.generate(prompt, max_new_tokens=25, **options) for one in (graph, on_engines))
        for theirs, ours in zip(*([one] if prompt is not prompts else one for one in (expected, found)), strict=True):
            assert ours.tokens == theirs.tokens
            if prompt is not prompts:  # in a batch a token may be caught up with others, sooner
                assert ours.stats.exit_layer == theirs.stats.exit_layer
    assert fake.launches > 20, "runs are recorded and replayed"


def test_the_contexts_of_a_set_of_buffers_share_one_working_memory(
    engines, on_engines: Engine, library: Library, fake: FakeCudart
) -> None:
    """Of the size of the engine that needs most, whatever the number of networks, profiles and contexts."""
    _, _, thresholds = engines
    needs = {engine.device_memory_size_v2 for engine in library.engines.values()}
    assert len(needs) > 2

    def allocated() -> list[int]:
        return [len(block) - 256 for block in fake.blocks.values() if len(block) - 256 in needs]

    on_engines.generate(TEXT[:30], max_new_tokens=12, threshold=thresholds)
    assert allocated() == [max(needs)]
    on_engines.generate([TEXT[:30], TEXT[4:9]], max_new_tokens=12, threshold=thresholds)
    assert allocated() == [max(needs)] * 2, "one sequence alone and a batch run on streams of their own"
    contexts = [context for engine in library.engines.values() for context in engine.contexts]
    assert len(contexts) > 8
    assert len({context.memory for context in contexts}) == 2
    assert {context.memory[1] for context in contexts if context.memory is not None} == {max(needs)}
