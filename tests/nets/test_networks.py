"""Networks with other layers, for images, and of your own."""

from typing import get_args

import numpy as np
import pytest
import torch
from helpers.policies import OBS, drawn_by, noise_for, rng
from torch import nn

from rank0rl.agent import Space, Spaces
from rank0rl.algos.ppo import PPO, PPOOptions
from rank0rl.algos.trpo import TRPO, TRPOOptions
from rank0rl.nets.actor_critic import NetworkOptions
from rank0rl.nets.mlp import MLP, Activation
from rank0rl.nets.networks import network, network_notes
from rank0rl.nets.normalize import is_image, normalizer
from rank0rl.nets.update import has_kernels
from rank0rl.options import OptionError

BOX = Spaces(
    Space("box", (5,), "float32"),
    Space("box", (3,), "float32", low=-np.ones(3, "f"), high=np.ones(3, "f")),
)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_numpy_computes_what_torch_does_and_no_row_depends_on_others(activation, layer_norm):
    mlp = MLP([5, 16, 8, 3], rng(), 1.0, activation, layer_norm)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.manual_seed(2)))
    expected = mlp(torch.from_numpy(OBS)).detach().numpy()
    np.testing.assert_allclose(mlp.numpy(OBS), expected, atol=3e-6, rtol=1e-5)
    rows = mlp.numpy(OBS[:, None, :])
    for size in (1, 2, 7, 16):
        assert mlp.numpy(OBS[:size, None, :]).tobytes() == rows[:size].tobytes()
    functions = {
        "tanh": nn.Tanh(),
        "relu": nn.ReLU(),
        "elu": nn.ELU(),
        "silu": nn.SiLU(),
        "gelu": nn.GELU("tanh"),
    }
    x = torch.from_numpy(OBS)
    for i in range(2):
        x = x @ mlp.weights[i] + mlp.biases[i]
        x = functions[activation](mlp.norms[i](x) if layer_norm else x)
    oracle = x @ mlp.weights[2] + mlp.biases[2]
    np.testing.assert_allclose(expected, oracle.detach(), atol=1e-5, rtol=1e-5)


def test_mlps_have_kernels_and_no_other_networks():
    for options in (
        {},
        {"value_hidden": (8,)},
        *({"activation": activation} for activation in get_args(Activation)),
        {"layer_norm": True},
    ):
        nets = NetworkOptions(hidden=(16,), **options).networks(BOX, rng())
        assert has_kernels(nets.policy, nets.value)
        assert nets.value.mlp.weights[0].shape == (5, 8 if "value_hidden" in options else 16)
        assert nets.policy.mlp.weights[0].shape == (5, 16)
        nets.value.mlp = nn.Linear(5, 1)
        assert not has_kernels(nets.policy, nets.value)


class Mine(PPO):
    @staticmethod
    def make_networks(spaces, options, rng):
        hidden = nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.GELU())
        return {
            "policy": nn.Sequential(hidden, nn.Linear(16, 3)),
            "value": nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)),
        }


class MineTRPO(TRPO):
    make_networks = staticmethod(Mine.make_networks)


def test_weights_of_ones_own_networks_come_of_the_seed():
    def weights(seed):
        torch.manual_seed(rng(None).integers(1000))  # whatever the user's code has drawn
        agent = Mine(BOX, PPOOptions(), rng(seed))
        return agent.flat.vectors[0].detach().numpy().tobytes()

    assert weights(0) == weights(0)
    assert weights(0) != weights(1)


@pytest.mark.parametrize(("kind", "options"), [(Mine, PPOOptions), (MineTRPO, TRPOOptions)])
def test_networks_of_ones_own_act_row_by_row_and_learn(kind, options):
    agent = kind(BOX, options(), rng())
    agent.prepare()
    policy, noise = agent.policy, noise_for(agent.policy, 33)
    whole = drawn_by(policy, OBS, noise)
    for size in (1, 2, 7, 16):
        assert drawn_by(policy, OBS[:size], noise[:size]).tobytes() == whole[:size].tobytes()
    obs = rng(1).standard_normal((256, 5), dtype=np.float32)
    act = drawn_by(policy, obs, noise_for(policy, 256))
    batch = {
        "obs": obs,
        "act": act,
        "logp": policy.log_prob(obs, act),
        "adv": act[:, 0],  # more of the first action is better
        "val": agent.value.predict(obs),
        "ret": rng(2).standard_normal(256).astype("f"),
    }
    before = policy.mode(torch.from_numpy(obs))[:, 0].mean()
    for _ in range(5):
        agent.update(batch, rng(3), 0.0)
    assert policy.mode(torch.from_numpy(obs))[:, 0].mean() > before + 0.01
    assert not any(part.training for part in policy.mlp.module.modules())


def test_values_in_rewards_do_not_change_with_the_scale_if_the_last_layer_is_linear():
    agent = Mine(BOX, PPOOptions(), rng())
    before = agent.value.predict(OBS)
    agent.value.merge(50 * rng(2).standard_normal(100).astype("f"))
    np.testing.assert_allclose(agent.value.predict(OBS), before, rtol=1e-4, atol=1e-5)
    assert agent.value.scale > 10


class ToRows(nn.Module):
    def forward(self, x):
        return x[:, 0].long()


def test_the_layer_that_gives_the_outputs():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.gate = nn.Linear(5, 1), nn.Linear(5, 1)

        def forward(self, x):
            return self.out(x) * torch.sigmoid(self.gate(x))

    gated = Gated()
    before = [p.clone() for p in gated.parameters()]
    assert network((5,), gated, 1, rng(), 1.0).weights == [gated.out.weight]
    assert all(map(torch.equal, gated.parameters(), before))
    assert network((5,), nn.Sequential(gated, nn.Tanh()), 1, rng(), 1.0).weights == []
    with torch.no_grad():  # as some begin; and a layer that is not used
        gated.out.weight.zero_(), gated.out.bias.zero_()
    gated.unused = nn.Linear(3, 1)
    assert network((5,), gated, 1, rng(), 1.0).weights == [gated.out.weight]
    assert not gated.out.weight.any()
    embedded = nn.Sequential(ToRows(), nn.Embedding(1, 4), nn.Linear(4, 1))
    assert network((1,), embedded, 1, rng(), 1.0).weights == []
    last = nn.Sequential(Gated(), nn.Sequential(nn.Linear(1, 1)))
    assert len(network((5,), last, 1, rng(), 1.0).weights) == 1


def test_trpo_shares_no_layer():
    class Shared(TRPO):
        @staticmethod
        def make_networks(spaces, options, rng):
            trunk = nn.Linear(5, 4)
            return {
                "policy": nn.Sequential(trunk, nn.Linear(4, 3)),
                "value": nn.Sequential(trunk, nn.Linear(4, 1)),
            }

    with pytest.raises(OptionError, match="share no layer"):
        Shared(BOX, TRPOOptions(), rng())


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), "BatchNorm1d .* when it learns"),
        (nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.1)), "Dropout .* when it learns"),
        (nn.Linear(4, 3), r"must return \(2, 3\) .* got RuntimeError"),
        (nn.LSTM(5, 3), "got AttributeError"),
        (nn.Linear(5, 3).requires_grad_(False), "must learn"),
        (MLP([5, 4], rng(), 1.0), r"must have \(5, 3\) inputs and outputs: got \(5, 4\)"),
        (nn.Linear(5, 4), r"must return \(2, 3\) for inputs \(2, 5\): got \(2, 4\)"),
    ],
)
def test_a_network_that_does_not_fit_is_refused(network, said):
    class Wrong(PPO):
        make_networks = staticmethod(lambda spaces, options, rng: {"policy": network})

    with pytest.raises(OptionError, match=said):
        Wrong(BOX, PPOOptions(), rng())


@pytest.mark.parametrize("made", [{"actor": nn.Linear(5, 3)}, nn.Linear(5, 3), {"value": None}])
def test_what_is_no_dict_of_networks_is_refused(made):
    class Wrong(PPO):
        make_networks = staticmethod(lambda spaces, options, rng: made)

    with pytest.raises(OptionError, match=r"must return a dict .* \['policy', 'value'\]: got"):
        Wrong(BOX, PPOOptions(), rng())


def noted(kind, **options):
    """Return the notes about the networks of an agent with these options."""
    agent = kind(BOX, PPOOptions(**options), rng())
    return network_notes(agent.modules().values(), agent.options, "cpu")


def test_options_without_effect_on_networks_of_ones_own_are_noted():
    _, note = noted(Mine, hidden=(128,), layer_norm=True, epochs=3)
    assert note.endswith(": --hidden, --layer-norm")
    assert len(noted(Mine, epochs=3)) == 1

    class One(Mine):
        left = ""

        @classmethod
        def make_networks(cls, *args):
            return {k: net for k, net in Mine.make_networks(*args).items() if k != cls.left}

    One.left = "value"  # it is built in, and has these layers
    assert len(noted(One, hidden=(128,))) == 1
    _, note = noted(One, hidden=(128,), value_hidden=(64,))  # of which it takes the latter
    assert note.endswith(": --hidden")
    One.left = "policy"  # which is built in, and acts on all rows at once
    assert noted(One, hidden=(128,)) == []
    [note] = noted(One, value_hidden=(128,), layer_norm=True)
    assert note.endswith(": --value-hidden")
    [note] = noted(PPO, hidden=(), activation="relu")
    assert (
        note
        == "these options have no effect on networks without hidden layers of units: --activation"
    )
    [note] = noted(PPO, chunk_steps=8)
    assert note == "these options have no effect without --recurrent: --chunk-steps"


def test_the_cost_is_said_once_and_an_mlp_of_nets_has_none():
    [note] = noted(Mine)
    assert "one row at a time" in note

    class Ours(PPO):
        @staticmethod
        def make_networks(spaces, options, rng):
            return {"policy": MLP([5, 4, 3], rng, 0.01), "value": MLP([5, 4, 1], rng, 1.0)}

    agent = Ours(BOX, PPOOptions(), rng())
    assert noted(Ours) == []
    assert has_kernels(agent.policy, agent.value)
    assert type(agent.policy.mlp) is MLP


def test_what_is_an_image():
    assert is_image((84, 84, 3), "uint8")
    assert is_image((4, 84, 84), "uint8")
    for shape, dtype in (
        ((84, 84, 3), "float32"),
        ((84, 84), "uint8"),
        ((3, 3, 3), "uint8"),
        ((8, 1, 8), "uint8"),
    ):
        assert not is_image(shape, dtype)
    torch.manual_seed(0)
    norm, inputs = normalizer((8, 8, 1), "uint8")
    assert inputs == (8, 8, 1)
    pixels = np.array([0, 51, 255] + [0] * 61, np.uint8).reshape(1, 8, 8, 1)
    assert norm.numpy(pixels)[0, :3].tolist() == [0, 51, 255]  # a network scales them
    one = network(inputs, nn.Linear(64, 1), 1, rng(), 1.0)
    by_hand = one.net.module(torch.from_numpy(pixels.reshape(1, 64) / np.float32(255)))
    np.testing.assert_allclose(
        one(torch.from_numpy(pixels.reshape(1, 64))).detach(), by_hand.detach(), rtol=1e-5
    )
    np.testing.assert_allclose(one.numpy(pixels.reshape(1, 64)), by_hand.detach(), rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "epochs", "device", "notes"),
    [
        ((12, 10, 3), 5, "cpu", 1),
        ((12, 10, 3), 4, "cpu", 0),
        ((12, 10, 3), 5, "cuda:1", 0),
        ((5,), 5, "cpu", 0),
    ],
)
def test_many_passes_over_images_on_a_cpu_are_noted(shape, epochs, device, notes):
    net = network(shape, (8,), 3, rng(), 1.0)
    given = [nn.Sequential(net), np.zeros(1)], PPOOptions(epochs=epochs), device
    assert len(network_notes(*given)) == notes
