"""The results of a study, from folders of runs that were never made."""

import csv
import re

import numpy as np
import pytest
from helpers.runs import write_run

from rank0rl.run.folder import read_run
from rank0rl.tools import plot
from rank0rl.tools.study import results


@pytest.fixture
def study(tmp_path):
    for seed, end in enumerate((300.0, 500.0, 700.0)):
        write_run(tmp_path / f"a{seed}", [100.0] * 9 + [end], seconds=24.0, seed=seed)
    write_run(tmp_path / "b", [100.0] * 9 + [50.0], seed=0, algo="trpo")
    (tmp_path / results.FILE).write_text(
        'envs = ["Walker2d"]\nminutes_to = [400.0]\nseeds = "0:3"\n'
        'search_seeds = "100:101"\nobjective = "final"\n'
    )
    return tmp_path


def test_a_row_for_each_agent(study):
    ppo, trpo = results._of_agents(results._read(study), [400.0])
    assert (ppo["environment"], ppo["agent"], ppo["seeds"]) == ("Walker2d-v5", "ppo", 3)
    assert ppo["return"] == ppo["iqm"] == 500.0
    assert (ppo["min"], ppo["max"]) == (300.0, 700.0)
    assert ppo["low"] < 500.0 < ppo["high"]
    assert ppo["steps"] == 10000
    assert ppo["minutes"] == 4.0
    assert ppo["to 400"] == 4.0
    assert trpo["to 400"] == np.inf
    assert np.isnan(trpo["iqm"])


def test_files(study):
    text = results.write(study, [400.0])
    assert (study / "table.md").read_text() == text
    assert "| Walker2d-v5 | ppo | 3 | 500 |" in text
    assert "never" in text.splitlines()[-1]
    rows = [*csv.DictReader((study / "runs.csv").open())]
    assert [row["run"] for row in rows] == ["a0", "a1", "a2", "b"]
    assert [row["minutes to 400"] for row in rows] == ["inf", "4", "4", "inf"]
    assert len([*csv.DictReader((study / "table.csv").open())]) == 2
    assert (study / "learning.png").stat().st_size > 1000


def test_interquartile_means_are_a_table(study):
    for seed in range(3):
        write_run(study / f"c{seed}", [0.0, 9.0], seed=seed, env_id="Hopper-v5")
        for env_id in ("Walker2d-v5", "Hopper-v5"):
            name = f"d{seed}{env_id}"
            write_run(study / name, [0.0, 8.0 + seed], seed=seed, env_id=env_id, algo="x|y")
    (study / "b" / "progress.csv").unlink()
    text = results.write(study)
    assert "| agent | mean | low | high |\n|:---|---:|---:|---:|\n| ppo | " in text
    assert re.search(r"^\| x\\\|y \| \d\.\d{3} \|", text, re.MULTILINE)


def test_runs_that_have_not_ended_do_not_count_once_others_have(study, capsys):
    (study / "a1" / "summary.json").write_text('{"ended": "total_steps 10000"}')
    (study / "b" / "summary.json").write_text('{"ended": ""}')
    ((_, (run,)),) = results._read(study).items()
    assert run.folder.name == "a1"
    said = [f"left out: {study / name} has not come to its end" for name in ("a0", "a2", "b")]
    assert capsys.readouterr().err.splitlines() == said


def test_minutes_are_until_an_evaluation_where_there_are_some(tmp_path):
    columns = {"eval_return": ["", 900.0, ""]}
    write_run(tmp_path / "a", [950.0] * 3, seconds=60.0, columns=columns, eval_every=2)
    run = read_run(tmp_path / "a")
    assert results._minutes_until(run, 900.0) == 2.0
    assert results._minutes_until(run, 901.0) == np.inf


def test_a_run_that_ended_early_keeps_its_last_return(study):
    write_run(study / "a3", [400.0], seed=3)
    (curves, _) = plot.curves_of(results._read(study), to_longest=True).values()
    assert curves.x[-1] == 10000
    assert curves.ret[3, -1] == 400.0


def test_the_page(study):
    html = results.page(study)
    assert "Walker2d-v5" in html
    assert "lowest to highest" not in html  # of several agents, each band has a name of its own
    assert "ppo, seeds" in html
    assert "Search" not in html
    (study / "search.csv").write_text("trial,lr,value,state\n0,0.1,5,complete\n1,0.2,9,pruned\n")
    html = results.page(study)
    assert html.index("<td>0.2</td>") < html.index("<td>0.1</td>")
    assert "Trials have the seeds 100:101" in html


def test_report_finds_a_study(study, capsys):
    from rank0rl.tools import report

    assert report.main([str(study)]) == 0
    assert (
        "Interquartile" not in (study / "report.html").read_text()
    )  # of one environment there is none
    assert report.main([str(study / "a0"), str(study)]) == 2
    assert "is a study: name it alone" in capsys.readouterr().err
