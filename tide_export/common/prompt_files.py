"""Reads files of prompts, which `generate`, self-generated calibration text and drafts share."""

from pathlib import Path

from tide_export.common.values import check_text, parse_json
from tide_export.errors import GenerationError, reason


class Beginning(str):
    """The beginning of a text, which a model continues as it stands: no chat template is put around it."""


def read_prompts(path: Path) -> list[str]:
    """Reads prompts from a file, one per line; of a .jsonl file the field `prompt` or `text`.

    Those of the field `text` are `Beginning`s.

    Raises:
        GenerationError: the file cannot be read or holds no prompts, or a line of a .jsonl file has no prompt.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise GenerationError(f"cannot read prompts from {path}: {reason(error)}") from None
    if not lines:
        raise GenerationError(f"{path} holds no prompts: write one a line, or .jsonl with `prompt` or `text`")
    if path.suffix != ".jsonl":
        return lines
    return [_prompt_of(path, number, line) for number, line in enumerate(lines, 1)]


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        entry = parse_json(line)
    except ValueError:
        entry = None
    field = "prompt" if isinstance(entry, dict) and "prompt" in entry else "text"
    prompt = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(prompt, str):
        raise GenerationError(f"{path}: entry {number} is no JSON object with a string `prompt` or `text`")
    check_text(f"{path}: the prompt of entry {number}", prompt)
    return prompt if field == "prompt" else Beginning(prompt)
