"""The oracle is the judge, family by family: exported, `full` equals HuggingFace and `exit` equals TIDE's rule."""

from pathlib import Path

import pytest
from families import EXPORTED as FAMILIES, build

from tide_export.bundle import open_bundle, write_manifest, writing_bundle
from tide_export.config import TideConfig
from tide_export.graph import compose, cut
from tide_export.lower import lower_for_onnxruntime
from tide_export.package import context_length, make_manifest, save_graph
from tide_export.parity import check_exit, check_full, spread_routers
from tide_export.runtime.engine import Engine
from tide_export.runtime.session import open_session
from tide_export.trace import trace

PROMPTS = [[7], [5, 9], [(i * 37) % 500 + 3 for i in range(40)]]
NEW_TOKENS = 24


def bundle_of(source, routers, folder: Path) -> Engine:
    """`source` with `routers` as an engine, through the same stages as `pipeline.export`."""
    pieces = cut(trace(source, routers.checkpoints), length := context_length(source, None))
    graph = lower_for_onnxruntime(compose(pieces, routers.arrays(), routers.lens_arrays()))
    with writing_bundle(folder) as temporary:
        save_graph(graph, temporary)
        routers.save(temporary / "routers.safetensors")
        write_manifest(temporary, make_manifest(source, routers, TideConfig(), graph, length))
    bundle = open_bundle(folder)
    return Engine(bundle, open_session(bundle, "cpu", 1))


# What stands at the checkpoints: ours in full for every family, the parts by themselves for a few.
LENS_AND_SHORTLIST = {"lens_rank": 8, "shortlist": 16}
SHORTLIST_ALONE = {"lens_rank": 0, "shortlist": 16}
AS_IN_TIDE = {"lens_rank": 0, "shortlist": 0}
CASES = [
    *((family, LENS_AND_SHORTLIST) for family in FAMILIES),
    *((family, SHORTLIST_ALONE) for family in ("llama", "opt")),
    *((family, AS_IN_TIDE) for family in ("llama", "gemma3", "gpt2")),
]


@pytest.mark.parametrize(
    ("family", "form"),
    CASES,
    ids=lambda case: case if isinstance(case, str) else "lens {lens_rank} list {shortlist}".format(**case),
)
def test_full_is_huggingface_and_exit_is_the_oracle(family: str, form: dict[str, int], tmp_path: Path) -> None:
    source = build(FAMILIES[family]())
    routers = spread_routers(source, (1, 3), PROMPTS[2], bottleneck=16, **form)
    assert (routers.strategy == "lens") == (form["lens_rank"] > 0)
    assert (routers.routers[1].shortlist is not None) == (form["shortlist"] > 0)
    engine = bundle_of(source, routers, tmp_path / "bundle")

    full = check_full(engine, source, PROMPTS, NEW_TOKENS)
    assert full.holds, full.differences
    assert full.forgiven == 0
    assert full.max_error < 1e-3

    exits: set[int] = set()
    for threshold in (0.3, 0.5, 0.7, 0.85):
        for max_pending in (1, 16):
            check = check_exit(engine, source, routers, PROMPTS, NEW_TOKENS, [threshold] * 2, max_pending)
            assert check.holds, (threshold, max_pending, check.differences)
            exits |= set(check.exits)
    assert exits == {1, 3, 4}, "every checkpoint must take part, and full depth too"
