"""`tools/benchmarks/page_pictures.py` draws what the tables of the result pages say."""

import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

PICTURES = Path(__file__).parents[2] / "docs" / "measurements" / "pictures"


def test_each_picture_is_drawn_and_shown_by_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import page_pictures

    monkeypatch.setattr(sys, "argv", ["page_pictures", "--out", str(tmp_path)])
    page_pictures.main()
    pages = "".join(page.read_text() for page in page_pictures.PAGES.glob("*.md"))
    assert {path.name for path in tmp_path.iterdir()} == page_pictures.PICTURES.keys()
    for name in page_pictures.PICTURES:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert f"](pictures/{name})" in pages
        assert (PICTURES / name).is_file()


def test_bars_are_as_high_as_a_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import page_pictures

    batches = "| sequences | ours | other |\n| --- | --- | --- |\n| 1 | **290** | 1.5x |\n| 16 | 1,072 (2x) | .5 |\n"
    served = "| weights | streams | tokens/s | llama.cpp |\n|---|---|---|---|\n| float32 | 1 | 29 | 32 |\n"
    served += "| int4 | 1 | 55 | 41 |\n| int4 | 8 | 131 | 69 |\n"
    page = f"## Beside llama.cpp's server\n\n{served}\n## Batches, equal to the bit\n\n{batches}\n### Next\n\n| a |\n"
    (tmp_path / "serving.md").write_text(page)
    monkeypatch.setattr(page_pictures, "PAGES", tmp_path)
    figure = Figure()
    page_pictures.streams(figure)
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights == [[55, 131, 41, 69], [29, 32], [290, 1072, 1.5, 0.5]]
