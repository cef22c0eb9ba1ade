"""rank0rl/mpi/ moves data between ranks and knows nothing of learning."""

import re

import pytest
from helpers.ranks import HERE

WORDS = (
    r"agents?|polic(y|ies)|episodes?|rewards?|rollouts?|fragments?|observations?|obs|gamma|"
    r"advantages?|reinforcement|num_envs|iterations?|algos?|nets"
)
FILES = sorted((HERE.parent / "rank0rl" / "mpi").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_word_of_reinforcement_learning(path):
    text = path.read_text().replace("No word of reinforcement learning.", "")
    assert [match[0] for match in re.finditer(rf"\b({WORDS})\b", text, re.IGNORECASE)] == []
