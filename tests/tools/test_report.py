"""The page about a run or a study: it has the numbers, loads nothing, and escapes what users wrote."""

import base64
import csv
import json
import re
import sys
from html.parser import HTMLParser

import warm
from runs import SMALL, train, write_run

from rank0rl.tools import report

EVIL = '<script>alert("x")</script>'


class Page(HTMLParser):
    """Text, tags, and attributes of a page; fails where tags do not match."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(html)
        assert self.open == []
        self.text = " ".join(self.words)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.open += [tag] * (tag not in ("meta", "img"))  # these have no end

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data.split() if self.open and self.open[-1] != "style" else []

    def of(self, name):
        return [value for key, value in self.attributes if key == name]


def page(folder, *args):
    assert report.main([str(folder), *map(str, args)]) == 0
    html = (folder / "report.html").read_text()
    found = Page(html)
    assert "var(--c0)" in html or "svg" not in found.tags
    assert not {"#1f77b4", "#000000", "#ffffff"} & set(re.findall("#[0-9a-f]{6}", html[5000:]))
    assert not re.findall(r"https?://(?!www\.w3\.org/)", html)  # names of SVG's own
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    ids = found.of("id")
    assert len(ids) == len(set(ids))
    inside = {f"#{name}" for name in ids}
    for link in (*found.of("href"), *found.of("xlink:href"), *re.findall(r"url\((.*?)\)", html)):
        assert link in inside
    return found


def test_a_real_run(tmp_path):
    train(tmp_path, *SMALL, "--total-steps", "192", "--env-kwargs", "render_mode=rgb_array")
    found = page(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "CartPole-v1, ppo, seed 0" in found.text
    assert f"mean return {summary['return_mean']:.4g} steps of 192 192 episodes" in found.text
    assert summary["weights_sha256"] in found.text
    assert '{"render_mode": "rgb_array"}' in found.text
    assert "minibatch_size 32" in found.text
    for word in ("entropy", "explained variance", "length mean", "torch", "train.py"):
        assert word in found.text, word
    assert found.tags.count("svg") == len(found.of("aria-label"))


def test_numbers_curves_and_spread(tmp_path):
    columns = {
        "return_std": [1, 2, 3],
        "return_min": [0, 1, 2],
        "return_max": [30, 40, 50],
        "eval_return": ["", 17, ""],
        "memory_mb": [100, 200, 300],
    }
    run = write_run(tmp_path / "r", [10, 20, 35.5], seconds=90, nprocs=4, columns=columns)
    found = page(run)
    short = "mean return 35.5 steps of 9,000 3,000 episodes 30 time 4.5 min steps / s 11.11"
    assert f"{short} ranks 4" in found.text
    labels = found.of("aria-label")
    assert "Mean return by steps: first 10, last 35.5, lowest 10, highest 35.5" in labels
    assert "Share of time: collect 25%, update 50%" in labels  # and no wait: there was none
    assert "kl by steps: first 0.125, last 0.04167, lowest 0.04167, highest 0.125" in labels
    assert "memory mb by steps: first 100, last 300, lowest 100, highest 300" in labels
    for word in ("lowest to highest", "standard deviation", "evaluation", "collect 25%"):
        assert word in found.text
    assert "numpy 2.4.6" in found.text
    plain = page(write_run(tmp_path / "plain", [10, 20]))
    assert "standard deviation" not in plain.text
    assert "evaluation" not in plain.text
    assert not re.search(r"mean of \d+ iterations", plain.text)


def test_episodes_one_iteration_and_no_return_yet(tmp_path):
    found = page(write_run(tmp_path / "r", ["nan"], num_episodes=500, seconds=2))
    assert "mean return nan steps 1,000 episodes of 500 10 time 2 s" in found.text
    assert "Mean return by steps: no values" in found.of("aria-label")


def test_one_iteration_is_a_dot(tmp_path):
    for returns, dots in (([3], 4), ([3, 4], 0)):  # return, length, speed, kl
        run = write_run(tmp_path / str(dots), returns)
        page(run)
        html = (run / "report.html").read_text()
        assert len(re.findall(r"<use xlink:href=\"#(?!phases)[^>]*fill: var\(--c0\)", html)) == dots


def test_a_share_of_time_is_drawn_over_the_steps_that_it_was_of(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        report.figures, "inline_svg", lambda f, name, alt: drawn.setdefault(name, f) and alt
    )
    columns = {"collect_s": [50, 25], "update_s": [50, 50]}
    report.of_run(write_run(tmp_path / "r", [1, 2], seconds=100, columns=columns))
    (axis,) = drawn["phases"].axes
    collect, update = (
        {tuple(point) for point in patch.get_paths()[0].vertices.round(6).tolist()}
        for patch in axis.collections
    )
    assert {point for point in collect if point[1]} == {
        *((0, 0.5), (1000, 0.5)),
        *((1000, 0.25), (2000, 0.25)),
    }
    assert update == {point for point in collect if point[1]} | {
        *((0, 1.0), (1000, 1.0)),
        *((1000, 0.75), (2000, 0.75)),
    }
    assert all(figure.axes[0].get_xlim() == (0, 2000) for figure in drawn.values())


def test_what_users_write_is_text(tmp_path):
    run = write_run(
        tmp_path / "<b>r",
        [1, 2],
        env_id=f'a"{EVIL}',
        algo="my:<i>&amp;",
        env_kwargs={"name": EVIL, "$x$": "$y$"},
        **{EVIL: 1},
    )
    path = run / "progress.csv"
    path.write_text(path.read_text().replace(",kl\n", ',"<u>""$kl$"\n'))
    found = page(run)
    assert not {"b", "i", "u"} & set(found.tags)
    assert f'a"{EVIL}, my:<i>&amp;, seed 0' in found.text
    assert json.dumps({"name": EVIL, "$x$": "$y$"}) in found.text
    assert "<b>r: 2 iterations" in found.text
    assert f"{EVIL} 1" in found.text
    assert '<u>"$kl$' in found.text
    assert '<u>"$kl$ by steps: first 0.125, last 0.0625, lowest 0.0625, highest 0.125' in found.of(
        "aria-label"
    )


def test_long_runs_are_thinned_to_means(tmp_path):
    found = page(write_run(tmp_path / "r", [*range(900)]))
    assert "mean of 3 iterations" in found.text
    label = "Mean return by steps: first 1, last 898, lowest 1, highest 898"
    assert label in found.of("aria-label")
    run = report.run_data.read(tmp_path / "r")
    columns = report._thinned(run, ["steps", "seconds", "return_mean"])
    assert columns["steps"][:2].tolist() == [3000, 6000]
    assert columns["steps"][-1] == 900_000
    assert set(columns["seconds"]) == {3600}


def study(folder):
    folder.mkdir()
    rows = [
        {
            "nprocs": 1,
            "steps_per_s": 2787.4,
            "speedup": 1,
            "oversubscribed": False,
            "collect_s": 0.5,
        },
        {
            "nprocs": 2,
            "steps_per_s": 3726,
            "speedup": 1.337,
            "oversubscribed": True,
            "collect_s": 0.25,
        },
    ]
    with (folder / "speedup.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_a_study(tmp_path):
    folder = study(tmp_path / "s")
    about = {"command": f"speedup {EVIL}", "machine": {"cpu": EVIL, "cores": 2}, "notes": [EVIL]}
    (folder / "speedup.json").write_text(json.dumps(about))
    (folder / "speedup.png").write_bytes(b"\x89PNG picture")
    table = folder / "speedup.csv"
    table.write_text(
        table.read_text().replace("True", "<b>True</b>").replace("1.337", '"""1.337"""')
    )
    found = page(folder)
    assert (
        'nprocs steps / s speedup oversubscribed 1 2,787 1 False 2 3,726 "1.337" <b>True</b>'
        in found.text
    )
    assert "Seconds of an iteration nprocs collect 1 0.5 2 0.25" in found.text
    assert f"Advice {EVIL} Speedup" in found.text
    assert f"cpu {EVIL} cores 2" in found.text
    assert f"speedup {EVIL}" in found.text
    (source,) = found.of("src")
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == b"\x89PNG picture"
    assert found.of("alt") == ['Speedup by number of ranks: 1 with 1, "1.337" with 2']


def test_a_study_that_is_under_way(tmp_path):
    found = page(study(tmp_path / "s"))
    assert "Advice" not in found.text
    assert "img" not in found.tags


def test_where_the_page_goes(tmp_path, capsys):
    run = write_run(tmp_path / "r", [1, 2])
    page(run)
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    first = (run / "report.html").read_bytes()
    assert report.main([str(run), "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_bytes() == first


def test_wrong_use(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "good", [1, 2])
    empty = study(tmp_path / "study")
    (empty / "speedup.csv").write_text("nprocs,speedup\n")
    for args, fact in (
        ([tmp_path / "nowhere"], "nowhere"),
        ([write_run(tmp_path / "empty", [])], "empty/progress.csv"),
        ([empty], "speedup.csv"),
        ([run, "--out", tmp_path / "none" / "x.html"], "none/x.html"),
    ):
        assert report.main([*map(str, args)]) == 2
        assert fact in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(run)]) == 2
    assert "pip install -e '.[plot]'" in capsys.readouterr().err


def test_it_is_one_of_the_tools():
    done = warm.run("-m", "rank0rl", "report", "nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
