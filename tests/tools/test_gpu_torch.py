"""`tools/checks/gpu_torch.py`: the segment networks in PyTorch, called for by the runtime. A GPU is not needed for what
tensors are views of; streams, pools and recording are tried on one alone."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_engines import TinyLlama

from tide_export.bundle.network_spec import RunSize
from tide_export.bundle.opened import open_bundle
from tide_export.names.networks import segment_name
from tide_export.runtime.callers_networks import load_networks
from tide_export.runtime.engine import Engine, load
from tide_export.verify.pytorch.networks import _on_host


@pytest.fixture(scope="module")
def check() -> ModuleType:
    import gpu_torch

    return gpu_torch


def test_the_runtime_s_memory_is_what_the_networks_compute_on(check: ModuleType, tiny_llama: TinyLlama) -> None:
    bundle, viewed = open_bundle(tiny_llama.exact), []

    def view(address: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        viewed.append((dtype, shape))
        return _on_host(address, dtype, shape)

    networks = check.GpuNetworks(bundle, "cpu", view)
    engine = Engine(bundle, load_networks(bundle, {"verify": False}, "cpu", networks))
    for mode in ("full", "exit"):
        options = {"mode": mode, "max_new_tokens": 12, "stop_token_ids": []}
        expected = load(tiny_llama.exact, provider="cpu").generate([3, 5, 7], **options)
        found = engine.generate([3, 5, 7], **options)
        assert (found.tokens, found.stats.exit_layer) == (expected.tokens, expected.stats.exit_layer)
    assert networks.runs[segment_name(0)] > 12
    assert networks.recorded.total() == 0, "the host records nothing"
    assert {dtype for dtype, _ in viewed} >= {"float32", "int64", "int32"}


def test_a_run_is_on_the_runtime_s_stream_and_in_a_pool(
    check: ModuleType, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, entered = [], []

    class Within:
        def __init__(self, *given: object) -> None:
            self.given = given

        def __enter__(self) -> None:
            entered.append(self.given)
            inside.append(self)

        def __exit__(self, *_: object) -> None:
            inside.remove(self)

    for name in ("stream", "use_mem_pool"):
        monkeypatch.setattr(torch.cuda, name, Within, raising=False)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream: ("stream", stream), raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool", raising=False)
    networks = check.GpuNetworks(open_bundle(tiny_llama.exact), "cpu", _on_host)
    opened, ran = networks(77), []
    opened._networks["head"] = SimpleNamespace(run=lambda *given: ran.append((len(inside), *given)))
    assert opened.run("head", {"logits": 1}, RunSize(2), 0, False)
    assert opened.run("head", {"logits": 1}, RunSize(2), 1, True)
    assert ran == [(2, {"logits": 1}, RunSize(2))] * 2
    assert entered == [(("stream", 77),), ("pool",)] * 2
    assert not inside
    assert (networks.runs["head"], networks.recorded["head"]) == (2, 1)


def test_memory_on_a_gpu_is_told_to_pytorch_as_bytes(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def as_tensor(memory: object) -> torch.Tensor:
        told.append(memory.__cuda_array_interface__)
        return torch.zeros(told[-1]["shape"], dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    found = check.on_gpu(4096, "bfloat16", (2, 1, 3))
    assert (found.dtype, found.shape) == (torch.bfloat16, (2, 1, 3))
    assert told == [{"data": (4096, False), "shape": (12,), "typestr": "|u1", "version": 3}]


def test_a_session_in_which_nothing_was_recorded_fails(
    check: ModuleType, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As here, where the networks are given no GPU."""
    on_host, loaded = check.GpuNetworks, check.load_networks
    monkeypatch.setattr(check, "GpuNetworks", lambda bundle: on_host(bundle, "cpu", _on_host))
    monkeypatch.setattr(check, "load_networks", lambda *given: loaded(*given[:4]))
    few = ["--sequences", "1", "--new-tokens", "6", "--rounds", "1", "--threads", "1"]
    assert check.main([str(tiny_llama.exact), *few]) == 1
    assert "of which 0 were recorded as CUDA graphs" in capsys.readouterr().out
