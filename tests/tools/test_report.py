"""The page about a run or a study: it has the numbers, loads nothing, and escapes what users wrote."""

import csv
import json
import re
import sys
from html.parser import HTMLParser

import pytest
from helpers import forks
from helpers.runs import SMALL, train, write_run

from rank0rl.run.folder import read_run
from rank0rl.tools import figures, plot, report

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
        self.open += [tag] * (tag not in ("meta", "br"))  # these have no end

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
    assert not {"#1f77b4", "#000000", "#ffffff"} & set(
        re.findall("#[0-9a-f]{6}", html.partition("</style>")[2])
    )
    assert not re.findall(r"https?://(?!www\.w3\.org/)", html)  # names of SVG's own
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    ids = found.of("id")
    assert len(ids) == len(set(ids))
    inside = {f"#{name}" for name in ids}
    for link in (*found.of("href"), *found.of("xlink:href"), *re.findall(r"url\((.*?)\)", html)):
        assert link in inside
    return found


@pytest.mark.slow
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


def test_a_record_of_which_one_row_in_ten_is_left(tmp_path):
    """As benchmarks/keep_study.py leaves it: times are those of one iteration."""
    columns = {"iteration": [10, 20, 25], "steps": [10_000, 20_000, 25_000]}
    found = page(write_run(tmp_path / "r", [1, 2, 3], seconds=90, columns=columns))
    assert "Share of time: collect 25%, update 50%" in found.of("aria-label")
    assert "25 iterations" in found.text


def test_episodes_one_iteration_and_no_return_yet(tmp_path):
    found = page(write_run(tmp_path / "r", ["nan"], num_episodes=500, seconds=2))
    assert "mean return nan steps 1,000 episodes of 500 10 time 2 s" in found.text
    assert "Mean return by steps: no values" in found.of("aria-label")


def test_one_iteration_is_a_dot(tmp_path):
    for returns, dots in (([3], 5), ([3, 4], 0)):  # return twice, length, speed, kl
        run = write_run(tmp_path / str(dots), returns)
        page(run)
        html = (run / "report.html").read_text()
        assert len(re.findall(r"<use xlink:href=\"#(?!phases)[^>]*fill: var\(--c0\)", html)) == dots


def test_a_share_of_time_is_drawn_over_the_steps_that_it_was_of(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        figures, "inline_svg", lambda f, name, alt: drawn.setdefault(name, f) and alt
    )
    columns = {"collect_s": [50, 25], "update_s": [50, 50]}
    report.of_run(write_run(tmp_path / "r", [1, 2], seconds=100, columns=columns))
    (axis,) = drawn["phases-wide"].axes
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


def test_the_slowest_and_the_fastest_rank_are_no_phases(tmp_path):
    columns = {"collect_s": [50, 50], "slowest_s": [60, 70], "fastest_s": [50, 40]}
    found = page(write_run(tmp_path / "r", [1, 2], seconds=100, columns=columns))
    labels = found.of("aria-label")
    assert "Share of time: collect 50%, update 50%" in labels
    assert (
        "seconds of the slowest rank by steps: first 60, last 70, lowest 60, highest 70" in labels
    )
    assert "2,000 steps \N{BLACK CIRCLE} slowest 70 \N{BLACK CIRCLE} fastest 40" in found.text


def test_values_are_under_the_pointer(tmp_path):
    columns = {"eval_return": ["", 17, ""], "return_min": [1, 2, 3], "return_max": [40, 50, 60]}
    found = page(write_run(tmp_path / "r", [10, 20, 35.5], columns=columns))
    bullet = "\N{BLACK CIRCLE}"
    assert f"1,000 steps {bullet} lowest to highest 1 to 40 {bullet} mean 10" in found.text
    second = f"2,000 steps {bullet} lowest to highest 2 to 50 {bullet} mean 20"
    assert found.text.count(f"{second} {bullet} evaluation 17") == 2  # wide and narrow
    assert f"3,000 steps {bullet} collect 25% {bullet} update 50%" in found.text
    assert f"3,000 steps {bullet} kl 0.04167" in found.text
    assert found.tags.count("li") == 3 + 2  # legends of the returns and of the phases
    assert found.of("class").count("at") == 3 * (2 + 2 + 3)


def test_runs_are_laid_over_each_other(tmp_path):
    columns = {"eval_return": [3, 4], "return_std": [1, 1]}
    one = write_run(tmp_path / "one", [1, 2], columns=columns, lr=0.001)
    more = {"value_loss": [8, 9, 9], "length_mean": [5, 6, 7]}
    two = write_run(
        tmp_path / "two", [5, 6, 7], seed=1, nprocs=3, columns=more, lr=0.002, hidden=[8]
    )
    found = page(one, two)
    bullet = "\N{BLACK CIRCLE}"
    assert "standard deviation" not in found.text
    assert f"1,000 steps {bullet} one 1 {bullet} one, evaluation 3 {bullet} two 5" in found.text
    assert f"3,000 steps {bullet} two 7" in found.text  # one had ended
    assert f"2,000 steps {bullet} one 0.0625 {bullet} two 0.0625" in found.text  # kl
    assert f"2,000 steps {bullet} one 5 {bullet} two 6" in found.text  # length
    assert "value loss" not in found.text  # the first run has none
    table = "run return mean steps episodes time ranks lr seed hidden"
    rows = "one 2 2,000 20 2 h 1 0.001 0 two 7 3,000 30 3 h 3 0.002 1 [8]"
    assert f"{table} {rows}" in found.text
    assert "Settings, first run" in found.text
    assert not re.search(r"total_steps.*total_steps", found.text)
    assert "Runs" not in page(one).text


def test_runs_of_equal_names_are_told_apart(tmp_path):
    one = write_run(tmp_path / "x" / "run", [1, 2])
    two = write_run(tmp_path / "y" / "run", [1, 2])
    found = page(one, two)
    assert f"{one} 2 2,000" in found.text
    assert f"{two} 2 2,000" in found.text


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


@pytest.mark.parametrize("first", ["", "0.5"])
def test_words_of_a_hook_are_not_drawn(tmp_path, first):
    run = write_run(tmp_path / "r", [1, 2])
    path = run / "progress.csv"
    head, *rows = path.read_text().splitlines()
    rows = [f"{row},{words},{{}}" for row, words in zip(rows, (first, "warm"), strict=True)]
    path.write_text("\n".join([f"{head},level,coefficients", *rows, ""]))
    assert "level" not in page(run).text


def test_long_runs_are_thinned_to_means(tmp_path):
    found = page(write_run(tmp_path / "r", [*range(900)]))
    assert "mean of 3 iterations" in found.text
    label = "Mean return by steps: first 1, last 898, lowest 1, highest 898"
    assert label in found.of("aria-label")
    run = read_run(tmp_path / "r")
    columns = report._thinned(run, ["steps", "seconds", "return_mean"])
    assert columns["steps"][:2].tolist() == [3000, 6000]
    assert columns["steps"][-1] == 900_000
    assert set(columns["seconds"]) == {3600}


def test_very_many_columns_are_not_all_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_CHARTS", 5)
    run = write_run(tmp_path / "r", [1, 2])
    path = run / "progress.csv"
    head, *rows = path.read_text().splitlines()
    more = "".join(f",k{i}" for i in range(50))
    path.write_text("\n".join([head + more, *(row + ",1" * 50 for row in rows)]) + "\n")
    found = page(run)
    drawn = [label for label in found.of("aria-label") if re.match(r"k(l|\d+) by steps", label)]
    assert len(drawn) == 5
    assert "Columns of progress.csv that are not drawn: 46." in found.text


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
    table = folder / "speedup.csv"
    table.write_text(table.read_text().replace("True", "<b>True</b>"))
    found = page(folder)
    assert "ranks 1 2 steps / s 2,787 3,726 speedup 1 1.337" in found.text
    assert "oversubscribed False <b>True</b>" in found.text
    assert "ranks 1 2 collect 500 250" in found.text  # milliseconds
    assert f"Advice {EVIL} Speedup" in found.text
    assert f"cpu {EVIL} cores 2" in found.text
    assert f"speedup {EVIL}" in found.text
    labels = found.of("aria-label")
    assert "Speedup by number of ranks: 1 with 1, 1.337 with 2" in labels
    assert "Milliseconds of an iteration by number of ranks: 500 with 1, 250 with 2" in labels
    for word in ("slowest to fastest", "ceiling", "Prediction"):
        assert word not in found.text


def test_a_study_with_ceilings_repeats_and_a_prediction(tmp_path):
    folder = study(tmp_path / "s")
    head = "nprocs,speedup,ceiling,expected,steps_per_s,steps_per_s_min,steps_per_s_max,slowest_s"
    (folder / "speedup.csv").write_text(
        f"{head}\n1,1,1,1,100,90,110,9\n4,3,3.5,3.25,300,200,400,9\n"
    )
    (folder / "predicted.csv").write_text(
        "nprocs,nodes,experiment,predicted,measured,helps,seconds\n"
        "1,1,same,101,100,,1\n8,2,same,700,,overlap (1.3),1\n64,2,larger,5000,,<i>,1\n"
    )
    (folder / "predicted.json").write_text(json.dumps({"notes": [EVIL]}))
    found = page(folder)
    assert "4 ranks \N{BLACK CIRCLE} ideal 4 \N{BLACK CIRCLE} ceiling 3.5" in found.text
    assert "slowest to fastest repeat 2 to 4 \N{BLACK CIRCLE} measured 3" in found.text
    head = "ranks nodes steps / s measured experiment what helps"
    assert f"{head} 1 1 101 100 same 8 2 700 same overlap (1.3) 64 2 5,000 larger <i>" in found.text
    assert "1 rank \N{BLACK CIRCLE} predicted, same 101 \N{BLACK CIRCLE} measured 100" in found.text
    assert "64 ranks \N{BLACK CIRCLE} predicted, larger 5,000" in found.text
    assert f"{EVIL} " in found.text + " "
    assert (
        "Milliseconds of an iteration ranks 1 4 slowest rank 9,000 9,000" in found.text
    )  # no chart


def test_a_study_of_text_is_refused(tmp_path, capsys):
    folder = study(tmp_path / "s")
    table = folder / "speedup.csv"
    table.write_text(table.read_text().replace("1.337", "fast"))
    assert report.main([str(folder)]) == 2
    assert "column speedup of the study must hold numbers" in capsys.readouterr().err


def test_a_study_that_is_under_way(tmp_path):
    found = page(study(tmp_path / "s"))
    assert "Advice" not in found.text
    assert "Machine" not in found.text


def cell(name, value, row=-1):
    """Change a cell of a record."""

    def change(folder):
        path = folder / "progress.csv"
        lines = [line.split(",") for line in path.read_text().splitlines()]
        lines[row][lines[0].index(name)] = value
        path.write_text("\n".join(map(",".join, lines)) + "\n")

    return change


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def without_nprocs(folder):
    path = folder / "config.toml"
    path.write_text(path.read_text().replace("nprocs", "n"))


RUNS = [
    *(cell("seconds", value) for value in ("0", "inf", "-1", "")),
    *(cell("steps", value) for value in ("0", "inf", "nan", "1e308", "1.5")),
    *(cell("steps_per_s", value) for value in ("0", "inf", "1e308", "")),
    *(cell("return_mean", value) for value in ("1e308", "inf", "")),
    cell("steps", "1e308", 1),
    without_nprocs,
]
STUDIES = [
    *(written("study.toml", f"minutes_to = {value}\n") for value in ("5", "[[1]]", '["a"]')),
    *(written("search.csv", text) for text in ("a,value\n1,2\n", "a\n1\n", "a,value\n1,x\n")),
    *(written("search.csv", text) for text in ("a,value\n", "")),
]
SPEEDUPS = [
    *(written("speedup.json", f'{{"{name}": 5}}') for name in ("settings", "notes", "machine")),
    written("speedup.json", '{"machine": [1]}'),
    written("speedup.csv", "nprocs,speedup\n0,1\n0,2\n"),
    written("speedup.csv", "nprocs,speedup\n,\n"),
    written("speedup.csv", "nprocs,speedup\n1e308,1e308\n2,-1e308\n"),
    written("predicted.csv", "nprocs,predicted\n1,2\n"),
    written("predicted.csv", "nprocs,experiment,predicted\n0,a,inf\n1e308,a,-1\n"),
]


@pytest.mark.fast(15)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("kind", "change"),
    [("run", c) for c in RUNS]
    + [("study", c) for c in STUDIES]
    + [("speedup", c) for c in SPEEDUPS],
)
def test_what_no_run_has_written_is_one_line(kind, change, tmp_path, capsys):
    folder = tmp_path / "r"
    if kind == "speedup":
        study(folder)
    else:
        write_run(folder / "a" if kind == "study" else folder, [10, 20, 30])
    if kind == "study":
        (folder / "study.toml").write_text('envs = ["Walker2d"]\n')
    change(folder)
    out = str(tmp_path / "x.png")
    runs = [(plot, "--out", out), (plot, "--x", "hours", "--out", out)] if kind == "run" else []
    for tool, *args in [(report,), *runs]:
        code = tool.main([str(folder), *args])
        said = capsys.readouterr().err
        assert (code, said) == (0, "") or (code == 2 and said.startswith("error: "))
        assert said.count("\n") == bool(said)
        assert not said or str(tmp_path) in said or "must overlap" in said


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
        ([run, tmp_path / "nowhere"], "nowhere"),
        ([run, empty], "study is a study"),
        ([empty, run], "study is a study"),
        ([run, "--out", tmp_path / "none" / "x.html"], "none/x.html"),
    ):
        assert report.main([*map(str, args)]) == 2
        assert fact in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(run)]) == 2
    assert "pip install -e '.[plot]'" in capsys.readouterr().err


def test_a_phone_gets_figures_of_its_own(tmp_path):
    found = page(write_run(tmp_path / "r", [1, 2]))
    assert [kind for kind in found.of("class") if kind in ("chart wide", "chart narrow")] == [
        "chart wide",
        "chart narrow",
    ] * 2
    sizes = [box.split()[2:] for box in found.of("viewbox")]
    assert sizes[:2] == [["691.2", "252"], ["280.8", "194.4"]]


def test_it_is_one_of_the_tools():
    done = forks.run("-m", "rank0rl", "report", "nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
