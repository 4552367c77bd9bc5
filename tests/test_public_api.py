"""The package's public names: all of them resolve, with their real signatures, and importing the package is cheap."""

import inspect

import pytest
from blocked_imports import ENGINES, EXPORT, run_blocked

import tide_export
from tide_export import errors


def test_every_public_name_resolves() -> None:
    for name in tide_export.__all__:
        assert getattr(tide_export, name) is not None, name
    assert set(tide_export.__all__) <= set(dir(tide_export))
    assert tide_export.__all__ == sorted(tide_export.__all__)


def test_every_error_is_public() -> None:
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes <= set(tide_export.__all__)


def test_every_late_name_is_public() -> None:
    assert set(tide_export._MODULES) <= set(tide_export.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'tide_export' has no attribute 'exprot'"):
        _ = tide_export.exprot


def test_signatures_show_the_options() -> None:
    parameters = inspect.signature(tide_export.export).parameters
    assert list(parameters)[:2] == ["model", "output"]
    assert {"routers", "weights", "targets", "device_map"} <= set(parameters)
    assert parameters["weights"].kind is inspect.Parameter.KEYWORD_ONLY


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = run_blocked((*EXPORT, *ENGINES, "numpy", "tokenizers"), "import tide_export; dir(tide_export)")
    assert done.returncode == 0, done.stderr
