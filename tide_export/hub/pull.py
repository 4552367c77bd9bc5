"""`tide-export pull`: downloads a bundle from the Hugging Face hub and checks every file."""

import glob
import logging
import os
import shutil
from pathlib import Path

from huggingface_hub import HfApi

from tide_export.bundle.file_names import MANIFEST_FILE
from tide_export.bundle.manifest import Manifest
from tide_export.bundle.opened import open_bundle
from tide_export.bundle.store import writing_bundle
from tide_export.common.formatting import size
from tide_export.common.progress import stage
from tide_export.common.version import __version__
from tide_export.errors import BundleError, HubError
from tide_export.hub.failures import hub_errors

logger = logging.getLogger("tide_export")


def pull(
    repo: str,
    folder: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Downloads a bundle, checks every file's sha256 and moves it into place in one step.

    An interrupted download stays in a hidden folder beside the target, and the next call resumes it.

    Args:
        repo: id of the repository, user/name.
        folder: folder to write; None: the repository's name in the current folder.
        revision: a branch, tag or commit; None: main.
        overwrite: replace an existing bundle.

    Returns:
        The folder written.

    Raises:
        HubError: repository or revision do not exist, hold no bundle or a damaged one, or the hub cannot be reached.
        BundleError: the folder exists or cannot be written, no space is left, or another release made the bundle.
    """
    target = Path(repo.rpartition("/")[2] if folder is None else folder)
    api = HfApi(library_name="tide_export", library_version=__version__)
    with writing_bundle(target, overwrite) as temporary, hub_errors(repo, revision):
        partial = temporary.with_suffix(".tide-pull")
        commit = api.model_info(repo, revision=revision).sha
        text = Path(api.hf_hub_download(repo, MANIFEST_FILE, revision=commit)).read_bytes()
        files = Manifest.from_json(text, source=f"the {MANIFEST_FILE} of repository {repo!r}").files
        _check_room(sum(info.size for info in files.values()), partial)
        patterns = [glob.escape(name) for name in files]
        api.snapshot_download(repo, revision=commit, local_dir=partial, allow_patterns=patterns)
        (partial / MANIFEST_FILE).write_bytes(text)
        try:
            with stage("checking every file"):
                open_bundle(partial)
        except BundleError as error:
            shutil.rmtree(partial)
            raise HubError(f"the bundle in repository {repo!r} is damaged: {error}") from None
        for name in (*files, MANIFEST_FILE):
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).rename(temporary / name)
        shutil.rmtree(partial)
    return target


def _check_room(total: int, partial: Path) -> None:
    """Checks that the disk has room for what is missing in `partial` of `total` bytes.

    Raises:
        BundleError: it has not.
    """
    done = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
    free = shutil.disk_usage(partial.parent).free
    missing = max(total - done, 0)
    if missing > free:
        raise BundleError(f"no space left on the disk of '{partial.parent}' for {size(missing)}: {size(free)} are free")
    logger.info("downloading %s to %s", size(missing), partial.parent)
