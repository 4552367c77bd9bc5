"""One of each tiny model, and what is measured of it, for all tests of probe."""

from pathlib import Path

import pytest
from probe_models import EARLY, write_llama

from tide_export.data.sequences import load_tokenizer
from tide_export.model.source import load_model
from tide_export.probing.answers import Answers, sample
from tide_export.probing.early import Early, measure_exits


@pytest.fixture(scope="session")
def early_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("early"), early=True)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("random"), early=False)


def measured(model: Path) -> tuple[Answers, Early]:
    source = load_model(model)
    answers = sample(source, load_tokenizer(model), 0.8)
    return answers, measure_exits(source, answers, (EARLY,))


@pytest.fixture(scope="session")
def of_early(early_model: Path) -> tuple[Answers, Early]:
    return measured(early_model)


@pytest.fixture(scope="session")
def of_random(random_model: Path) -> tuple[Answers, Early]:
    return measured(random_model)
