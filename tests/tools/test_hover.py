"""Values under the pointer: where they are, which they are, and that their boxes can be seen."""

import itertools
import re

import numpy as np
import pytest

from rank0rl.tools import chart, figures, hover
from rank0rl.tools.series import Series


def places(*series, width=4.0):
    """Return, for each place of a chart, its left and right end and its text."""
    found = []
    with figures.style() as figure_class:
        figure = figure_class(figsize=(width, 2.0), layout="constrained")
        axis = figure.add_subplot()
        for one in series:
            one.draw(axis)
        figures.inline_svg(
            figure, "x", "", lambda: found.append(hover.layer(axis, series, str)) or ""
        )
    pattern = r'class="at"><rect x="(.*?)" .*? width="(.*?)".*?<text.*?>(.*?)</text>'
    each = re.findall(pattern, found[0])
    return [(float(x), float(x) + float(w), re.sub("<.*?>", "", text)) for x, w, text in each]


def line(label, x, y, **more):
    return Series(label, np.array(x, float), np.array(y, float), **more)


def test_places_touch_and_are_not_too_many():
    many = places(line("a", range(1, 1002), range(1001)))
    assert 38 < len(many) <= 43  # an axis of about 255 points, in places of at least 6
    assert many[-1][2].startswith("1001.0")
    for (_, end, _), (start, _, _) in itertools.pairwise(many):
        assert start == pytest.approx(end, abs=0.11)


def test_each_series_shows_only_its_own_points():
    a = line("a", [1, 2, 3, 4], [5, np.nan, 7, 8])
    b = line("b", [1.1, 6], [9, 10])
    texts = [re.sub(" ?\N{BLACK CIRCLE}", "", text) for _, _, text in places(a, b)]
    assert texts == ["1.0 a 5 b 9", "3.0 a 7", "4.0 a 8", "6.0 b 10"]


def test_a_box_stays_inside_the_figure():
    found = []
    chart_width = 72 * 4.0
    one = line("a long label of a line that goes on and on", [1, 2, 3], [1, 2, 3])
    with figures.style() as figure_class:
        figure = figure_class(figsize=(4.0, 2.0), layout="constrained")
        axis = figure.add_subplot()
        one.draw(axis)
        figures.inline_svg(
            figure, "x", "", lambda: found.append(hover.layer(axis, [one], str)) or ""
        )
    boxes = re.findall(r'class="box" x="(.*?)" .*?width="(.*?)"', found[0])
    assert len(boxes) == 3
    for x, width in boxes:
        assert float(x) >= 0
        assert float(x) + float(width) <= chart_width


def test_a_circle_is_on_its_point():
    one = line("a", [0, 10], [0, 4])
    html = chart.small("t", "", [one], lambda axis: axis.set(xlim=(0, 10), ylim=(0, 4)))
    (x0, y0), (x1, y1) = re.findall(r'<circle class="c0" cx="(.*?)" cy="(.*?)"', html)
    (path,) = re.findall(
        r'<path d="M (\S+) (\S+) \nL (\S+) (\S+) \n"[^>]*style="[^"]*var\(--c0\)', html
    )
    np.testing.assert_allclose([*map(float, (x0, y0, x1, y1))], [*map(float, path)], atol=0.1)


def test_a_logarithmic_axis_of_less_than_a_decade_has_more_labels():
    texts = []
    for most in (23_000, 900_000):
        one = line("a", [1, 2], [9500, most])
        html = chart.small("t", "", [one], logarithmic)
        texts.append(re.findall(r">([\d.]+[kM])<", html))
    assert texts == [["10k", "15k", "20k"], ["10k", "20k", "50k", "100k", "200k", "500k", "1M"]]


def logarithmic(axis):
    axis.set_yscale("log")
    figures.label_decades(axis.yaxis)
