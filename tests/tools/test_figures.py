"""Values under the pointer: where they are, and which they are."""

import csv
import itertools
import re

import numpy as np
import pytest

from rank0rl.tools import figures
from rank0rl.tools.figures import Series


def places(*series, finish=lambda axis: None):
    """Return, for each place of a small chart, its left and right end in percent and its text."""
    html = figures.small_chart("t", "", series, finish)
    pattern = r'<span style="left:(.*?)%;width:(.*?)%"></span>.*?<p [^>]*>(.*?)</p>'
    each = re.findall(pattern, html, re.DOTALL)
    return [(float(x), float(x) + float(w), re.sub("<.*?>", "", text)) for x, w, text in each]


def line(label, x, y, **more):
    return Series(label, np.array(x, float), np.array(y, float), **more)


def test_places_touch_and_are_not_too_many():
    many = places(line("a", range(1, 1002), range(1001)))
    assert 30 < len(many) <= 40  # a chart of 245 points, in places of at least 6
    assert many[-1][2].startswith("1,001 steps")
    for (_, end, _), (start, _, _) in itertools.pairwise(many):
        assert start == pytest.approx(end, abs=0.02)


def test_each_series_shows_only_its_own_points():
    a = line("a", [1, 2, 3, 4], [5, np.nan, 7, 8])
    b = line("b", [1.1, 6], [9, 10])
    texts = [re.sub("\N{BLACK CIRCLE}", "", text) for _, _, text in places(a, b)]
    assert texts == ["1 steps a 5 b 9", "3 steps a 7", "4 steps a 8", "6 steps b 10"]


def test_a_dot_is_on_its_point():
    one = line("a", [0, 5, 10], [0, 1, 4])
    html = figures.small_chart("t", "", [one], lambda axis: axis.set(xlim=(0, 10), ylim=(0, 4)))
    dots = re.findall(r'<span class="dot c0" style="left:(.*?)%;top:(.*?)%"', html)
    assert [[*map(float, dot)] for dot in dots] == [[0, 100], [50, 75], [100, 0]]
    # The area that these are shares of is that of the curve in the SVG.
    left, top, width, height = (
        float(share) / 100
        for share in re.search(r"left:(.*?)%;top:(.*?)%;width:(.*?)%;height:(.*?)%", html).groups()
    )
    w, h = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', html).groups())
    path = re.findall(
        r'<path d="M (\S+) (\S+) \nL \S+ \S+ \nL (\S+) (\S+) \n"[^>]*var\(--c0\)', html
    )
    corners = [left * w, (top + height) * h, (left + width) * w, top * h]
    np.testing.assert_allclose([*map(float, path[0])], corners, atol=0.1)


def test_a_logarithmic_axis_of_less_than_a_decade_has_more_labels():
    texts = []
    for most in (23_000, 900_000):
        html = figures.small_chart("t", "", [line("a", [1, 2], [9500, most])], logarithmic)
        texts.append(re.findall(r">([\d.]+[kM])<", html))
    assert texts == [["10k", "15k", "20k"], ["10k", "20k", "50k", "100k", "200k", "500k", "1M"]]


def logarithmic(axis):
    axis.set_yscale("log")
    figures.label_decades(axis.yaxis)


def test_a_table_starts_no_formula_of_a_spreadsheet(tmp_path):
    texts = [
        "=cmd|' /C calc'!A0",
        "+a",
        "-a",
        "@a",
        "\ta",
        "-3.5",
        "-inf",
        "a=b",
        -3.5,
        -2,
        True,
        "",
    ]
    figures.write_csv(tmp_path / "t.csv", [{"x": text, "y": 1} for text in texts])
    found = [row["x"] for row in csv.DictReader((tmp_path / "t.csv").open(newline=""))]
    assert found[:5] == [f"'{text}" for text in texts[:5]]
    assert found[5:] == [str(text) for text in texts[5:]]


def test_a_table_in_markdown_is_text_alone():
    row = ["<img src=x>|](javascript:x)", "[a](b)", "a\\|b", "hidden=[64, 64]", "a\nb"]
    *_, line = figures.markdown(["a"] * 5, [row])
    plain = (r"\<img src=x>\|]\(javascript:x)", r"[a]\(b)", r"a\\\|b", "hidden=[64, 64]", "a b")
    assert line == f"| {' | '.join(plain)} |"


def test_long_names_are_cut():
    """Of 100,000 letters, a minute would go by."""

    def finish(axis):
        axis.set_title("t" * 5000)
        axis.set_yticks([0, 1], ["a" * 5000, "b"])

    html = figures.small_chart("x", "", [line("a", [1, 2], [0, 1])], finish)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", html)
    assert {"t" * 97 + "...", "a" * 97 + "...", "b"} <= {*texts}
    assert max(map(len, texts)) == 100
    with figures.style() as figure_class:
        figure = figure_class()
        figure.suptitle("t" * 5000)
        figure.legend(figure.add_subplot().plot([1, 2], label="a" * 5000), ["a" * 5000])
    figures.image(figure)
    assert figure.get_suptitle() == "t" * 97 + "..."
    assert figure.legends[0].get_texts()[0].get_text() == "a" * 97 + "..."
