"""The functions that define paged attention, in ONNX Runtime without our library, against NumPy."""

from itertools import combinations

import numpy as np
import onnx
import pytest
import tiers
from ort_sessions import opened
from paged_attention_numpy import Case, expected, int8_rows, one_node

from tide_export.bundle.manifest import FLOAT32_KV, INT8_KV, KV_CACHES
from tide_export.lower.onnxruntime.paged_attention import OPTIONAL, Form, paged_attention_function

HEADS, KV_HEADS, SIZE, PAGES, TABLE = 6, 2, 4, 9, 4  # rotations need an even width
RAGGED = [(5, 5), (7, 1), (0, 0), (16, 3), (1, 0)]  # each sequence's tokens, and how many of them are new


def run(case: Case) -> list[np.ndarray]:
    model = one_node(case)
    onnx.checker.check_model(model)
    return opened(model, threads=1, operators=False).run(None, case.inputs)


def case_of(
    form: Form = Form.APART,
    options: tuple[str, ...] = ("starts",),
    sequences: list[tuple[int, int]] = RAGGED,
    kv_cache: str = FLOAT32_KV,
    head_dim: int = 6,
    **attributes: float,
) -> Case:
    """Random inputs; each sequence has pages of its own, those that none needs are no pages at all."""
    random = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    lengths, counts = (np.array(each) for each in zip(*sequences, strict=True))
    tokens, widths = counts.sum(), [HEADS * head_dim, KV_HEADS * head_dim, KV_HEADS * head_dim]
    new = [normal(1, tokens, width) for width in widths]
    inputs = {
        Form.APART: dict(zip(("query", "key", "value"), new, strict=True)),
        Form.PACKED: {"query": np.concatenate(new, -1)},
        Form.READING: {"query": new[0]},
    }[form]
    for name in ("key_pages", "value_pages"):
        pages = normal(PAGES, KV_HEADS, SIZE, head_dim)
        inputs[name] = int8_rows(pages) if kv_cache == INT8_KV else pages
    table, free = np.full((len(sequences), TABLE), 10**6, np.int32), iter(random.permutation(PAGES))
    for r, length in enumerate(lengths):
        for j in range(-(-length // SIZE)):
            table[r, j] = next(free)
    inputs |= {"page_table": table, "lengths": lengths}
    angles = np.outer(np.arange(16), 0.3 ** np.arange(attributes.get("rotary_embedding_dim", head_dim) // 2))
    given = {
        "starts": {"starts": np.array([0, *np.cumsum(counts)])},
        "rotation": {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)},
        "bias": {"bias": normal(HEADS, 16)},
        "sinks": {"sinks": normal(HEADS)},
        "distance_bias": {"distance_bias": normal(1, tokens, HEADS * 5)},
    }
    for option in options:
        inputs |= given[option]
    return Case(inputs, HEADS, KV_HEADS, kv_cache, attributes)


def check(case: Case) -> list[np.ndarray]:
    outputs = run(case)
    wanted = expected(case)
    assert len(outputs) == len(wanted)
    for output, want in zip(outputs, wanted, strict=True):
        assert (output.shape, output.dtype) == (want.shape, want.dtype)
        if output.dtype == np.int8:
            assert np.abs(output.astype(int) - want).max() <= 1  # rotated on either side of a half
            assert (output == want).mean() > 0.99
        else:
            np.testing.assert_allclose(output, want, atol=3e-5)
    return outputs


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("form", Form)
def test_every_combination_of_inputs(form: Form, kv_cache: str) -> None:
    """In `make test` none, each alone, all but one and all."""
    every = range(len(OPTIONAL) + 1)
    for count in tiers.sized((*every[:2], *every[-2:]), every):
        for options in combinations(OPTIONAL, count):
            check(case_of(form, options, RAGGED if "starts" in options else [(11, 3)], kv_cache))


@pytest.mark.parametrize("kv_cache", tiers.exhaustive_beyond(1, KV_CACHES))
@pytest.mark.parametrize(
    "attributes",
    [
        {"local_window_size": 4},
        {"local_window_size": 1},
        {"softcap": 0.7},
        {"scale": 0.9},
        {"rotary_interleaved": 1},
        {"rotary_embedding_dim": 2},
        {"rotary_embedding_dim": 4, "rotary_interleaved": 1},
        {"local_window_size": 3, "softcap": 2.0, "scale": 0.2, "rotary_interleaved": 1},
    ],
    ids=lambda given: "-".join(given),
)
def test_attributes(attributes: dict[str, float], kv_cache: str) -> None:
    for form in (Form.PACKED, Form.READING):
        plain = run(case_of(form, OPTIONAL, kv_cache=kv_cache))[0]
        given = check(case_of(form, OPTIONAL, kv_cache=kv_cache, **attributes))[0]
        assert not np.allclose(plain, given, atol=1e-3)


def test_a_sequence_is_the_same_alone() -> None:
    case = case_of(options=OPTIONAL)
    together, starts = run(case)[0], case.inputs["starts"]
    for r, (_, count) in enumerate(RAGGED):
        new = slice(starts[r], starts[r] + count)
        part = {name: case.inputs[name][:, new] for name in ("query", "key", "value", "distance_bias")}
        part |= {name: case.inputs[name][r : r + 1] for name in ("page_table", "lengths")}
        inputs = {**case.inputs, **part}
        del inputs["starts"]
        alone = run(Case(inputs, HEADS, KV_HEADS))[0]
        np.testing.assert_allclose(together[:, new], alone, atol=1e-6)


def test_sequences_share_the_pages_of_a_common_beginning() -> None:
    case = case_of(sequences=[(6, 1), (7, 2)])
    case.inputs["page_table"][1, 0] = case.inputs["page_table"][0, 0]
    _, key_pages, _ = check(case)
    shared = case.inputs["page_table"][0, 0]
    np.testing.assert_array_equal(key_pages[shared], case.inputs["key_pages"][shared])


@pytest.mark.parametrize("kv_cache", KV_CACHES)
@pytest.mark.parametrize("options", [("starts",), ()])
@pytest.mark.parametrize("form", Form)
def test_no_tokens_change_nothing(form: Form, options: tuple[str, ...], kv_cache: str) -> None:
    case = case_of(form, options, [(5, 0), (0, 0)] if options else [(5, 0)], kv_cache)
    output, *pages = check(case)
    assert output.shape[1] == 0
    for new, name in zip(pages, ("key_pages", "value_pages"), strict=False):
        np.testing.assert_array_equal(new, case.inputs[name])


def test_what_no_token_has_filled_may_be_no_number() -> None:
    case = case_of()
    for pages in (case.inputs["key_pages"], case.inputs["value_pages"]):
        used = np.zeros(pages.shape[::2][:2], bool)
        for row, (length, _) in zip(case.inputs["page_table"], RAGGED, strict=True):
            for position in range(length):
                used[row[position // SIZE], position % SIZE] = True
        pages.transpose(0, 2, 1, 3)[~used] = np.nan
    assert np.isfinite(run(case)[0]).all()


def test_scales_of_int8_are_exact() -> None:
    scales = np.float32(
        [
            0,
            3e-39,
            1.1754944e-38,  # the first number that is not subnormal
            3e-20,
            0.1,
            1,
            1.9999999,
            2,
            12345.678,
            2.6e36,
        ]
    )
    case = case_of(options=(), sequences=[(len(scales), len(scales))], kv_cache=INT8_KV, head_dim=2)
    x = np.repeat(np.repeat(scales[:, None] * 127, KV_HEADS, 1)[..., None], 2, -1).astype(np.float32)
    case.inputs["key"][:] = x.reshape(1, len(scales), -1)
    case.inputs["value"][:] = case.inputs["key"]
    outputs, wanted = run(case), expected(case)
    np.testing.assert_array_equal(outputs[1], wanted[1])
    np.testing.assert_array_equal(outputs[2], wanted[2])


def test_values_of_int8_are_read_exactly() -> None:
    """A window of one token gives the values as they are."""
    case = case_of(sequences=[(13, 13)], options=(), kv_cache=INT8_KV, local_window_size=1)
    case.inputs["value"] *= np.float32(10) ** np.arange(-19, 20, 3, dtype=np.float32)[:, None]
    output, _, pages = run(case)
    table = case.inputs["page_table"][0]
    for position in range(13):
        rows = pages[table[position // SIZE], :, position % SIZE]
        scale = np.ascontiguousarray(rows[:, -4:]).view("<f4")
        values = np.repeat(rows[:, :-4].astype(np.float32) * scale, HEADS // KV_HEADS, 0)
        np.testing.assert_array_equal(output[0, position].reshape(HEADS, -1), values)


def test_every_function_of_a_model_is_found_by_its_overload() -> None:
    model = one_node(case_of())
    other = one_node(case_of(Form.READING, ("starts",)))
    model.functions.extend(other.functions)
    onnx.checker.check_model(model)
    assert len({function.overload for function in model.functions}) == 2
    options = paged_attention_function(FLOAT32_KV, Form.READING, ("sinks", "starts"))
    assert options.overload == "reading_starts_sinks"
