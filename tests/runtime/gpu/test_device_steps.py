"""Steps whose depth a GPU decides, as one CUDA graph with switch nodes: tokens, exits and counts of steps that the host
decides, in every mode, alone and in lists; one launch and one wait a step; and where they cannot be made."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
import warned_once
from bundles import with_manifest
from caller_networks import CallersNetworks, Run, callers_engine
from fake_cudart import OLD, FakeCudart
from generations import PROMPTS, alone, facts, together
from judge import TEXT
from tiny_configs import CONTEXT
from tiny_engines import MAX_BATCH_SIZE, TinyLlama

from tide_export.bundle.opened import open_bundle
from tide_export.names import segment_networks as names
from tide_export.names.networks import HEAD
from tide_export.runtime.engine import Engine
from tide_export.thresholds.resolve import ALWAYS_EXIT, NEVER_EXIT

SLOT_TOKENS = 8  # of a run over several sequences: of three segments with three tokens pending before each no more
MODES: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "exit", "max_pending": 3},
    {"mode": "exit", "max_pending": 1},
    {"mode": "exit", "max_pending": 2, "temperature": 0.9, "seed": 4},
    {"mode": "exit", "max_pending": 0, "logprobs": 2},
    {"mode": "lossless", "max_pending": 2},
    {"mode": "lossless", "max_pending": 3, "temperature": 0.8, "seed": 5, "top_k": 30},
]


@pytest.fixture
def deciding(
    tiny_llama: TinyLlama, cudart: FakeCudart, tmp_path: Path
) -> Callable[[bool], tuple[Engine, CallersNetworks]]:
    """Opens an engine on the GPU, which decides or leaves that to the host."""

    def opens(gpu: bool) -> tuple[Engine, CallersNetworks]:
        cudart.driver = cudart.runtime = 13000 if gpu else OLD
        engine, networks = callers_engine(open_bundle(wide), cudart)
        engine.generate([5], max_new_tokens=1)
        return engine, networks

    info = open_bundle(tiny_llama.exact).manifest.networks
    assert info is not None
    wide = with_manifest(tiny_llama.exact, tmp_path, networks=replace(info, max_slot_tokens=SLOT_TOKENS))
    return opens


def given(mode: dict[str, Any], thresholds: list[float]) -> dict[str, Any]:
    return mode if mode["mode"] == "full" else mode | {"threshold": thresholds, "min_layers": 0}


def test_generations_are_those_that_the_host_decides(
    deciding: Callable[[bool], tuple[Engine, CallersNetworks]], cudart: FakeCudart, thresholds: list[float]
) -> None:
    """Tokens, exits and every count; in later rounds nearly all steps are recorded."""
    engines = [deciding(gpu)[0] for gpu in (False, True)]
    for mode in MODES:
        options = given(mode, thresholds)
        for _ in range(2):
            host, gpu = ([facts(one) for one in alone(engine, **options)] for engine in engines)
            assert gpu == host, mode
        for share in tiers.sized((0.4,), (1.0, 0.4, 0.0)):
            shared = options if mode["mode"] == "full" else options | {"compaction_threshold": share}
            host, gpu = ([facts(one) for one in together(engine, **shared)] for engine in engines)
            assert gpu == host, (mode, share)
    assert min(cudart.chosen, cudart.skipped) > 200, "tokens went on, and exited"


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_token_is_one_launch_and_one_wait(
    deciding: Callable[[bool], tuple[Engine, CallersNetworks]],
    cudart: FakeCudart,
    thresholds: list[float],
    mode: dict[str, Any],
) -> None:
    engine, networks = deciding(True)
    options = given(mode, thresholds)
    prompts = [[7], [5, 9], [3]]  # longer ones are run in larger runs than are recorded
    for generate in (lambda: alone(engine, prompts, **options), lambda: together(engine, prompts, **options)):
        for _ in range(4):
            generate()
        networks.runs.clear()
        counted = "cudaGraphLaunch", "cudaStreamSynchronize", "cudaMemcpyAsync"
        before = [cudart.calls(name) for name in counted]
        generate()
        launches, waits, copies = (cudart.calls(name) - then for name, then in zip(counted, before, strict=True))
        steps = sum(name == HEAD for name, _, _ in networks.runs)
        assert steps > 12
        if mode["mode"] == "lossless":  # where some steps verify more positions than a run of the head takes
            assert launches < 2 * steps
        else:
            assert launches == waits == steps, "every step is replayed"
            assert copies == 0, "and its copies with it"


def test_mode_full_copies_no_verdict(
    deciding: Callable[[bool], tuple[Engine, CallersNetworks]], cudart: FakeCudart
) -> None:
    """Eight bytes a token, of the most likely one, with or without steps in one launch; and no switch is passed."""
    for gpu in (True, False):
        engine, _ = deciding(gpu)
        for _ in range(3):
            before, chosen = cudart.downloaded, cudart.chosen + cudart.skipped
            made = engine.generate([5, 9], mode="full", max_new_tokens=12, stop_token_ids=[])
            fetched = cudart.downloaded - before
        assert cudart.chosen + cudart.skipped == chosen
        assert fetched <= len(made.tokens) * 2 * 256, "in two aligned rows"


def test_steps_of_several_sizes_and_places(
    deciding: Callable[[bool], tuple[Engine, CallersNetworks]], thresholds: list[float], cudart: FakeCudart
) -> None:
    """Of batches whose slots exit, wait, catch up, verify, and are left out of steps."""
    batches = [deciding(gpu)[0].start_batch(0.5, MAX_BATCH_SIZE) for gpu in (False, True)]
    for batch in batches:
        for slot in range(MAX_BATCH_SIZE):
            batch.join([thresholds, [ALWAYS_EXIT, ALWAYS_EXIT], [NEVER_EXIT, thresholds[1]]][slot], slot)
    random = np.random.default_rng(3)
    launches = cudart.calls("cudaGraphLaunch")
    for number in range(150):
        slots = sorted(random.permutation(MAX_BATCH_SIZE)[: random.integers(1, MAX_BATCH_SIZE + 1)].tolist())
        ids = {slot: random.integers(0, len(TEXT), random.choice([1, 1, 1, 2, 3])).tolist() for slot in slots}
        full = [slot for slot in slots if random.random() < 0.2]
        host, gpu = (batch.step(ids, full=full) for batch in batches)
        for slot in slots:
            shown = [
                (one[slot].exit_layer, one[slot].segments_run, len(one[slot].position_logits)) for one in (host, gpu)
            ]
            assert shown[0] == shown[1], (number, slot)
            np.testing.assert_allclose(gpu[slot].logits, host[slot].logits, atol=1e-5)
        if number % 40 == 39:
            for batch in batches:
                for sequence in batch.sequences.values():
                    sequence.rewind(1)
    assert cudart.calls("cudaGraphLaunch") - launches > 300


def test_the_end_of_the_buffers_is_left_to_the_host(
    deciding: Callable[[bool], tuple[Engine, CallersNetworks]], thresholds: list[float]
) -> None:
    """No run may write beyond them, recorded or not."""
    found = []
    for gpu in (False, True):
        state = deciding(gpu)[0].start(thresholds, 4)
        state.step([TEXT[i % len(TEXT)] for i in range(CONTEXT - 20)])
        found.append([(one.exit_layer, one.segments_run) for one in (state.step([token]) for token in TEXT[:20])])
    assert found[0] == found[1]


def test_recording_leaves_nothing_behind(
    deciding: Callable[[bool], tuple[Engine, CallersNetworks]], thresholds: list[float]
) -> None:
    """Its runs are over padding alone: the keys and values that they write are overwritten before they are read."""
    expected = [facts(one) for one in alone(deciding(False)[0], threshold=thresholds, min_layers=0)]
    engine, networks = deciding(True)
    spoiled = []

    def spoil(run: Run, tensors: Any) -> None:
        if names.THRESHOLDS not in tensors or run[2] != 1 or tensors[names.THRESHOLDS][0] < 2:
            return
        length, count = int(tensors[names.PAST_LENGTHS][0]), run[1]
        if tensors[names.LAST_TOKENS][0] == 0 and count > 1:  # of padding alone
            spoiled.append(run)
            for name, values in tensors.items():
                if name.startswith("present"):
                    values[0, :, length : length + count] = 1e3

    networks.after = spoil
    assert [facts(one) for one in alone(engine, threshold=thresholds, min_layers=0)] == expected
    assert spoiled


@pytest.mark.parametrize("function", ["cudaGraphAddNode", "cudaStreamBeginCaptureToGraph", "cudaLibraryLoadData"])
def test_a_cuda_that_cannot_leaves_it_to_the_host(
    graph: Engine, tiny_llama: TinyLlama, cudart_library: Path, function: str
) -> None:
    """With one warning; runs are recorded as before."""
    prompt = ",".join(map(str, TEXT[:5]))
    command = [sys.executable, warned_once.__file__, str(tiny_llama.exact), str(cudart_library), prompt, function]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = graph.generate(TEXT[:5], max_new_tokens=40, threshold=0.4, min_layers=0, stop_token_ids=[]).tokens
    assert done.stdout.splitlines() == [" ".join(map(str, expected))] * 2, done.stderr
    assert done.stderr == (
        "WARNING steps are not recorded as one CUDA graph each, which makes decoding slower: CUDA failed "
        f"({function}): injected\n"
    )


def test_the_environment_can_leave_it_to_the_host(
    deciding: Callable[[bool], tuple[Engine, CallersNetworks]],
    thresholds: list[float],
    cudart: FakeCudart,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIDE_HOST_DECIDES", "1")
    engine, before = deciding(True)[0], cudart.calls("cudaGraphAddNode")
    for _ in range(2):
        alone(engine, threshold=thresholds, min_layers=0)
    assert cudart.calls("cudaGraphAddNode") == before


def test_work_of_a_step_is_of_the_states_it_has_then(
    deciding: Callable[[bool], tuple[Engine, CallersNetworks]], thresholds: list[float]
) -> None:
    """Thresholds and limits of a sequence are data of a recorded step: they may change."""
    host, gpu = (deciding(kind)[0] for kind in (False, True))
    for _ in range(2):
        for share, pending in product((0.0, 0.5, 1.0), (0, 4)):
            options = {"threshold": [share, thresholds[1]], "min_layers": 0, "max_pending": pending}
            assert [facts(one) for one in alone(gpu, PROMPTS[:2], **options)] == [
                facts(one) for one in alone(host, PROMPTS[:2], **options)
            ]
