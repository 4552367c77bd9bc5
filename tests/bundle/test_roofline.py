"""Predictions for a GPU: on a bundle of weights that are counted by hand, and on the demo model's networks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from bundles import make_manifest, with_manifest
from command_line import refused
from onnx import TensorProto, helper
from tiny_engines import TinyLlama

from tide_export.bundle.file_names import (
    GRAPH_FILE,
    PLANS_FOLDER,
    SEGMENTS_FOLDER,
    SEGMENTS_WEIGHTS_FILE,
    network_file,
    plan_file,
)
from tide_export.bundle.gpu_bandwidth import GPUS, bandwidth_of
from tide_export.bundle.inspect import describe, render
from tide_export.bundle.kv_buffers import default_context, kv_buffers
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.network_weights import SHARED, held_size, network_weights, parse_network, repeated_size
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.plan_fields import BuiltPlan, NetworksInfo, PlansInfo, Profile
from tide_export.bundle.roofline import HOSTS, Roofline, break_even, predict
from tide_export.bundle.store import write_manifest, writing_bundle
from tide_export.cli.main import main
from tide_export.errors import BundleError, ConfigError
from tide_export.names.networks import AFTER_SEGMENTS, segment_name

SEGMENTS = [segment_name(k) for k in range(3)]
EMBEDDING = (0, 1024)  # offset and bytes of 32 tokens' 16 numbers of float16
INFO = NetworksInfo("fp16", 256, 512, 32, 16, 16, 1, 16)


def network(*nodes: onnx.NodeProto, **weights: tuple[int, int, int]) -> bytes:
    """A network that holds weights by offset, bytes and rank."""
    tensors = []
    for name, (offset, length, rank) in weights.items():
        tensor = TensorProto(name=name, dims=[1] * rank, data_type=TensorProto.FLOAT16)
        for key, value in (("location", SEGMENTS_WEIGHTS_FILE), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
    graph = helper.make_graph(
        nodes, "part", [], [], [*tensors, helper.make_tensor("axis", TensorProto.INT64, [1], [1])]
    )
    return helper.make_model(graph).SerializeToString()


def matmul(weight: str) -> onnx.NodeProto:
    return helper.make_node("MatMul", ["x", weight], ["y"])


def parts() -> dict[str, bytes]:
    """Segments of one layer each, of one to three million bytes, and a head that holds the embedding again."""
    attention = helper.make_node("Attention", ["q", "k", "v", "mask"], ["attended"])
    lookup = helper.make_node("Gather", ["embedding", "input_ids"], ["x"])
    return {
        "segment_00": network(lookup, attention, matmul("w"), embedding=(*EMBEDDING, 2), w=(1024, 1_000_000, 2)),
        "segment_01": network(attention, matmul("w"), w=(1_001_024, 2_000_000, 2)),
        "segment_02": network(attention, matmul("w"), w=(3_001_024, 3_000_000, 2)),
        "head": network(matmul("embedding"), embedding=(*EMBEDDING, 2)),
        "best": network(helper.make_node("Where", ["is_best", "ids", "none"], ["y"]), ids=(6_001_024, 128, 1)),
        "candidates": network(),
    }


def tiny(folder: Path, manifest: Manifest | None = None, **other_parts: bytes) -> Path:
    """A bundle of those networks."""
    manifest = manifest or tiny_manifest()
    with writing_bundle(folder / "tiny", overwrite=True) as path:
        (path / GRAPH_FILE).write_bytes(b"graph")
        (path / SEGMENTS_FOLDER).mkdir()
        (path / PLANS_FOLDER).mkdir()
        for name, content in (parts() | other_parts).items():
            (path / network_file(name)).write_bytes(content)
            if manifest.engines is not None:
                (path / plan_file(name)).write_bytes(b"engine")
        write_manifest(path, manifest)
    return folder / "tiny"


def tiny_manifest(**changes: object) -> Manifest:
    changed = {"thresholds": (0.5, 0.5), "min_layers": 1, "networks": INFO, **changes}
    return replace(make_manifest(), targets=("onnxruntime", "tensorrt"), **changed)


def line_of(bundle: Path, gpu: str = "1GB/s", context: int | None = 100) -> Roofline:
    return predict(open_bundle(bundle), gpu, context)


def test_bytes_are_those_counted_by_hand(tmp_path: Path) -> None:
    line = line_of(tiny(tmp_path))
    segments, head = line.networks[:-1], line.networks[-1]
    assert [network.weights_read for network in line.networks] == [1_000_000, 2_000_000, 3_000_000, 1024 + 128]
    # Keys and values, 8 numbers a token and layer of 2 bytes; 256 rows, of which 100 are used and 128 are in blocks.
    assert {network.kv for network in segments} == {segments[0].kv}
    assert (segments[0].kv.held, segments[0].kv.copied, segments[0].kv.read) == (8192, 8192, 4096)
    assert segments[0].moved == 1_000_000 + 2 * 8192 + 4096
    assert (head.kv.held, [network.waits for network in line.networks]) == (0, [1, 1, 0, 1])


def test_times_are_those_computed_by_hand(tmp_path: Path) -> None:
    """At 80 % of 1 GB/s a byte takes 1.25 ns."""
    line = line_of(tiny(tmp_path))
    full, deep, first, _ = line.paths
    gpu = [1275.6, 2525.6, 3775.6, 1.44]
    assert full.microseconds["C++"] == pytest.approx((sum(gpu) + 15, sum(gpu) + 25))
    assert deep.microseconds["C++"] == pytest.approx((sum(gpu) + 3 * 15, sum(gpu) + 3 * 25))
    assert deep.microseconds["Python"] == pytest.approx((sum(gpu) + 3 * 50, sum(gpu) + 3 * 100))
    assert deep.microseconds["conditional graph"] == pytest.approx((sum(gpu) + 15 + 2 * 2, sum(gpu) + 25 + 2 * 5))
    assert first.microseconds["C++"] == pytest.approx((1275.6 + 1.44 + 2 * 15, 1275.6 + 1.44 + 2 * 25))
    assert [(path.launches, path.waits) for path in line.paths] == [(4, 1), (4, 3), (2, 2), (3, 3)]
    assert line.break_even[0].exit_rate["C++"] == pytest.approx((30 / (2525.6 + 3775.6 + 15), 50 / (6301.2 + 25)))
    assert [entry.checkpoint for entry in line.break_even] == [1, 2]


def test_at_the_rate_of_breaking_even_both_modes_take_as_long() -> None:
    rate = break_even(full=100.0, deep=120.0, left=40.0)
    assert rate == 0.25
    assert rate * 40.0 + (1 - rate) * 120.0 == 100.0
    assert break_even(full=100.0, deep=120.0, left=100.0) is None


def test_more_bandwidth_helps_full_depth_most(tmp_path: Path) -> None:
    bundle = tiny(tmp_path)
    lines = [line_of(bundle, f"{speed}GB/s") for speed in (1, 10, 100)]
    for host in (host.name for host in HOSTS):
        times = [[path.microseconds[host][0] for path in line.paths] for line in lines]
        assert times == sorted(times, reverse=True)
        rates = [line.break_even[0].exit_rate[host][0] for line in lines]
        assert rates == sorted(rate for rate in rates if rate is not None)
    assert [line.break_even[1].exit_rate["Python"] for line in lines][-1] == (None, None)
    assert "never" in lines[-1].render()


def test_times_grow_with_the_context_and_with_the_hosts_cost(tmp_path: Path) -> None:
    bundle = tiny(tmp_path)
    reads = [line_of(bundle, context=context).paths[0].microseconds["C++"] for context in (1, 64, 65, 256)]
    assert reads[0] == reads[1] < reads[2] < reads[3]
    for path in line_of(bundle).paths:
        python, native, graph = (path.microseconds[host.name] for host in HOSTS)
        assert graph <= native < python
        assert all(low < high for low, high in (python, native, graph))
    early, late = (entry.exit_rate for entry in line_of(bundle).break_even)
    assert all(early[host.name] < late[host.name] for host in HOSTS)


def test_attention_that_is_not_fused_reads_all_rows(tmp_path: Path) -> None:
    spelled_out = tiny(tmp_path, segment_01=network(matmul("w"), w=(1_001_024, 2_000_000, 2)))
    assert [network.kv.read for network in line_of(spelled_out).networks] == [4096, 8192, 4096, 0]
    float32 = tiny(tmp_path, tiny_manifest(networks=replace(INFO, weights="fp32")))
    assert [network.kv.read for network in line_of(float32).networks] == [16384, 16384, 16384, 0]


def test_the_builders_own_figures_are_taken(tmp_path: Path) -> None:
    """Without the embedding, of which a token reads a row."""
    built = {name: BuiltPlan(5_000_000, 0, 40, 1, 1) for name in SEGMENTS}
    built |= {name: BuiltPlan(2_000, 0, 4, 0, 0) for name in AFTER_SEGMENTS}
    profile = Profile("decode", 1, 1, 2, 1)
    engines = PlansInfo("tensorrt", "11.1", ("9.0",), "ab" * 32, (profile,), 1.0, None, built)
    line = line_of(tiny(tmp_path, tiny_manifest(engines=engines)))
    assert [network.weights_read for network in line.networks] == [5_000_000 - 1024, 5_000_000, 5_000_000, 4_000]
    assert "the builder reported" in line.render()
    assert "the networks hold" in line_of(tiny(tmp_path)).render()


def test_only_checkpoints_where_tokens_may_exit_are_waited_for(tmp_path: Path) -> None:
    line = line_of(tiny(tmp_path, tiny_manifest(min_layers=2)))
    assert [(path.launches, path.waits) for path in line.paths] == [(4, 1), (4, 2), (3, 2)]
    line = line_of(tiny(tmp_path, tiny_manifest(thresholds=(1.0, 1.0))))
    assert [path.token for path in line.paths] == ["full depth, mode full"]
    assert "no checkpoint may exit" in line.render()


def test_layers_that_share_keys_hold_and_copy_them_once() -> None:
    model = replace(make_manifest().model, kv_shapes=((1, 8),) * 3, kv_layers=(0, 0, 0))
    manifest = tiny_manifest(model=model)
    both, last = (kv_buffers(manifest, layers, 256, True) for layers in (range(2), range(2, 3)))
    assert (both.held, both.copied, both.read) == (8192, 8192, 2 * 8192)
    assert (last.held, last.copied, last.read) == (0, 8192, 8192)


def test_every_attention_of_a_layer_has_its_keys() -> None:
    model = replace(make_manifest().model, kv_shapes=((1, 8),) * 3 + ((0, 0), (2, 8), (1, 8)), kv_layers=None)
    manifest = tiny_manifest(model=model)
    assert model.kv_read(range(1, 3)) == [1, 2, 4, 5]
    assert manifest.kv_token_bytes == 2 * 4 * 8 * (1 + 1 + 1 + 2 + 1)
    first, second = (kv_buffers(manifest, range(layer, layer + 1), 256, True) for layer in range(2))
    assert (first.held, first.copied, first.read) == (8192, 8192, 8192)
    assert (second.held, second.copied, second.read) == (3 * 8192, 3 * 8192, 3 * 8192)


def test_inspect_says_what_is_held_copied_and_read(tmp_path: Path) -> None:
    shown = render(describe(tiny(tmp_path)))
    assert (
        "24.6 kB on the GPU for each sequence, however short; a token at full depth copies 24.6 kB and reads" in shown
    )
    assert "reads 12.3 kB of it at 128 tokens" in shown
    assert "6.0 MB of weights, 1.0 kB of them copies" in shown
    assert [default_context(capacity) for capacity in (1, 3, 2048, 8192)] == [1, 1, 1024, 1024]


def test_the_command_prints_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bundle = str(tiny(tmp_path))
    assert main(["inspect", bundle, "--roofline", "rtx 4090"]) == 0
    text = capsys.readouterr().out
    for said in (
        "RTX-4090, 1.008 TB/s",
        "128 of 256 tokens",
        "none is measured",
        "80 %",
        "15-25 us from C++",
        "50-100",
    ):
        assert said in text
    assert text.count("predict") >= 4
    assert main(["inspect", bundle, "--roofline", "1GB/s", "--context", "100", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["prediction"], answer["bytes_per_second"], answer["context"]) == (True, 1e9, 100)
    assert answer["paths"][0]["microseconds"]["C++"] == pytest.approx([7593.24, 7603.24])
    assert answer["assumed"]["microseconds_per_checkpoint"]["conditional graph"] == [2.0, 5.0]


def test_the_table_of_gpus_is_found_however_it_is_written() -> None:
    for name, bandwidth in GPUS.items():
        assert bandwidth_of(name.lower().replace("-", " ")) == (name, bandwidth)
    assert bandwidth_of("900 gb/s") == ("a GPU", 9e11)
    for unknown in ("", "H100", "0TB/s", "1.2", "-1TB/s", "1" * 9 + "TB/s"):
        with pytest.raises(ConfigError, match=r"no GPU is known as .*: give B200, H200, .*, or a bandwidth such as"):
            bandwidth_of(unknown)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--roofline", "abacus"], "no GPU is known as 'abacus'"),
        (["--roofline", "L4", "--context", "257"], "context must be a whole number from 1 to 256, not 257"),
        (["--roofline", "L4", "--context", "0"], "context must be a whole number from 1 to 256, not 0"),
        (["--context", "1"], "--context is for --roofline"),
        (["--roofline", "L4", "--trtexec"], "--roofline prints no commands"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, options: list[str], says: str) -> None:
    assert says in refused(capsys, "inspect", tiny(tmp_path), *options)


def test_bundles_without_networks_with_experts_or_damaged_are_refused(tmp_path: Path, tiny_llama: TinyLlama) -> None:
    with pytest.raises(BundleError, match="holds no segment networks: export it with --target cuda"):
        line_of(with_manifest(tiny_llama.exact, tmp_path, networks=None))
    choice = helper.make_node("Gather", ["experts", "chosen"], ["matrices"])
    with pytest.raises(BundleError, match="has experts, and of how many a token reads the weights is not known"):
        line_of(tiny(tmp_path, segment_01=network(choice, experts=(0, 9, 3))))
    for damaged in (b"no network", parts()["head"][:-3], b"\x3a\xff"):
        with pytest.raises(BundleError, match=r"head.onnx' is no ONNX network; export the bundle again"):
            line_of(tiny(tmp_path, head=damaged))


@pytest.fixture(params=["inspect", "roofline"])
def reader(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    return {"inspect": describe, "roofline": lambda path: predict(open_bundle(path), "L4")}[request.param]


def test_real_networks_are_read_as_onnx_reads_them(demo_bundle: Path, reader: Callable[[Path], object]) -> None:
    assert reader(demo_bundle)
    bundle = open_bundle(demo_bundle, verify=False)
    networks = network_weights(bundle)
    places, total = set(), 0
    for name, found in networks.items():
        graph = onnx.load(str(demo_bundle / network_file(name)), load_external_data=False).graph
        stored = [{entry.key: entry.value for entry in tensor.external_data} for tensor in graph.initializer]
        stored = [(int(entry["offset"]), int(entry["length"])) for entry in stored if entry]
        own = [weight for weight in found.weights if weight.offset != SHARED]
        assert sorted(stored) == sorted((weight.offset, weight.size) for weight in own), name
        assert found.attentions == sum(node.op_type == "Attention" for node in graph.node)
        places |= set(stored)
        total += sum(size for _, size in stored)
    assert repeated_size(networks) == total - sum(size for _, size in places)
    embedding = 4096 * 128 * 4  # float32, of the demo model, whose head is tied to it
    assert networks["head"].size == networks["head"].shared_size == networks["segment_00"].shared_size == embedding
    assert held_size(networks) == total + embedding, "which lies there once"
    tables = [weight.size for weight in networks["segment_00"].weights if weight.is_table]
    assert embedding in tables
    assert repeated_size(networks) < embedding
    assert parse_network(b"").weights == ()
