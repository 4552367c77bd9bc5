"""Streams the documents of a dataset SPEC, for `calibrate`, `validate` and `tune`.

A SPEC is a local file, folder or glob, or else the id of a dataset on the Hugging Face hub. A folder is searched for
.txt, .json, .jsonl and .parquet files; a file or glob may have any other suffix and is then read as text. Memory does
not grow with the dataset, and nothing is cached on disk.
"""

import glob
import hashlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tide_export.common.progress import quiet_loggers
from tide_export.errors import DatasetError, one_line

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # suffix -> builder of `datasets`
FOLDER_SUFFIXES = {".txt", *BUILDERS}
DOCUMENT_CHARS = 65_536  # approximate size of the documents that a plain text file is cut into
WIKITEXT = ("Salesforce/wikitext", "wikitext-103-raw-v1")

# ` = Homarus gammarus = ` opens a WikiText article; ` = = Description = = ` only a section of one.
_ARTICLE_TITLE = re.compile(r" ?= (?!=).*(?<!=) = ?")


class Documents:
    """The documents of a dataset in their order, for a single iteration.

    Attributes:
        spec: the dataset SPEC.
        count: documents read so far.
        hashes: `document_hash` of each document read. Calibration records them, so that `tune` recognizes documents
            that the routers saw.
        omitted: number of documents skipped because their hashes are in `omit`; `count`, `hashes` and `sha256` do not
            include them.

    Iterating yields non-blank `str`. A document is a row of a .jsonl, .json, .parquet or hub dataset (the column
    `text`, or else the first column of strings), a part of a plain text file (see `split_documents`), or an article of
    WikiText.

    Raises:
        DatasetError: when constructed: a local file or folder is missing, or a glob matches nothing; while iterating:
            a file is broken, the hub does not have the dataset or cannot be reached, or there is no text.
    """

    def __init__(self, spec: str, omit: Collection[str] = ()):
        self.spec = spec
        self.count = self.omitted = 0
        self._omit = omit
        self.hashes: list[str] = []
        self._digest = hashlib.sha256()
        self._files = _local_files(spec)

    @property
    def sha256(self) -> str:
        """The hash of the documents read so far, in UTF-8 with a zero byte after each."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[str]:
        try:
            with quiet_loggers(logging.CRITICAL, "datasets", "huggingface_hub", "fsspec"):  # they log what is raised
                for text in self._texts():
                    if not text.strip():
                        continue
                    text = text.encode("utf-8", "replace").decode()  # a lone surrogate would stop the tokenizer
                    name = document_hash(text)
                    if name in self._omit:
                        self.omitted += 1
                        continue
                    self._digest.update(text.encode() + b"\0")
                    self.hashes.append(name)
                    self.count += 1
                    yield text
        except DatasetError:
            raise
        except Exception as error:  # pyarrow, fsspec, the hub and codecs raise many types
            raise DatasetError(
                f"dataset {self.spec!r} cannot be read: {one_line(error, 300)}; --dataset FILE reads text of your own"
            ) from error
        if not self.count:
            raise DatasetError(f"dataset {self.spec!r} holds no text")

    def _texts(self) -> Iterator[str]:
        if self._files is None:
            return _hub_texts(self.spec)
        return (text for file in self._files for text in _file_texts(self.spec, file))


def document_hash(text: str) -> str:
    """Returns the first 16 hex digits of the sha256 of a document's UTF-8 text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def split_documents(lines: Iterable[str]) -> Iterator[str]:
    """Joins the lines of a plain text (line ends included) into documents of bounded size.

    A document ends before the title of a WikiText article, at the first blank line after `DOCUMENT_CHARS` characters,
    or at any line end after twice as many.
    """
    parts: list[str] = []
    size = 0
    for line in lines:
        if parts and _ARTICLE_TITLE.fullmatch(line.rstrip("\r\n")):
            yield "".join(parts)
            parts, size = [], 0
        parts.append(line)
        size += len(line)
        if size >= 2 * DOCUMENT_CHARS or (size >= DOCUMENT_CHARS and not line.strip()):
            yield "".join(parts)
            parts, size = [], 0
    yield "".join(parts)


def _local_files(spec: str) -> list[Path] | None:
    """Returns the files of a SPEC, sorted, or None for a hub id."""
    path = Path(spec).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in FOLDER_SUFFIXES and p.is_file())
        if not files:
            raise DatasetError(f"dataset {spec!r}: the folder holds no .txt, .json, .jsonl or .parquet file")
        return files
    if any(character in spec for character in "*?["):
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())  # noqa: PTH207 - absolute ones too
        if not files:
            raise DatasetError(f"dataset {spec!r}: no file matches this pattern")
        return files
    if spec.startswith((".", "/", "~")) or spec.count("/") > 1 or path.suffix.lower() in FOLDER_SUFFIXES:
        raise DatasetError(f"dataset {spec!r}: no such file or folder")
    return None


def _file_texts(spec: str, file: Path) -> Iterator[str]:
    if file.stat().st_size == 0:
        return
    try:
        builder = BUILDERS.get(file.suffix.lower())
        if builder is None:
            with file.open(encoding="utf-8") as lines:
                yield from split_documents(iter(lambda: lines.readline(DOCUMENT_CHARS), ""))
        else:
            yield from _column(str(file), _stream(builder, data_files=glob.escape(str(file)), split="train"))
    except DatasetError:
        raise
    except UnicodeDecodeError as error:
        raise DatasetError(f"dataset {spec!r}: {file} is not UTF-8 text") from error
    except Exception as error:
        raise DatasetError(f"dataset {spec!r}: {file} is broken: {one_line(error, 300)}") from error


def _hub_texts(spec: str) -> Iterator[str]:
    """Reads `id`, `id:config` or `id:config:split` (default: train) from the hub."""
    name, config, split, *_ = [*spec.split(":"), "", ""]
    if name in ("wikitext", WIKITEXT[0]):
        name, config = WIKITEXT[0], config or WIKITEXT[1]
    rows = _stream(name, config or None, split=split or "train")
    texts = _column(spec, rows)
    if name == WIKITEXT[0]:  # its rows are the lines of articles, blank ones stripped of their line end
        return split_documents(text or "\n" for text in texts)
    return texts


def _stream(*args: Any, **options: Any) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset  # seconds to import, and plain text does not need it

    return load_dataset(*args, streaming=True, **options)


def _column(origin: str, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yields the column `text`, or else the first column of strings."""
    column = None
    for row in rows:
        if column is None:
            column = (
                "text" if "text" in row else next((key for key, value in row.items() if isinstance(value, str)), None)
            )
        value = row.get(column) if column is not None else None
        if isinstance(value, str):
            yield value
        elif value is not None:
            raise DatasetError(f"dataset {origin!r}: column {column!r} holds {type(value).__name__}, not text")
    if column is None:
        raise DatasetError(f"dataset {origin!r} has no column of text")
