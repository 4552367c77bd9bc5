"""`tide-export push`: uploads a bundle to a model repository of the Hugging Face hub, in one commit.

Plans stay here: they run on GPUs like this machine's alone, and `tide-export build` makes them where the bundle is
pulled. Nothing but the files of the manifest goes up, and the card.
"""

import logging
import os
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelInfo, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from tide_export.bundle.file_names import MANIFEST_FILE, PLANS_FOLDER
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.opened import Bundle, open_bundle
from tide_export.common.formatting import size
from tide_export.common.version import __version__
from tide_export.errors import HubError
from tide_export.hub.card import model_card
from tide_export.hub.failures import hub_errors

logger = logging.getLogger("tide_export")

CARD_FILE = "README.md"
NEW_REPOSITORY = {".gitattributes", CARD_FILE}  # files of a repository before the first push
REPLACED = ("*.onnx", "*.data", "report.*")  # files of the previous bundle that are deleted if the new one has none


def push(
    bundle: str | os.PathLike[str],
    repo: str,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Uploads a bundle without its plans, with a model card, in one commit.

    Args:
        repo: user/name, or the name of one of your own repositories; created if missing.
        private: create it private; refused if it exists and is public.
        revision: branch, created if missing; None: main.
        message: commit message.

    Returns:
        The URL of the commit.

    Raises:
        BundleError: the bundle is missing or damaged.
        HubError: no token, the repository holds something else or may not be written to, or the hub cannot be reached.
    """
    opened = open_bundle(bundle)
    if get_token() is None:
        raise HubError("you have no token for the hub: log in with `hf auth login`, or set HF_TOKEN")
    api = HfApi(library_name="tide_export", library_version=__version__)
    with hub_errors(repo, revision):
        repo = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        existing = _existing_files(api.model_info(repo, revision=revision), private)
        opened = replace(opened, manifest=_without_plans(opened.manifest))
        source = _source_on_hub(api, opened.manifest.model.name)
        files = opened.manifest.files
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(MANIFEST_FILE, opened.manifest.to_json().encode()),
            CommitOperationAdd(CARD_FILE, model_card(opened, repo, revision, source).encode()),
            *(CommitOperationAdd(name, opened.path / name) for name in files),
            *(CommitOperationDelete(name) for name in sorted(existing) if _is_replaced(name, opened)),
        ]
        total = size(sum(info.size for info in files.values()))
        logger.info("uploading %s in %d files to %s", total, len(files) + 2, repo)
        title = message or f"Bundle of {opened.manifest.model.name}, by tide_export {__version__}"
        return api.create_commit(repo, operations, commit_message=title, revision=revision).commit_url


def _existing_files(info: ModelInfo, private: bool) -> set[str]:
    """Returns the names of a repository's files.

    Raises:
        HubError: it is public and `private` is asked for, or it holds files and no bundle.
    """
    if private and not info.private:
        raise HubError(f"repository {info.id!r} is public: make it private on its page, or omit --private")
    names = {file.rfilename for file in info.siblings or ()}
    if names - NEW_REPOSITORY and MANIFEST_FILE not in names:
        raise HubError(f"repository {info.id!r} holds files and no bundle (no {MANIFEST_FILE}): it is not overwritten")
    return names


def _without_plans(manifest: Manifest) -> Manifest:
    plans = f"{PLANS_FOLDER}/"
    files = {name: info for name, info in manifest.files.items() if not name.startswith(plans)}
    return replace(manifest, engines=None, files=files)


def _is_replaced(name: str, bundle: Bundle) -> bool:
    return name not in bundle.manifest.files and any(fnmatch(name, pattern) for pattern in REPLACED)


def _source_on_hub(api: HfApi, name: str) -> ModelInfo | None:
    """Returns the hub's record of the bundle's source model; None if that is a folder or not on the hub."""
    if Path(name).exists():
        return None
    try:
        return api.model_info(name)
    except (HFValidationError, RepositoryNotFoundError):
        return None
