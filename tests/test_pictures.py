"""Pictures in docs/ load nothing, and diagrams are what their scripts draw."""

import re
import runpy
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PICTURES = sorted(DOCS.glob("*.svg"))


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_loads_nothing_and_its_text_is_text(path):
    text = path.read_text()
    assert {*re.findall(r"\bhttps?://[^\"')\s]*", text)} <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "@import" not in text
    assert "@font-face" not in text
    assert "<text" in text
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("script", ["diagrams", "timeline"])
def test_a_script_draws_the_same_again(script, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "make"))
    monkeypatch.setattr(sys, "argv", [script, "--draw"])
    import theme

    monkeypatch.setattr(theme, "OUT", tmp_path)
    runpy.run_path(str(DOCS / "make" / f"{script}.py"), run_name="__main__")
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn
    assert [path.name for path in drawn if path.read_text() != (DOCS / path.name).read_text()] == []
