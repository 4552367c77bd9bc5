"""Writes a model repository for Triton."""

import json
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from tide_export.bundle.opened import open_bundle
from tide_export.common.files import TEMPORARY, failure
from tide_export.errors import BundleError, ConfigError
from tide_export.runtime.tokenizer import BundleTokenizer

CONFIG_FILE, MODEL_FILE, BUNDLE_FOLDER, VERSION = "config.pbtxt", "model.py", "bundle", "1"
# Tensors of numbers only, and options as request parameters: stubs that were built before numpy 2 cannot pass strings.
CONFIG = """backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [ {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] optional: true }} ]
output [
  {{ name: "text_output" data_type: TYPE_UINT8 dims: [ -1 ] }},
  {{ name: "token_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "finish_reason" data_type: TYPE_UINT8 dims: [ -1 ] }}
]
instance_group [ {{ kind: KIND_MODEL count: 1 }} ]
parameters [
{parameters}
]
"""
MODEL = '''"""Written by `tide-export triton`."""

import sys

# The environment that this file was written from, which Triton's Python does not know. Where it is missing, Triton's
# own has the package.
sys.path[:0] = {packages}

from tide_export.serving.triton.model import TritonPythonModel
'''


def write_repository(
    bundle: str | os.PathLike[str],
    repository: str | os.PathLike[str],
    name: str | None = None,
    copy: bool = False,
    parameters: Mapping[str, object] | None = None,
) -> Path:
    """Adds a bundle to a model repository of Triton.

    Args:
        repository: the folder for `tritonserver --model-repository`; created if it is missing.
        name: the model's name there; None: that of the bundle's folder.
        copy: copy the bundle instead of linking to it.
        parameters: options of `ServerConfig` and `load`, for the model's configuration.

    Returns:
        The model's folder.

    Raises:
        BundleError: the bundle is invalid or has no tokenizer, or the folder cannot be written.
        ConfigError: the name is not a folder name, or exists already.
    """
    opened = open_bundle(bundle, verify=False)
    BundleTokenizer(opened)
    source, repository = opened.path.resolve(), Path(repository)
    name = source.name if name is None else name
    if not name or Path(name).name != name:
        raise ConfigError(f"--name {name!r} is no folder's name")
    target, temporary = repository / name, repository / f".{name}.{TEMPORARY}"
    if target.exists():
        raise ConfigError(f"'{target}' exists: remove it, or give another --name")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        version = temporary / VERSION
        version.mkdir(parents=True)
        (temporary / CONFIG_FILE).write_text(_config(parameters or {}), encoding="utf-8")
        (version / MODEL_FILE).write_text(MODEL.format(packages=_packages()), encoding="utf-8")
        if copy:
            shutil.copytree(source, version / BUNDLE_FOLDER)
        else:
            (version / BUNDLE_FOLDER).symlink_to(source, target_is_directory=True)
        temporary.rename(target)
    except OSError as error:
        raise BundleError(f"cannot write '{target}': {failure(error, repository)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _config(parameters: Mapping[str, object]) -> str:
    rows = [
        f"  {{ key: {json.dumps(key)} value: {{ string_value: {json.dumps(str(value), ensure_ascii=False)} }} }}"
        for key, value in parameters.items()
    ]
    text = CONFIG.format(parameters=",\n".join(rows))
    return text if rows else text[: text.index("parameters [")]


def _packages() -> list[str]:
    """Returns the folders of this environment's packages."""
    folders = [str(Path(__file__).parents[3]), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return list(dict.fromkeys(folders))
