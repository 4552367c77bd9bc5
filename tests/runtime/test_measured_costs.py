"""What steps cost is measured by the first request that may draft, and kept in the user's cache for this machine."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundles import with_manifest
from drafters import drafting_copy
from tiny_model import TinyModel

from tide_export.bundle.manifest import Drafting
from tide_export.errors import GenerationError
from tide_export.runtime.config import GenerationConfig
from tide_export.runtime.engine import Engine, load

LOSSLESS = GenerationConfig(mode="lossless")
DAY = 24 * 3600


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the costs, in a user's cache that is empty."""
    monkeypatch.delenv("TIDE_DRAFT_COSTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tide_export" / "draft_costs"


def opened(bundle: Path, **options: Any) -> Engine:
    return load(bundle, verify=False, **{"threads": 1} | options)


def found(engine: Engine, **options: Any) -> dict[str, Any]:
    drafting: dict[str, Any] = engine.resolved(GenerationConfig(mode="lossless", **options))["drafting"]
    return drafting


def test_costs_are_measured_once_a_machine(demo_bundle: Path, cache: Path) -> None:
    engine = opened(demo_bundle)
    first = found(engine)
    assert first["costs"] == "measured"
    assert found(engine) == first, "the same engine measures nothing again"
    verify = first["verify_costs"]
    assert verify == sorted(verify)
    assert all(0 <= cost <= 2**number for number, cost in enumerate(verify)), "one by one they cost that"
    assert all(0 < cost <= 1 for cost in first["draft_costs"])
    assert len(list(cache.iterdir())) == 1
    assert found(opened(demo_bundle)) == first | {"costs": "cache"}


def test_an_engine_that_drafts_nothing_measures_nothing(demo_bundle: Path, cache: Path) -> None:
    engine = opened(demo_bundle)
    engine.generate([5, 6, 7], max_new_tokens=4, mode="full")
    engine.generate([5, 6, 7], max_new_tokens=4, mode="exit")
    never = found(engine, max_pending=0, prompt_lookup=0, drafter=0)
    given = Drafting((1.0,) * 3, 0, 4, (0.5,) * 3, (0.1,) * 5)
    assert (never["costs"], found(engine.drafting_as(given))["costs"]) == ("assumed", "given")
    assert not cache.exists()
    engine.generate([5, 6, 7], max_new_tokens=4, mode="lossless")
    assert cache.exists()


def test_a_list_and_a_scheduler_measure_too(demo_bundle: Path, cache: Path) -> None:
    opened(demo_bundle).generate([[5, 6], [7]], max_new_tokens=2, mode="lossless")
    assert cache.exists()
    assert found(opened(demo_bundle))["costs"] == "cache"
    (file,) = cache.iterdir()
    file.unlink()
    engine = opened(demo_bundle)
    engine.scheduler().submit([5, 6], mode="lossless", max_new_tokens=2).result()
    assert found(opened(demo_bundle))["costs"] == "cache"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_full_depth(demo_bundle: Path, tmp_path: Path, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "stop_token_ids": []}
    seeds = {"seed": 3} if temperature else {}
    for bundle in (demo_bundle, drafting_copy(demo_bundle, tmp_path)):
        engine = opened(bundle)
        for prompt in ([50, 60, 70] * 4, [300, 301, 7]):
            full = engine.generate(prompt, mode="full", **options, **seeds)
            assert engine.generate(prompt, mode="lossless", **options, **seeds).tokens == full.tokens
        assert found(engine)["costs"] == "measured"


def test_a_drafter_is_measured_with_the_steps(demo_bundle: Path, tmp_path: Path) -> None:
    assert found(opened(demo_bundle))["drafter_cost"] == 0.1, "there is none"
    drafter = found(opened(drafting_copy(demo_bundle, tmp_path)))
    assert drafter["costs"] == "measured", "of a bundle with other files"
    assert 0 < drafter["drafter_cost"] <= 1
    assert drafter["drafter_cost"] != 0.1


def test_those_of_other_threads_or_another_bundle_are_not_used(
    demo_bundle: Path, tiny_bundle: Path, cache: Path
) -> None:
    for engine in (opened(demo_bundle), opened(demo_bundle, threads=2), opened(tiny_bundle)):
        assert found(engine)["costs"] == "measured"
    assert len(list(cache.iterdir())) == 3


def _another_machine(file: Path) -> None:
    """The file of other circumstances, under this name: what it was written for is part of its checksum."""
    (other,) = set(file.parent.iterdir()) - {file}
    file.write_bytes(other.read_bytes())


def _aged(days: float) -> Callable[[Path], None]:
    return lambda file: os.utime(file, (time.time() - days * DAY,) * 2)


def _changed(file: Path) -> None:
    file.write_bytes(b"0.5" + file.read_bytes()[3:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-5]),
        lambda file: file.write_bytes(bytes(range(256)) * 4000),
        lambda file: file.write_bytes(b"nan " * 9),
        _changed,
        _another_machine,
        _aged(2),
        _aged(-2),
    ],
)
def test_a_file_that_is_damaged_or_old_or_another_machine_s_is_replaced(
    demo_bundle: Path, cache: Path, damage: Callable[[Path], Any]
) -> None:
    found(opened(demo_bundle))
    (file,) = cache.iterdir()
    found(opened(demo_bundle, threads=2))
    damage(file)
    damaged = file.read_bytes()
    assert found(opened(demo_bundle))["costs"] == "measured"
    assert file.read_bytes() != damaged
    assert found(opened(demo_bundle))["costs"] == "cache"


def test_without_a_cache_they_are_measured_each_time(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (str(file), "/proc"):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        assert [found(opened(demo_bundle))["costs"] for _ in range(2)] == ["measured"] * 2
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert found(opened(demo_bundle))["costs"] == "measured"


def test_the_environment_can_fix_them(demo_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_DRAFT_COSTS", "assumed")
    engine = opened(demo_bundle)
    assert found(engine)["costs"] == "assumed"
    prompt = [50, 60, 70] * 4
    options: dict[str, Any] = {"max_new_tokens": 60, "mode": "lossless", "temperature": 0.8, "seed": 1}
    made = [engine.generate(prompt, **options).stats.drafts for _ in range(3)]
    assert made[0] == made[1] == made[2]
    assert not cache.exists()
    monkeypatch.setenv("TIDE_DRAFT_COSTS", "free")
    with pytest.raises(GenerationError, match="TIDE_DRAFT_COSTS must be 'assumed' or not set, not 'free'"):
        opened(demo_bundle).generate([5], mode="lossless", max_new_tokens=1)


def test_costs_in_an_older_bundle_are_not_read(tiny_bundle: Path, tmp_path: Path) -> None:
    old = Drafting((1.0, 1.0), 0, 8, (0.4, 0.8), (7.0,) * 5, {}, None, 0.9)
    bundle = with_manifest(tiny_bundle, tmp_path, drafting=old)
    assert load(bundle).manifest.drafting == old
    drafting = found(opened(bundle))
    assert (drafting["prompt_lookup"], drafting["costs"]) == (8, "measured")
    assert drafting["verify_costs"] != [7.0] * 5


def test_a_context_that_holds_no_run_is_not_measured(tmp_path: Path) -> None:
    assert found(opened(TinyModel(context=2).write(tmp_path / "two")))["costs"] == "assumed"
    short = found(opened(TinyModel(context=8).write(tmp_path / "eight")))
    assert short["costs"] == "measured"
    assert len(short["verify_costs"]) == 5
