"""Writes the prompts that the drafters of the published tables are trained on: half messages, half code to complete.

    python tools/benchmarks/draft_prompts.py out/prompts.jsonl [--count 12000]
    tide-export draft MODEL BUNDLE --prompts out/prompts.jsonl --minutes 90

The messages are those that `tide-export draft` ships. The code is beginnings that it ships for models without a chat
template, and beginnings of Python files, classes and functions of calibration/text/python-stdlib.jsonl. None is among
the prompts in tools/benchmarks/prompts.
"""

import argparse
import json
import random
import re
from pathlib import Path

from tide_export.drafting.shipped_prompts import shipped_prompts

TEXT = Path(__file__).parents[2] / "calibration/text/python-stdlib.jsonl"
BLOCK = re.compile(r"^(?=\s*(?:def|class|async def|@|import|from) )", re.MULTILINE)
LINES = (3, 30)  # of a beginning from the files
CODE = re.compile(r"\{(identifier|class_name|module|task)")  # in the forms of shipped beginnings of code


def beginnings(count: int, generator: random.Random) -> list[str]:
    """Returns beginnings of code: a quarter shipped ones, the rest from files."""
    shipped = [text for text, form in shipped_prompts(0, count, chat=False).items() if CODE.search(form)]
    files = [json.loads(line)["text"] for line in TEXT.read_text(encoding="utf-8").splitlines()]
    starts = [(text, match.start()) for text in files for match in BLOCK.finditer(text)]
    cut = list[str]()
    while len(cut) < count * 3 // 4:
        text, start = generator.choice(starts)
        lines = text[start:].splitlines(keepends=True)[: generator.randint(*LINES)]
        cut.append("".join(lines).strip("\n"))
    return list(dict.fromkeys(cut)) + shipped[: count - count * 3 // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=12_000)
    arguments = parser.parse_args()
    half, generator = arguments.count // 2, random.Random(0)
    entries = [{"prompt": text} for text in shipped_prompts(0, half, chat=True)]
    entries += [{"text": text} for text in beginnings(half, generator)]
    generator.shuffle(entries)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries), encoding="utf-8")
    print(f"{len(entries)} prompts in {arguments.file}")


if __name__ == "__main__":
    main()
