"""Prompts decoded in one batch against one by one: equal, not equal, undecided, and not in the bundle at all."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundles import with_manifest
from caller_networks import CallersNetworks, Run, callers_engine

from tide_export.bundle.file_names import ROUTERS_FILE
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.cli.main import main
from tide_export.model.source import SourceModel, load_model
from tide_export.names import batch_networks as names
from tide_export.names.networks import HEAD
from tide_export.routers.router_set import RouterSet
from tide_export.runtime.engine import Engine, load, open_engine
from tide_export.thresholds.resolve import NEVER_EXIT
from tide_export.verify import validate as validating
from tide_export.verify.batch_parity import BatchCheck, check_batch
from tide_export.verify.parity import TOLERANCES, Check, EngineUnderTest, Generated, Tolerance

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "demo" / "demo-llama")
TEXT = str(ROOT / "tide_export" / "*.py")
NEW_TOKENS, PENDING, THRESHOLDS = 6, 4, [0.5, 0.7, NEVER_EXIT]


@pytest.fixture(scope="module")
def bundle(demo_bundle: Path) -> Bundle:
    return open_bundle(demo_bundle, verify=False)


@pytest.fixture(scope="module")
def graph(demo_bundle: Path) -> Engine:
    return load(demo_bundle, provider="cpu", threads=1, verify=False)


@pytest.fixture(scope="module")
def networks(bundle: Bundle) -> Engine:
    return open_engine(bundle, "cpu-networks", threads=1)


@pytest.fixture(scope="module")
def callers(bundle: Bundle) -> tuple[Engine, CallersNetworks]:
    return callers_engine(bundle)


@pytest.fixture(scope="module")
def source() -> SourceModel:
    return load_model(MODEL)


@pytest.fixture(scope="module")
def routers(bundle: Bundle) -> RouterSet:
    return RouterSet.load(bundle.file(ROUTERS_FILE).path)


@pytest.fixture(scope="module")
def prompts(demo_text_ids: list[int]) -> list[list[int]]:
    return [demo_text_ids[50 * number : 50 * number + length] for number, length in enumerate((1, 3, 7, 7, 20, 40))]


def one_by_one(engine: Engine, prompts: list[list[int]], tolerance: Tolerance) -> dict[str, Check]:
    exits = {"threshold": [min(t, 1.0) for t in THRESHOLDS], "min_layers": 0}
    checks = {}
    for name, mode, given in (("full", "full", {}), ("exit at 0.5", "exit", exits), ("lossless", "lossless", {})):
        check = checks[name] = Check(name, mode, THRESHOLDS, tolerance)
        for prompt in prompts:
            out = engine.generate(prompt, max_new_tokens=NEW_TOKENS, mode=mode, stop_token_ids=[], **given)
            check.generated.append(Generated(out.tokens, out.stats.exit_layer, 0))
    return checks


@pytest.fixture(scope="module")
def alone(graph: Engine, prompts: list[list[int]]) -> dict[str, Check]:
    return one_by_one(graph, prompts, Tolerance(1e-4, 1e-3))


@pytest.fixture(params=["graph", "segments"])
def engine(request, graph: Engine, networks: Engine) -> Engine:
    return graph if request.param == "graph" else networks


def rolled(run: Run, tensors: Mapping[str, np.ndarray]) -> None:
    """Sequences are given each other's logits."""
    name, tokens, _ = run
    if name == HEAD and tokens > 1:
        tensors[names.LOGITS][...] = np.roll(tensors[names.LOGITS], 1, axis=1)


@pytest.fixture
def neighbours(callers: tuple[Engine, CallersNetworks]) -> Iterator[Engine]:
    engine, networks = callers
    networks.after = rolled
    yield engine
    networks.after = lambda run, tensors: None


def test_equal_tokens_need_no_reference(engine: Engine, prompts, alone) -> None:
    done: list[float] = []
    found = check_batch(engine, None, None, prompts, alone, PENDING, advance=done.append)
    assert found.holds
    assert (found.prompts, [check.tokens for check in found.checks], done) == (4, [4 * NEW_TOKENS] * 3, [1, 1, 1])
    tokens = 12 * NEW_TOKENS
    said = f"4 prompts in a batch (full, exit at 0.5, lossless): all {tokens} tokens equal those of one by one"
    assert found.lines() == [said]


@pytest.mark.parametrize("mode", ["full", "exit at 0.5", "lossless"])
def test_a_neighbour_s_logits_are_found_out(neighbours: Engine, source, routers, prompts, alone, mode: str) -> None:
    found = check_batch(neighbours, source, routers, prompts, {mode: alone[mode]}, PENDING, "segments")
    (check,) = found.checks
    assert not found.holds
    assert 0 < check.wrong <= check.tokens == 4 * NEW_TOKENS
    first, *others = found.lines()
    assert first.startswith(f"segments, 4 prompts in a batch ({check.name}): ")
    assert f"({check.wrong} wrong, {check.within_tolerance} within tolerance)" in first
    assert others
    assert all("new token" in line for line in others)
    assert found.as_dict()["checks"][0]["wrong"] == check.wrong


def test_another_layer_is_another_answer(graph: Engine, source, routers, prompts, alone) -> None:
    exits = alone["exit at 0.5"]
    full = replace(exits, thresholds=[NEVER_EXIT] * 3, differences=[])
    assert {layer for one in exits.generated for layer in one.exit_layers} > {12}
    found = check_batch(graph, source, routers, prompts, {"exit at 0.5": full}, PENDING)
    assert found.holds, "what differs from one by one is held to the reference at the thresholds it ran with"
    ran = replace(exits, generated=[replace(one, exit_layers=[12] * NEW_TOKENS) for one in exits.generated])
    assert check_batch(graph, source, routers, prompts, {"exit at 0.5": ran}, PENDING).holds


def test_where_the_reference_is_undecided_it_is_within_tolerance(
    neighbours: Engine, graph: Engine, source, routers, prompts
) -> None:
    alone = one_by_one(graph, prompts, Tolerance(1e4, 1e-3))
    found = check_batch(neighbours, source, routers, prompts, {"full": alone["full"]}, PENDING)
    (check,) = found.checks
    assert found.holds
    assert check.within_tolerance
    assert f"(0 wrong, {check.within_tolerance} within tolerance)" in found.lines()[0]


def test_what_a_bundle_does_not_hold_is_said(
    demo_bundle: Path, graph: Engine, networks: Engine, prompts, alone, tmp_path: Path
) -> None:
    info = networks.manifest.networks
    assert info is not None
    lone = with_manifest(demo_bundle, tmp_path, networks=replace(info, max_batch_size=1))
    engine = open_engine(open_bundle(lone), "cpu-networks", threads=1)
    assert engine.max_batch_size == 1
    done: list[float] = []
    found = check_batch(engine, None, None, prompts, alone, PENDING, "segments", done.append)
    assert (found.holds, found.checks, sum(done)) == (True, [], 3)
    assert found.lines() == [
        "segments, several prompts in a batch: not in this bundle, which takes one at a time (its export said why, "
        "or --batch-size 1 was given)"
    ]
    assert (graph.max_batch_size, networks.max_batch_size) == (1024, 8)
    lonely = check_batch(graph, None, None, prompts[:1], alone, PENDING)
    assert lonely.lines() == ["several prompts in a batch: not compared, there is one prompt"]
    assert lonely == BatchCheck("", 0, [], "not compared, there is one prompt")


def test_the_command_s_exit_code_is_1(demo_bundle: Path, neighbours: Engine, capsys, monkeypatch) -> None:
    monkeypatch.setattr(validating, "graph_engines", lambda *_: [EngineUnderTest("", neighbours, TOLERANCES["fp32"])])
    small = ["--prompts", "2", "--new-tokens", "3", "--threshold", "0.5", "--provider", "cpu"]
    assert main(["validate", str(demo_bundle), "--model", MODEL, "--dataset", TEXT, *small]) == 1
    said = capsys.readouterr().out
    assert "2 prompts in a batch (full, exit at " in said
    assert "DOES NOT HOLD" in said
