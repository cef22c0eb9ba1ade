"""An agent whose `act` or `process` depends on more than its arguments is found out, or repaired."""

import pytest
from helpers.agents import liar
from helpers.runs import table, train

LIES = {
    "a product of rows": ({"layer": "nn.Linear"}, "for an observation alone"),
    "drawn by torch": (
        {"act": "act = Categorical(torch.from_numpy(p)).sample().numpy()"},
        "act has drawn from torch's global",
    ),
    "drawn by NumPy": ({"act": "np.random.random()"}, "act has drawn from NumPy's global"),
    "drawn by Python": ({"process": "random.random()"}, "process has drawn from Python's global"),
    "a hidden state": (
        {"act": "self.hidden = self.hidden + 1; act = act ^ (self.hidden % 2)"},
        "act returned other actions for the same arguments the second time",
    ),
    "no extras": ({"act": "return act"}, "such as (act, {}): got array(["),
    "a state that is not used": (
        {"act": "self.hidden = self.hidden + 1"},
        "act changes the agent's attribute 'hidden'",
    ),
    "a state of process": (
        {"process": "self.hidden = torch.full((2,), float(np.sum(fragment.obs)))"},
        "process changes the agent's attribute 'hidden'",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_ends_the_run_with_a_line_that_says_why(tmp_path, lie):
    parts, words = LIES[lie]
    done = train(tmp_path / "run", *liar(tmp_path, **parts), expect=1)
    assert words in done.stderr


def test_what_is_prepared_may_draw_and_does_not_change_the_curve(tmp_path):
    words = liar(tmp_path)
    file = tmp_path / "liar.py"
    draws = "import time; [(torch.randn(4), time.sleep(0.001)) for _ in range({})]"
    kept = {}
    for number in (0, 300):
        prepare = f"    def prepare(self):\n        {draws.format(number)}\n\n    def modules"
        file.write_text(file.read_text().replace("    def modules", prepare, 1))
        train(tmp_path / f"{number}", *words)
        kept[number] = [row["weights_sha256"] for row in table(tmp_path / f"{number}")]
    assert kept[0] == kept[300]


def test_weights_and_updates_of_global_generators_are_those_of_the_seed(tmp_path):
    words = liar(tmp_path, act="self.cache = 1")  # set once, it changes nothing
    runs = {}
    for name, nprocs, seed in (("a", 1, 0), ("b", 2, 0), ("c", 1, 1)):
        train(tmp_path / name, *words, "--seed", str(seed), nprocs=nprocs)
        runs[name] = [row["weights_sha256"] for row in table(tmp_path / name)]
    assert runs["a"] == runs["b"] != runs["c"]
