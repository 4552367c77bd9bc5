"""Adds the results of a drafter to a bundle's report, which `export` wrote before `draft` ran."""

from collections.abc import Mapping, Sequence
from typing import Any

from tide_export.report.html_tables import html_table
from tide_export.report.wording import counted, escaped, percent
from tide_export.routers.drafter_weights import CONFIDENCES

BEGIN, END = "<!-- drafts -->", "<!-- /drafts -->"  # the section between them is replaced
SOURCES = {"drafter": "the drafter", "lookup": "prompt lookup", "exit": "early exits"}


def with_drafts(page: str, record: Mapping[str, Any], drafts: Mapping[str, Sequence[int]], speed: float) -> str | None:
    """Returns the page with a section about drafts; None: the page has no markers for it.

    Args:
        record: the record of the training (`drafting.report.DraftReport`).
        drafts: drafted and accepted tokens of the measured generations, by source.
        speed: speed of lossless mode relative to full depth in these.
    """
    begin, end = page.find(BEGIN), page.find(END)
    if not 0 <= begin < end:
        return None
    return page[: begin + len(BEGIN)] + _section(record, drafts, speed) + page[end:]


def _section(record: Mapping[str, Any], drafts: Mapping[str, Sequence[int]], speed: float) -> str:
    temperature, acceptance = f"temperature {record['settings']['temperature']:g}", record["acceptance"]
    shares = zip(acceptance["sampled"], acceptance["greedy"], strict=True)
    chains = [[f"draft {n}", percent(sampled), percent(greedy)] for n, (sampled, greedy) in enumerate(shares, 1)]
    bounds = zip(CONFIDENCES, [*CONFIDENCES[1:], 1.0], acceptance["by_confidence"], strict=True)
    confident = [[f"{low:g} to {high:g}", percent(share)] for low, high, share in bounds]
    rows = [
        [SOURCES[source], f"{count:,}", percent(accepted / count)]
        for source, (count, accepted) in drafts.items()
        if count
    ]
    return (
        "<section><h2>Drafts of lossless mode</h2>"
        f"<p>A drafter, trained on {counted(record['tokens'], 'token')} of the model's own answers. In lossless mode, "
        f"whose tokens are those of full depth, decoding was {speed:.2f} times as fast on the machine that trained "
        f"it, at {escaped(temperature)}.</p>"
        + (html_table(["source of drafts", "made", "accepted"], rows) if rows else "<p>Nothing was drafted.</p>")
        + f"<p>Accepted of drafts for {counted(record['held_out'], 'held-out answer')}, each after accepted ones, and "
        "of first drafts by the drafter's own probability:</p>"
        + html_table(["", escaped(temperature), "greedy"], chains)
        + html_table(["probability", f"accepted, {escaped(temperature)}"], confident)
        + "</section>"
    )
