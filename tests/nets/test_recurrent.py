"""Networks with a memory: one step, a chunk, and the objective of chunks against steps one by one."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from helpers.policies import not_zero, rng

from rank0rl.agent import Fragment, Space, Spaces, Step
from rank0rl.algos.ppo import PPOOptions, clipped_loss
from rank0rl.nets.recurrent import Recurrent, chunked, firsts, recurrent_networks
from rank0rl.options import OptionError

CELLS = ["gru", "lstm"]
SPACES = Spaces(Space("box", (5,), "float32"), Space("discrete", (), "int64", choices=(3,)))


def layer_of(cell):
    layer = Recurrent(cell, 5, 8, rng())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.manual_seed(1)))
    return layer


def inputs_of(layer, n):
    x = rng(1).standard_normal((n, 5), dtype=np.float32)
    return x, rng(2).standard_normal((n, layer.memory), dtype=np.float32)


@pytest.mark.parametrize("cell", CELLS)
def test_one_step_is_that_of_torch(cell):
    layer = layer_of(cell)
    x, memory = inputs_of(layer, 33)
    theirs = torch.nn.GRUCell(5, 8) if cell == "gru" else torch.nn.LSTMCell(5, 8)
    theirs.load_state_dict({k.removesuffix("_l0"): v for k, v in layer.layer.state_dict().items()})
    given = torch.from_numpy(memory)
    expected = theirs(torch.from_numpy(x), given if cell == "gru" else given.split(8, dim=1))
    expected = expected if cell == "gru" else torch.cat(expected, dim=1)
    ours = layer.step(torch.from_numpy(x), given)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.numpy(x, memory), ours.detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_a_chunk_is_its_steps(cell):
    layer = layer_of(cell)
    x = torch.from_numpy(rng(3).standard_normal((4, 7, 5), dtype=np.float32))
    memory = torch.from_numpy(inputs_of(layer, 4)[1])
    features = layer(x, memory)
    for t in range(7):
        memory = layer.step(x[:, t], memory)
        torch.testing.assert_close(features[:, t], memory[:, :8], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_derivatives_of_a_chunk_are_those_of_torch(cell):
    layer = layer_of(cell)
    x = torch.from_numpy(rng(3).standard_normal((4, 7, 5), dtype=np.float32)).requires_grad_()
    memory = torch.from_numpy(inputs_of(layer, 4)[1]).requires_grad_()
    along = torch.from_numpy(rng(4).standard_normal((4, 7, 8), dtype=np.float32))
    leaves = [x, memory, *layer.parameters()]
    before = memory[None].split(8, dim=2)
    theirs = layer.layer(x, before if cell == "lstm" else before[0])[0]
    expected = torch.autograd.grad((along * theirs).sum(), leaves)
    got = torch.autograd.grad((along * layer(x, memory)).sum(), leaves)
    for ours, of_torch in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, of_torch, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_a_step_does_not_depend_on_how_many_rows_there_are(cell):
    layer = layer_of(cell)
    x, memory = inputs_of(layer, 33)
    whole = layer.numpy(x, memory)
    for size in (1, 2, 3, 8, 16, 17):
        for start in range(0, 33 - size, 5):
            rows = slice(start, start + size)
            assert layer.numpy(x[rows], memory[rows]).tobytes() == whole[rows].tobytes()


def test_an_lstm_is_computed_without_one_dnn_and_without_a_warning():
    layer, x = Recurrent("lstm", 5, 8, rng(0)), torch.ones(2, 3, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = layer(x, torch.zeros(2, 16))
    assert torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        assert torch.equal(out, layer(x, torch.zeros(2, 16)))
    finally:
        torch.backends.mkldnn.enabled = True


def test_weights_are_drawn_from_the_generator_and_an_lstm_remembers_at_first():
    one, same, other = (Recurrent("lstm", 5, 8, rng(seed)) for seed in (0, 0, 1))
    pairs = [*zip(one.parameters(), same.parameters(), strict=True)]
    assert all(torch.equal(p, q) for p, q in pairs)
    assert not torch.equal(one.layer.weight_hh_l0, other.layer.weight_hh_l0)
    assert one.layer.bias_ih_l0.reshape(4, 8)[:, 0].tolist() == [0, 1, 0, 0]
    gate = one.layer.weight_hh_l0[:8]
    torch.testing.assert_close(gate @ gate.T, torch.eye(8))


def test_chunks_by_hand():
    """An episode of 5 steps and one of 3, in chunks of 2."""
    episodes = [slice(0, 5), slice(5, 8)]
    chunks = chunked({"x": np.arange(1, 9)}, episodes, 2)
    assert chunks["x"].tolist() == [[1, 2], [3, 4], [5, 0], [6, 7], [8, 0]]
    assert chunks["steps"].tolist() == [2, 2, 1, 2, 1]
    assert firsts(np.arange(1, 9), episodes, 2).tolist() == [1, 3, 5, 6, 8]


def episode(nets, steps):
    """Return a fragment of two episodes, acted step by step; the second is cut off."""
    obs = rng(4).standard_normal((steps, 5), dtype=np.float32)
    ends = np.array([steps // 3, steps - 1])
    memory, kept, acts, after = np.zeros((1, nets.memory), "f"), [], [], []
    for t in range(steps):
        kept.append(memory[0])
        noise = rng(t).random((1, 1), dtype=np.float32)
        act, extras = nets.act(Step(obs[t : t + 1], noise, np.zeros(1), memory=memory))
        acts.append(act[0])
        memory = extras["memory"]
        if t in ends:
            after.append(memory[0])
            memory = np.zeros_like(memory)
    over = np.arange(steps) == ends[0]
    return Fragment(
        *(0, obs, np.array(acts), rng(5).random(steps), over, np.zeros(steps, bool), ends),
        rng(6).standard_normal((2, 5), dtype=np.float32),
        {"memory": np.array(kept)},
        np.array(after),
    )


@pytest.mark.parametrize("cell", CELLS)
def test_chunks_of_a_fragment_and_their_loss_are_those_of_its_steps(cell):
    options = PPOOptions(recurrent=cell, memory_size=8, hidden=(6,), chunk_steps=4)
    nets = recurrent_networks(options, SPACES, rng())
    with torch.no_grad():
        nets.policy.mlp.weights[-1] *= 50
    not_zero(nets.value)
    fragment = episode(nets, 13)
    rows = nets.process(fragment, 0.9, 0.8)
    assert rows["steps"].tolist() == [4, 1, 4, 4]
    one = nets.each_step(rows)
    np.testing.assert_array_equal(one["obs"], fragment.obs)
    # Values, with the memory of an oracle that goes step by step.
    memory, features = torch.zeros(1, nets.memory), []
    for t in range(13):
        memory = nets.shared.step(torch.from_numpy(fragment.obs[t : t + 1]), memory)
        features.append(memory[:, :8])
        if t == 4:
            memory = torch.zeros_like(memory)
    features = torch.cat(features)
    values = nets.value(features)
    np.testing.assert_allclose(one["val"], values.detach(), atol=1e-5)
    last = nets.shared.step(torch.from_numpy(fragment.end_obs[1:]), memory)
    last_value = nets.value(last[:, :8]).item()
    delta = fragment.rew[12] + 0.9 * last_value - values[12].item()
    assert one["ret"][12] == pytest.approx(delta + values[12].item(), abs=1e-5)
    # The loss of all chunks, in any order, and its gradient, through chunks of 4 steps.
    training = nets.training_rows(rows)
    adv = training["adv"][np.arange(4) < rows["steps"][:, None]]
    assert (adv.mean(), adv.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-3))
    loss_of = partial(clipped_loss, clip_ratio=0.2)
    order = rng(7).permutation(4)
    tensors = {name: torch.from_numpy(x[order]) for name, x in training.items()}
    log_ratio, entropy, value, few = nets.evaluate(nets.trained(), tensors)
    loss = loss_of(log_ratio, few["adv"]) + 0.7 * (value - few["ret"]).square().mean()
    loss = loss - 0.03 * entropy
    assert len(log_ratio) == 13
    assert abs(log_ratio).max() < 1e-4  # the ratios are 1: the weights have not moved
    now = nets.policy.distribution(features)
    error = nets.value(features) - torch.from_numpy(one["ret"])
    steps = {n: torch.from_numpy(nets.process(fragment, 0.9, 0.8)[n]) for n in ("act", "logp")}
    there = torch.arange(4) < torch.from_numpy(rows["steps"])[:, None]
    ratio = nets.policy.logp(now, steps["act"][there]) - steps["logp"][there]
    expected = loss_of(ratio, torch.from_numpy(adv))
    expected = expected + 0.7 * error.square().mean() - 0.03 * nets.policy.entropy(now)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    heads = [*nets.policy.parameters(), *nets.value.parameters()]
    ours = torch.autograd.grad(loss, heads, retain_graph=True)
    for mine, oracle in zip(ours, torch.autograd.grad(expected, heads), strict=True):
        torch.testing.assert_close(mine, oracle, rtol=1e-3, atol=1e-5)
    through = torch.autograd.grad(loss, [*nets.shared.parameters()])
    assert all(g.abs().max() > 0 for g in through)


def test_images_have_no_built_in_memory():
    image = Spaces(Space("box", (12, 12, 3), "uint8"), SPACES.act)
    with pytest.raises(OptionError, match="memory of images .* leave out --recurrent"):
        recurrent_networks(PPOOptions(recurrent="gru"), image, rng())


def test_minibatches_hold_whole_chunks():
    nets = recurrent_networks(PPOOptions(recurrent="gru", chunk_steps=16), SPACES, rng())
    assert [nets.rows_of(n) for n in (1, 16, 64, 70)] == [1, 1, 4, 4]
