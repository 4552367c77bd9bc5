"""The attention operators: random ragged runs are as the functions define them, an output depends on nothing else in a
run with any instruction set, pages are written in place, and what is refused."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from fuzz.settings import cases
from hypothesis import given
from hypothesis import strategies as st
from paged_attention_numpy import Arrays, int8_rows
from paged_runs import Node, Text, defined, inputs_of, one_by_one, run, session, texts

from tide_export.lower.onnxruntime.paged_attention import Form
from tide_export.verify.int8_kv import round_to_int8

SETS = ("avx512", "avx2", "baseline")
LARGEST = 140  # new tokens of a random run: the function reads all pages for each


@pytest.fixture
def library(request: pytest.FixtureRequest, kernels: Path) -> Iterator[Path]:
    """Operators that use an instruction set."""
    use = ctypes.CDLL(str(kernels)).use_attention
    if use(request.param.encode()):
        pytest.skip(f"this CPU has no {request.param}")
    yield kernels
    assert use(None) == 0


@st.composite
def runs(draw: st.DrawFn) -> tuple[Node, list[int], list[int], int, int]:
    """A node, its sequences' lengths and new tokens, tokens of a page, and a seed."""
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 4), (9, 3), (7, 1), (8, 2), (6, 1)]))
    starts = draw(st.booleans())
    rotation = draw(st.sampled_from(["", "halves", "pairs"]))
    node = Node(
        int8=draw(st.booleans()),
        form=draw(st.sampled_from(Form)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 24, 32, 40, 64, 128] if rotation else [5, 8, 16, 24, 64])),
        rotation=rotation,
        starts=starts,
        bias=draw(st.booleans()),
        sinks=draw(st.booleans()),
        extent=draw(st.sampled_from([0, 0, 1, 9, 300])),
        window=draw(st.sampled_from([-1, 1, 7, 100, 300])),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        scale=draw(st.sampled_from([0.0, 0.3])),
    )
    some = st.sampled_from([0, 1, 1, 2, 3, 5, 17, 66])
    counts = draw(st.lists(some, min_size=1, max_size=5 if starts else 1).filter(any))
    counts = counts[: np.searchsorted(np.cumsum(counts), LARGEST, "right")]
    lengths = [count + draw(st.sampled_from([0, 1, 6, 15, 16, 30, 255, 300, 600])) for count in counts]
    return node, lengths, counts, draw(st.sampled_from([4, 8, 16, 64, 256])), draw(st.integers(0, 2**32 - 1))


@cases(60, 600)
@given(case=runs())
def test_random_runs_are_as_the_function_defines_them(case: tuple[Node, list[int], list[int], int, int]) -> None:
    node, lengths, counts, page_tokens, seed = case
    inputs = inputs_of(node, texts(node, lengths, seed), counts, page_tokens, seed)
    output, *pages = run(node, inputs)
    wanted, *stored = defined(node, inputs)
    assert output.shape == wanted.shape
    exact = node.int8 and not node.rotation  # else rotated numbers may round to either side
    for ours, theirs in zip(pages, stored, strict=False):
        if node.int8:
            assert np.abs(ours.astype(int) - theirs)[..., : node.head_dim].max() <= int(not exact)
        else:
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
    if node.int8 and pages:
        plain = replace(node, int8=False)
        floats = run(plain, inputs_of(plain, texts(node, lengths, seed), counts, page_tokens, seed))[1:]
        before = inputs["key_pages"], inputs["value_pages"]
        for ours, was, rows in zip(pages, before, floats, strict=True):
            written = (ours != was).any(-1)
            np.testing.assert_array_equal(ours[written], int8_rows(rows[written]))
    if node.int8 and pages:  # the function reads what the operator stored
        query = inputs["query"][..., : node.heads * node.head_dim]
        read = {name: array for name, array in inputs.items() if name not in ("key", "value")}
        read |= {"query": query, "key_pages": pages[0], "value_pages": pages[1]}
        (wanted,) = defined(replace(node, form=Form.READING), read)
    np.testing.assert_allclose(output, wanted, rtol=2e-5, atol=2e-5)


NODES = [
    Node(heads=9, kv_heads=3, head_dim=64, rotation="halves", rotated=0.5),
    Node(
        form=Form.PACKED,
        heads=8,
        kv_heads=2,
        head_dim=128,
        rotation="pairs",
        rotated=0.25,
        bias=True,
        sinks=True,
        window=300,
    ),
    Node(heads=7, kv_heads=1, head_dim=40, softcap=3.0, window=90, extent=60),
    Node(form=Form.PACKED, heads=8, kv_heads=2, extent=290),
    Node(form=Form.READING, heads=6, kv_heads=3, head_dim=32, rotation="halves", sinks=True),
    Node(form=Form.APART, heads=40, kv_heads=1, head_dim=16, bias=True),  # more queries of a token than of a task
]


COUNTS = [9, 1, 5, 70, 64, 2, 3]


@lru_cache(maxsize=1)
def mixed(node: Node) -> tuple[list[Text], Arrays, np.ndarray]:
    """Sequences of very different lengths, a run of them, and the output as the function defines it for each alone (of
    all it would compute with every page for every token)."""
    sequences, alone = texts(node, [530, 1, 5, 700, 64, 300, 257], 1), replace(node, starts=False)
    runs = [inputs_of(alone, [text], [count], 16) for text, count in zip(sequences, COUNTS, strict=True)]
    attended = np.concatenate([defined(alone, inputs)[0] for inputs in runs], axis=1)
    return sequences, inputs_of(node, sequences, COUNTS, 16), attended


@pytest.mark.parametrize("library", SETS, indirect=True)  # the next node after all of them: `mixed` holds one
@pytest.mark.parametrize("node", [replace(node, int8=int8) for node in NODES for int8 in (False, True)], ids=str)
def test_an_output_does_not_depend_on_what_else_is_in_the_run(node: Node, library: Path) -> None:
    node = replace(node, library=library)
    sequences, inputs, attended = mixed(node)
    together, *_ = run(node, inputs, threads=2)
    np.testing.assert_allclose(together, attended, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(run(node, inputs)[0], together)
    for text, count, output in zip(sequences, COUNTS, np.split(together, np.cumsum(COUNTS)[:-1], 1), strict=True):
        alone = replace(node, starts=False)
        other, *_ = run(alone, inputs_of(alone, [text], [count], 64, seed=count))
        np.testing.assert_array_equal(other, output)
    for row in (0, 2):
        output = np.split(together, np.cumsum(COUNTS)[:-1], 1)[row]
        apart = replace(node, form=Form.APART) if node.form == Form.PACKED else node
        np.testing.assert_array_equal(one_by_one(apart, sequences[row], COUNTS[row], 16), output)


def test_the_reference_rounds_as_the_operator_does() -> None:
    states = np.random.default_rng(2).standard_normal((2, 3, 5, 24), dtype=np.float32)
    states[0, 1, 2] = 0
    rows = int8_rows(states)
    floats = rows[..., :-4] * np.ascontiguousarray(rows[..., -4:]).view(np.float32)
    np.testing.assert_array_equal(round_to_int8(torch.from_numpy(states)).numpy(), floats)


@pytest.mark.parametrize("int8", [False, True])
def test_partial_results_of_long_sequences_are_merged_in_parts(int8: bool) -> None:
    node = Node(int8=int8, heads=32, kv_heads=1, head_dim=128)  # of 64 queries by 1100 keys more than fit at a time
    sequences = texts(node, [1100, 1090], 2)
    inputs = inputs_of(node, sequences, [64, 64], 16)
    output = run(node, inputs, threads=2)[0]
    np.testing.assert_allclose(output, defined(node, inputs)[0], rtol=2e-5, atol=2e-5)
    last = inputs_of(node, [sequences[0]], [1], 16)
    last["key_pages"], last["value_pages"] = run(node, inputs_of(node, [sequences[0]], [64], 16))[1:]
    np.testing.assert_array_equal(run(node, last)[0][0, 0], output[0, 63])


@pytest.mark.parametrize("int8", [False, True])
def test_pages_are_written_in_place_where_they_are_bound_so(int8: bool) -> None:
    node = Node(int8=int8, form=Form.PACKED, rotation="halves")
    inputs = inputs_of(node, texts(node, [20, 9], 3), [4, 9], 8)
    before = {name: array.copy() for name, array in inputs.items()}
    copied = run(node, inputs)
    for name, array in before.items():
        np.testing.assert_array_equal(inputs[name], array)
    bound = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    of_node = session(node, tuple(inputs))
    binding = of_node.io_binding()
    for name, value in bound.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("output")
    for kind in ("key", "value"):
        binding.bind_ortvalue_output(f"new_{kind}_pages", bound[f"{kind}_pages"])
    of_node.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), copied[0])
    for kind, pages in zip(("key", "value"), copied[1:], strict=True):
        np.testing.assert_array_equal(bound[f"{kind}_pages"].numpy(), pages)


def altered(inputs: Arrays, change: dict) -> Arrays:
    """Inputs of which some are replaced: by zeros of a shape, a list of numbers, or nothing."""
    for name, to in change.items():
        if to is None:
            del inputs[name]
        elif isinstance(to, tuple):
            inputs[name] = np.zeros(to, inputs[name].dtype if name in inputs else np.float32)
        else:
            inputs[name] = np.array(to, inputs[name].dtype)
    return inputs


HEADS = "the heads of queries, keys, values, pages and sinks do not fit each other"
TOKENS = r"takes queries \[1, N, \.\.\], and keys and values of the same tokens or neither"
SEQUENCES = r"takes a page table \[R, J\], lengths \[R\] and starts \[R \+ 1\]"
STARTS = "the sequences' starts do not ascend from 0 to the number of new tokens"


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": (1, 5, 60)}, HEADS),
        ({"key": (1, 5, 16)}, HEADS),
        ({"value": (1, 5, 48)}, HEADS),
        ({"sinks": (3,)}, HEADS),
        ({"key_pages": (9, 1, 8, 20), "value_pages": (9, 1, 8, 20)}, HEADS),
        ({"query": (1, 4, 64)}, TOKENS),
        ({"query": (2, 5, 64)}, TOKENS),
        ({"value": None}, TOKENS),
        ({"query": None}, TOKENS),
        ({"query": None, "key": None, "value": None}, TOKENS),
        (
            {"key_pages": (9, 2, 8, 24)},
            r"takes pages \[P, kv_heads, T, head_dim \(\+ 4\)\], of keys and of values alike",
        ),
        ({"key_pages": (9, 2, 12, 20), "value_pages": (9, 2, 12, 20)}, "takes pages of 4, 8, 16, 32, 64 or 128 tokens"),
        ({"key_pages": (9, 2, 0, 20), "value_pages": (9, 2, 0, 20)}, "takes pages of 4, 8, 16, 32, 64 or 128 tokens"),
        ({"starts": None}, SEQUENCES),
        ({"starts": [0, 5]}, SEQUENCES),
        ({"lengths": [20]}, SEQUENCES),
        ({"starts": [1, 4, 5]}, STARTS),
        ({"starts": [0, 4, 6]}, STARTS),
        ({"starts": [0, 6, 5]}, STARTS),
        ({"lengths": [20, 0]}, "a sequence is shorter than its new tokens"),
        ({"lengths": [3, 9]}, "a sequence is shorter than its new tokens"),
        ({"lengths": [20, 33]}, "a sequence is longer than its pages"),
        ({"lengths": [2**62, 9]}, "a sequence is longer than its pages"),
        ({"page_table": [[0, 1, 8, 0], [2, 3, 0, 0]]}, "a sequence has a page that is none"),
        ({"page_table": [[0, -1, 1, 0], [2, 3, 0, 0]]}, "a sequence has a page that is none"),
        ({"cos": (19, 8)}, "the tables of the rotation do not fit the heads or the longest sequence"),
        ({"sin": (30, 7)}, "the tables of the rotation do not fit the heads or the longest sequence"),
        ({"sin": None}, "the tables of the rotation do not fit the heads or the longest sequence"),
        ({"bias": (4, 19)}, "the table of biases does not fit the heads or the longest sequence"),
        ({"bias": (1, 30)}, "the table of biases does not fit the heads or the longest sequence"),
        ({"distance_bias": (1, 4, 12)}, "the biases by distance do not fit the new tokens or the heads"),
        ({"distance_bias": (1, 5, 11)}, "the biases by distance do not fit the new tokens or the heads"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(change: dict, message: str, int8: bool) -> None:
    node = Node(int8=int8, rotation="halves", bias=True, sinks=True, extent=3)
    inputs = inputs_of(node, texts(node, [20, 9], 3), [4, 1], 8)
    if not int8:
        change = {n: (*to[:-1], to[-1] - 4) if n.endswith("pages") else to for n, to in change.items()}
    inputs = altered(inputs, change)
    of_node = session(node, tuple(inputs))
    pages = {kind: ort.OrtValue.ortvalue_from_numpy(inputs[f"{kind}_pages"].copy()) for kind in ("key", "value")}
    binding = of_node.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("output")
    for kind, value in pages.items():
        binding.bind_ortvalue_input(f"{kind}_pages", value)
        binding.bind_ortvalue_output(f"new_{kind}_pages", value)
    with pytest.raises(Exception, match=message):
        of_node.run_with_iobinding(binding)
    for kind, value in pages.items():
        np.testing.assert_array_equal(value.numpy(), inputs[f"{kind}_pages"])


def test_a_table_may_have_anything_where_no_new_token_needs_it() -> None:
    node = Node()
    sequences = texts(node, [20, 9], 3)
    inputs = inputs_of(node, sequences, [4, 0], 8)
    output, *pages = run(node, inputs)
    inputs["page_table"][1] = 99
    for ours, theirs in zip(run(node, inputs), (output, *pages), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_no_sequences_and_no_tokens() -> None:
    for form in Form:
        node = Node(form=form)
        inputs = altered(inputs_of(node, texts(node, [1], 3), [1], 8), {"page_table": (0, 3), "lengths": (0,)})
        inputs = altered(
            inputs, {"starts": [0]} | {n: (1, 0, inputs[n].shape[-1]) for n in ("query", "key", "value") if n in inputs}
        )
        assert run(node, inputs)[0].shape == (1, 0, 64)
