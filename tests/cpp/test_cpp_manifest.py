"""Both runtimes accept the same manifests, and refuse the others with the same sentence."""

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from cpp_builds import CppBuild
from cpp_engine import CppEngine
from hypothesis import given
from hypothesis import strategies as st

from tide_export.bundle.manifest import Manifest
from tide_export.errors import BundleError

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

from fuzz.settings import cases
from manifests import TEXTS, manifests
from mutations import mutated_bytes, mutated_json

KINDS = manifests()


class Parsers:
    """The two parsers on one file."""

    def __init__(self, driver: CppEngine, file: Path) -> None:
        self._driver, self._file = driver, file

    def python(self) -> str | None:
        """The sentence that refuses the file; None: it is accepted."""
        try:
            Manifest.from_json(self._file.read_bytes(), source=f"'{self._file}'")
        except BundleError as error:
            return str(error)
        return None

    def cpp(self) -> str | None:
        try:
            self._driver.call("manifest", str(self._file))
        except BundleError as error:
            return str(error)
        return None

    def verdict(self, text: bytes) -> str | None:
        """The same of both."""
        self._file.write_bytes(text)
        sentence = self.python()
        assert self.cpp() == sentence
        assert sentence is None or "\n" not in sentence
        return sentence


@pytest.fixture(scope="module")
def parsers(cpp: CppBuild, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parsers]:
    driver = CppEngine(cpp.driver, None)
    yield Parsers(driver, tmp_path_factory.mktemp("manifests") / "tide.json")
    driver.close()


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_parsers_take_differently(parsers: Parsers, name: str) -> None:
    text, refused = TEXTS[name]
    sentence = parsers.verdict(text)
    assert sentence is None if refused is None else refused in str(sentence)


@cases(1500)
@given(random=st.randoms(use_true_random=False))
def test_mutated_fields(parsers: Parsers, random: Random) -> None:
    parsers.verdict(mutated_json(random, random.choice(KINDS)).encode())


@cases(500)
@given(random=st.randoms(use_true_random=False))
def test_mutated_bytes(parsers: Parsers, random: Random) -> None:
    parsers.verdict(mutated_bytes(random, mutated_json(random, random.choice(KINDS), times=1).encode()))
