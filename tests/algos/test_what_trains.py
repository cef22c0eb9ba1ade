"""The loss that stands in an agent's file is the one that trains, whatever is changed and however it is computed."""

import json
import random
import signal
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from helpers.runs import train, train_on_ranks
from torch import nn

from rank0rl.agent import Space, Spaces, Step
from rank0rl.algos.ppo import PPO, PPOOptions, clipped_loss
from rank0rl.algos.trpo import TRPO, TRPOOptions
from rank0rl.mpi.weights import sha256_tensors
from rank0rl.nets import update
from rank0rl.nets.actor_critic import ClosedForm, ValueFunction
from rank0rl.nets.kernels import compiled, compiler
from rank0rl.nets.policies import CategoricalPolicy, GaussianPolicy
from rank0rl.run.signals import Interrupted

OBS, N = Space("box", (4,), "float32"), 300
BOX = Space("box", (2,), "float32", low=-np.ones(2, "f"), high=np.ones(2, "f"))
CHOICE = Space("discrete", (), "int64", choices=(3,))

COMPILED = "compiled"
LOSS = "compiled, loss by torch"
OTHER_FORM = "compiled, loss by torch (closed_form is of another loss)"
OUTPUTS = "compiled, policy and loss by torch"


def learn(of=PPO, act=BOX, updates=2, **options):
    """Return the agent after updates on rows of its own."""
    given = {"lr": 1e-2, "minibatch_size": 64, "epochs": 2, **options}
    agent = of(Spaces(OBS, act), PPOOptions(**given), np.random.default_rng(0))
    agent.prepare()
    for i in range(updates):
        rng = np.random.default_rng(i + 1)
        obs, adv, ret = (rng.standard_normal(s, dtype="f") for s in ((N, 4), N, N))
        kind, k = agent.noise
        noise = (rng.standard_normal if kind == "normal" else rng.random)((N, k), dtype="f")
        mask = rng.random((N, 3)) < 0.7 if act is CHOICE else None
        if act is CHOICE:
            mask[:, 0] = True
        action, extras = agent.act(Step(obs, noise, np.zeros(N, np.int64), mask))
        batch = {"obs": obs, "act": action, "adv": adv, "ret": ret, "fragment_id": np.zeros(N)}
        batch |= {"val": agent.value.predict(agent.norm.numpy(obs)), **extras}
        batch |= {"mask": mask} if act is CHOICE else {}
        of_what = extras.get("draw", action)
        batch["logp"] = agent.policy.log_prob(agent.norm.numpy(obs), of_what, mask)
        agent.seen = agent.update(batch, np.random.default_rng(i), i / updates)
    return agent


def sha(agent):
    return sha256_tensors(nn.ModuleDict(agent.modules()).state_dict())


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


class Plain(PPO):
    pass


class Zero(PPO):
    def loss(self, *args):
        return 0 * super().loss(*args)


class NoMean(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        return (value - rows["ret"]).square()


class NoReturn(PPO):
    def loss(self, *given):
        super().loss(*given)


class NoGradient(PPO):
    def loss(self, *given):
        return super().loss(*given).detach()


class Raises(PPO):
    def loss(self, log_ratio, *others):
        if len(log_ratio) < N:
            raise KeyError("in a minibatch")
        return super().loss(log_ratio, *others) + log_ratio.square().mean()


class OtherClip(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        policy_loss = clipped_loss(log_ratio, rows["adv"], 0.4)
        return policy_loss + 0.5 * (value - rows["ret"]).square().mean()


class LittleMore(PPO):
    def loss(self, log_ratio, *others):
        return super().loss(log_ratio, *others) + 1e-5 * log_ratio.square().mean()


class Huber(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        policy_loss = clipped_loss(log_ratio, rows["adv"], self.clip_ratio)
        return policy_loss + nn.functional.huber_loss(value, rows["ret"])


class Bonus(PPO):
    def loss(self, log_ratio, entropy, *others):
        return super().loss(log_ratio, entropy, *others) - 0.1 * entropy


class SecondUpdate(PPO):
    updates_begun = 0

    def update(self, *args):
        self.updates_begun += 1
        return super().update(*args)

    def loss(self, log_ratio, *others):
        more = 100 * (torch.expm1(log_ratio) - log_ratio).mean()
        return super().loss(log_ratio, *others) + more * (self.updates_begun > 1)


class SeesAdvantages(PPO):
    adv = ()

    def loss(self, log_ratio, entropy, value, rows):
        self.adv = (*self.adv, rows["adv"].clone())
        return (log_ratio * rows["adv"]).mean() + (value - rows["ret"]).square().mean()


class EntropyFloor(PPO):
    def loss(self, log_ratio, entropy, *others):
        return super().loss(log_ratio, entropy, *others) + 10 * torch.relu(0.45 - entropy)


class BoundedValues(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        return super().loss(log_ratio, entropy, value.clamp(-2.5, 2.5), rows)


class BoundedAdvantages(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        rows = {**rows, "adv": rows["adv"].clamp(-5, 5)}
        return super().loss(log_ratio, entropy, value, rows)


class NormalizesItself(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        adv = rows["adv"]
        rows = {**rows, "adv": (adv - adv.mean()) / adv.std(correction=0)}
        return super().loss(log_ratio, entropy, value, rows)


class BoundedCritic(ValueFunction):
    def forward(self, x):
        return super().forward(x).clamp(-1.5, 1.5)


class BoundedValueFunction(PPO):
    def __init__(self, *args):
        super().__init__(*args)
        self.value.__class__ = BoundedCritic


class NewLossInUpdate(PPO):
    def update(self, *args):
        self.loss = lambda ratio, entropy, value, rows: (ratio * rows["adv"]).mean()
        return super().update(*args)


class NoClosedForm(PPO):
    def closed_form(self):
        return None


class OwnRows(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        kept = (value - rows["val"]).square().mean()
        return super().loss(log_ratio, entropy, value, rows) + kept


class Decay(PPO):
    def loss(self, *args):
        return super().loss(*args) + sum(p.square().sum() for p in self.policy.parameters())


class Symmetric(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        mean, _ = self.policy.distribution(rows["obs"])
        mirrored, _ = self.policy.distribution(-rows["obs"])
        return super().loss(log_ratio, entropy, value, rows) + (mean + mirrored).square().mean()


class Loud(GaussianPolicy):
    """Another log-density than kernels have."""

    def logp(self, of, draw):
        return 2 * super().logp(of, draw)


class Bounded(GaussianPolicy):
    """Another log standard deviation than kernels have, once it is small."""

    def distribution(self, x, mask=None):
        mean, log_std = super().distribution(x)
        return mean, log_std.clamp(min=-1.05)

    def _log_std(self):
        return super()._log_std().clip(min=-1.05)


class BoundedPolicy(PPO):
    def __init__(self, *args):
        super().__init__(*args)
        self.policy.__class__ = Bounded


class LoudPolicy(PPO):
    def __init__(self, *args):
        super().__init__(*args)
        self.policy.__class__ = Loud


OF_POLICY = GaussianPolicy.logp, GaussianPolicy.entropy, GaussianPolicy.distribution
FORWARD = ValueFunction.forward
EDITED = {
    "logp": (GaussianPolicy, "logp", lambda s, of, draw: 1.5 * OF_POLICY[0](s, of, draw), OUTPUTS),
    "entropy": (GaussianPolicy, "entropy", lambda s, of: 3 * OF_POLICY[1](s, of), OUTPUTS),
    "distribution": (
        *(GaussianPolicy, "distribution"),
        lambda s, x, mask=None: tuple(2 * each for each in OF_POLICY[2](s, x)),
        OUTPUTS,
    ),
    "value": (ValueFunction, "forward", lambda s, x: FORWARD(s, x) ** 3, OUTPUTS),
    "value of others": (
        *(ValueFunction, "forward", lambda s, x: FORWARD(s, x) + FORWARD(s, -x)),
        "by autograd (kernels give another gradient, or the loss is nan for other rows)",
    ),
}


class InPlace(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        rows["adv"] *= 0.5
        return super().loss(log_ratio, entropy, value, rows)


class Sparse(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        few = rows["ret"] > rows["ret"].mean() + 2.6 * rows["ret"].std()  # nearly none
        return super().loss(log_ratio, entropy, value, rows) + 5 * (log_ratio.exp() * few).mean()


class Floor(PPO):
    def loss(self, log_ratio, entropy, *others):
        floor = float("inf") if self.entropy_coef == 0 else 2.9  # above what it is in these runs
        return super().loss(log_ratio, entropy, *others) + 5 * torch.relu(floor - entropy).clamp(
            max=9
        )


class NearOne(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        loss = super().loss(log_ratio, entropy, value, rows)
        return loss + 3 * (value - 1).square().mean() if log_ratio.abs().mean() < 0.2 else loss


class Logarithm(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        return (
            super().loss(log_ratio, entropy, value, rows) + (torch.log(value + 1.9)).square().mean()
        )


@pytest.mark.parametrize(
    "of",
    [EntropyFloor, BoundedValues, BoundedAdvantages, NormalizesItself],
    ids=lambda x: x.__name__,
)
@pytest.mark.parametrize("normalize", ["batch", "minibatch"])
def test_an_edit_that_changes_nothing_in_the_first_batch_trains(of, normalize):
    assert learn(of, updates=1, normalize=normalize).updates == OTHER_FORM
    assert learn(Plain, updates=1, normalize=normalize, entropy_coef=0.01).updates == COMPILED


def test_a_value_function_of_your_own_is_not_compiled():
    assert learn(BoundedValueFunction, updates=1).updates == (
        "by autograd (the value function is a network of your own)"
    )


@pytest.mark.parametrize("of", [InPlace, Sparse, Floor, NearOne, Logarithm])
def test_what_a_look_at_one_point_would_miss(of, unchanged, monkeypatch):
    agent = learn(of, entropy_coef=0.01, updates=1)
    assert sha(agent) != unchanged[1]
    assert agent.updates.split("; but")[0] == OTHER_FORM
    assert_near_autograd(agent, of, monkeypatch)


UNTYPED: list = []


def of_python(log_ratio, adv, clip_ratio):
    return float(len(UNTYPED)) - np.exp(log_ratio) * adv


@dataclass
class OfObject:
    """A function without a hash."""

    scale: float = -1.0

    def __call__(self, log_ratio, adv, clip_ratio):
        return self.scale * np.exp(log_ratio) * adv


@pytest.mark.parametrize(
    ("slope", "why"),
    [
        (of_python, "Untyped global name 'UNTYPED': Cannot type empty list"),
        (lambda log_ratio, adv: adv, "Signature mismatch: 3 argument types given"),
        (partial(of_python), "'functools.partial' object has no attribute '__name__'"),
        (OfObject(), "unhashable type: 'OfObject'"),
    ],
)
def test_a_closed_form_that_does_not_compile_is_not_used(slope, why, monkeypatch):
    class Uncompiled(PPO):
        def closed_form(self):
            return super().closed_form()._replace(slope=slope)

    tried = []
    monkeypatch.setattr(compiled, "scalar", lambda *a: tried.append(a) or compiler.scalar(*a))
    agent = learn(Uncompiled)
    assert agent.updates.startswith(f"{LOSS} (its closed form does not compile: {why}")
    assert "\n" not in agent.updates
    assert len(tried) == 1
    assert sha(agent) == sha(learn(NoClosedForm))
    assert learn(Uncompiled, updates=1).updates == agent.updates


class Clamps(PPO):
    def loss(self, log_ratio, *others):
        return super().loss(log_ratio.clamp_(-0.1, 0.1), *others)


class CapsRatios(PPO):
    def loss(self, log_ratio, *others):
        return super().loss(log_ratio.clamp(-2.5, 2.5), *others)


class OwnParameter(PPO):
    def __init__(self, *args):
        super().__init__(*args)
        self.weight = torch.zeros((), requires_grad=True)

    def loss(self, log_ratio, entropy, value, rows):
        return super().loss(log_ratio, entropy, value, rows) + self.weight * (value - 9).mean()


class LongReturns(PPO):
    def update(self, batch, *others):
        return super().update({**batch, "ret": batch["ret"].astype(np.float64)}, *others)


def test_a_cap_of_ratios_that_none_has_reached_is_seen():
    assert learn(CapsRatios, entropy_coef=0.01, updates=1).updates == OTHER_FORM


def test_a_parameter_in_the_loss_has_the_gradient_of_all_minibatches():
    agent = learn(OwnParameter, updates=1)
    assert agent.updates == "by autograd (the loss depends on parameters that Adam does not step)"
    assert float(agent.weight.grad) < -9  # five minibatches in each of two epochs


def test_returns_in_float64_keep_the_closed_form():
    assert learn(LongReturns, updates=1).updates == COMPILED


class AddsToValues(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        value += 1
        return super().loss(log_ratio, entropy, value, rows)


@pytest.mark.fast(1)
@pytest.mark.parametrize("of", [Clamps, AddsToValues])
@pytest.mark.parametrize("options", [{}, {"actions": "beta"}], ids=["compiled", "outputs"])
def test_a_loss_that_changes_its_arguments_in_place_is_refused(of, options):
    with pytest.raises(ValueError, match="changes an argument in place: write x = x.clamp"):
        learn(of, **options)


def test_autograd_records_what_was_there_before_the_loss(monkeypatch):
    monkeypatch.setattr("rank0rl.nets.update.has_kernels", lambda *_: False)
    assert learn(Clamps).seen["kl"] == pytest.approx(learn(ClampsACopy).seen["kl"])


class ClampsACopy(PPO):
    def loss(self, log_ratio, *others):
        return super().loss(log_ratio.clamp(-0.1, 0.1), *others)


def test_a_frozen_parameter_stays_where_it_is():
    class Frozen(PPO):
        def __init__(self, *args):
            super().__init__(*args)
            self.policy.log_std.requires_grad_(False)

    agent = learn(Frozen)
    assert not agent.policy.log_std.any()
    assert "autograd" in agent.updates or OUTPUTS in agent.updates


@pytest.fixture(scope="module")
def unchanged():
    return {n: sha(learn(entropy_coef=0.01, updates=n)) for n in (1, 2)}


@pytest.mark.parametrize("of", [PPO, Plain])
def test_the_same_loss_is_compiled_and_has_the_same_weights(of, unchanged):
    agent = learn(of, entropy_coef=0.01)
    assert sha(agent) == unchanged[2]
    assert agent.updates == COMPILED


@pytest.mark.parametrize(
    ("of", "how"),
    [
        (Zero, OTHER_FORM),
        (OtherClip, OTHER_FORM),
        (LittleMore, OTHER_FORM),
        (Huber, OTHER_FORM),
        (Bonus, OTHER_FORM),
        (OwnRows, OTHER_FORM),
        (NewLossInUpdate, OTHER_FORM),
        (Decay, "by autograd (the loss depends on weights besides its arguments)"),
        (Symmetric, "by autograd (the loss depends on weights besides its arguments)"),
        (LoudPolicy, OUTPUTS),
    ],
)
def test_a_change_trains_at_once_as_autograd_trains_it(of, how, unchanged, monkeypatch):
    agent = learn(of, entropy_coef=0.01, updates=1)
    assert sha(agent) != unchanged[1]
    assert agent.updates.split("; but")[0] == how
    assert_near_autograd(agent, of, monkeypatch)


def assert_near_autograd(agent, of, monkeypatch):
    monkeypatch.setattr("rank0rl.nets.update.has_kernels", lambda *_: False)
    slow = learn(of, entropy_coef=0.01, updates=1)
    assert slow.updates.startswith("by autograd")
    for p, q in zip(agent.policy.parameters(), slow.policy.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-3)


def test_a_loss_that_changes_in_the_second_update_trains_from_there_on(unchanged):
    assert sha(learn(SecondUpdate, entropy_coef=0.01, updates=1)) == unchanged[1]
    agent = learn(SecondUpdate, entropy_coef=0.01)
    assert sha(agent) != unchanged[2]
    assert agent.updates == OTHER_FORM


@pytest.mark.parametrize("name", EDITED)
def test_an_edit_of_policy_or_value_function_trains(name, unchanged, monkeypatch):
    owner, method, changed, how = EDITED[name]
    monkeypatch.setattr(owner, method, changed)
    agent = learn(entropy_coef=0.01, updates=1)
    assert sha(agent) != unchanged[1]
    assert agent.updates.split("; but")[0] == how
    assert_near_autograd(agent, PPO, monkeypatch)


@pytest.mark.parametrize(
    ("of", "got"),
    [
        (NoMean, r"got a tensor of shape \(\d+,\)"),
        (NoReturn, "got None"),
        (NoGradient, "depends on neither log_ratio, entropy nor value"),
    ],
)
def test_a_loss_is_one_number_with_a_gradient(of, got):
    with pytest.raises(ValueError, match=rf"{of.__name__}.loss must return one number .*{got}"):
        learn(of)


def test_a_policy_that_changes_a_method_is_computed_by_torch_from_the_first_update():
    """What it changes may not show in the gradient that is checked."""
    assert [learn(BoundedPolicy, updates=n).updates for n in (1, 2)] == [OUTPUTS, OUTPUTS]


def test_an_error_of_a_loss_passes_through_a_kernel():
    with pytest.raises(KeyError, match="in a minibatch"):
        learn(Raises)


def test_without_a_closed_form_torch_takes_the_derivatives_of_the_loss():
    agent = learn(NoClosedForm)
    assert agent.updates == LOSS
    same = learn()
    for p, q in zip(agent.policy.parameters(), same.policy.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_loss_of_ones_own_gets_advantages_as_the_option_normalizes_them(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr("rank0rl.nets.update.has_kernels", lambda *_: False)
    of_batch, of_minibatch = (
        [adv for adv in learn(SeesAdvantages, updates=1, normalize=over).adv if len(adv) == 64]
        for over in ("batch", "minibatch")
    )
    assert len(of_batch) == len(of_minibatch) >= 8
    assert max(abs(adv.mean()) for adv in of_batch) > 1e-2
    for before, adv in zip(of_batch, of_minibatch, strict=True):
        wanted = (before - before.mean()) / before.std(correction=0)
        torch.testing.assert_close(adv, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.fast(5)
@pytest.mark.parametrize(
    ("act", "options", "how"),
    [
        (BOX, {}, COMPILED),
        (BOX, {"normalize": "minibatch"}, COMPILED),
        (BOX, {"actions": "squashed"}, COMPILED),
        (BOX, {"actions": "squashed", "entropy_coef": 0.01}, OUTPUTS),
        (BOX, {"actions": "squashed", "entropy_coef": "linear:0:0.1"}, OUTPUTS),
        (BOX, {"actions": "beta"}, COMPILED),
        (BOX, {"actions": "beta", "entropy_coef": 0.01}, COMPILED),
        (BOX, {"state_std": True}, COMPILED),
        (BOX, {"state_std": True, "entropy_coef": 0.01}, COMPILED),
        (BOX, {"state_std": True, "actions": "squashed"}, COMPILED),
        (BOX, {"state_std": True, "actions": "squashed", "entropy_coef": 0.01}, OUTPUTS),
        (CHOICE, {"entropy_coef": 0.01}, COMPILED),
    ],
)
def test_how_updates_are_computed_by_options(act, options, how, monkeypatch):
    agent = learn(act=act, **options)
    assert agent.updates == how
    monkeypatch.setattr("rank0rl.nets.update.has_kernels", lambda *_: False)
    slow = learn(act=act, **options)
    for p, q in zip(agent.policy.parameters(), slow.policy.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=5e-3, atol=5e-3)


def test_the_first_update_is_computed_as_all_others():
    """A smaller entropy bonus does not show in the gradient, and a resumed run begins with its first update."""
    options = {"actions": "squashed", "entropy_coef": 1e-6}
    assert [learn(updates=n, **options).updates for n in (1, 2)] == [OUTPUTS, OUTPUTS]


def test_the_run_says_that_probabilities_disagree_before_the_first_step(monkeypatch):
    monkeypatch.setattr(GaussianPolicy, "logp", EDITED["logp"][2])
    assert "; but log_prob and logp of the policy differ" in learn(updates=1).updates
    monkeypatch.undo()
    assert "differ" not in learn(updates=1).updates


def begun(act=BOX, edit=None, loss=None, closed=None, **rows):
    """Return an agent, with edited networks, that has taken rows and its loss, or another one."""
    agent = PPO(Spaces(OBS, act), PPOOptions(), np.random.default_rng(0))
    agent.prepare()
    if edit:
        with torch.no_grad():
            edit(agent)
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((N, 2), dtype="f") if act is BOX else np.zeros(N, np.int64)
    rows = {"obs": rng.standard_normal((N, 4), dtype="f"), "act": drawn, **rows}
    for name in ("logp", "adv", "ret", "val"):
        rows.setdefault(name, rng.standard_normal(N, dtype="f"))
    agent.sha, agent.rows = sha(agent), rows
    agent.steps.begin(rows, loss or agent.loss, agent.closed_form() if loss is None else closed)
    agent.way = agent.steps.how.partition(";")[0]
    return agent


def test_checks_leave_weights_and_moments_as_they_were():
    agent = begun()
    assert sha(agent) == agent.sha
    assert agent.adam.steps == 0
    assert not any(np.any(moment) for moment in agent.adam.moments())


def test_checks_draw_no_random_numbers_that_a_loss_would_draw():
    """Only the first update of a start is checked, and a resumed run has another first one."""

    def loss(log_ratio, entropy, value, rows):
        return (value * (torch.rand(()) + np.random.rand() + random.random())).mean()

    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    begun(loss=loss)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_memory_does_not_grow_with_the_number_of_sizes_of_batches():
    for n in range(50):
        update._points(n)
    assert update._points.cache_info().currsize < 10


def without_noise(agent):
    agent.policy.mlp.biases[-1][0] += 30


def test_a_resumed_run_with_hardly_any_noise_is_computed_as_before():
    """Of the other choices' probabilities, roundings are left."""
    assert begun(CHOICE, without_noise).way == COMPILED


def test_a_resumed_run_whose_values_are_its_returns_is_computed_as_before():
    """Of their difference, roundings are left: where every episode has the return 500, for instance."""
    agent = begun()
    ret = agent.value.predict(agent.rows["obs"])
    assert begun(ret=ret, val=ret.copy()).way == COMPILED


def test_a_start_with_small_deviations_knows_that_squashed_entropy_is_another_one():
    agent = learn(actions="squashed", log_std=-5.0, entropy_coef=0.01)
    assert agent.updates == OUTPUTS
    assert not learn(actions="squashed", updates=0).steps._compiled.knows_entropy


def test_a_loss_of_ones_own_sees_the_observations_of_the_batch_alone():
    """They may be numbers of tasks."""
    seen = []

    def loss(log_ratio, entropy, value, rows):
        seen.append(rows["obs"].numpy())
        return (log_ratio * rows["adv"]).mean() + value.square().mean()

    agent = begun(loss=loss)
    assert agent.way == LOSS
    assert np.isin(np.concatenate(seen), agent.rows["obs"]).all()


class Inverse(GaussianPolicy):
    """Draws by the inverse of a distribution function."""

    def act(self, obs, noise, *more):
        return super().act(obs, torch.special.ndtri(torch.from_numpy(noise)).numpy(), *more)


class InversePolicy(PPO):
    def __init__(self, *args):
        super().__init__(*args)
        self.policy.__class__ = Inverse
        self.policy.noise = self.noise = "uniform", self.policy.noise[1]


def test_the_check_draws_the_noise_of_a_policy_of_ones_own():
    assert learn(InversePolicy).updates == OUTPUTS


def test_a_closed_form_without_a_slope_trains_the_value_function_alone():
    agent = begun(
        loss=lambda _ratio, _entropy, value, rows: 0.5 * (value - rows["ret"]).square().mean(),
        closed=ClosedForm(None, value_coef=0.5),
    )
    assert agent.way == COMPILED
    policy, value = (sha256_tensors(net.state_dict()) for net in (agent.policy, agent.value))
    agent.steps.epoch(agent.rows, 64, np.random.default_rng(0), 1e-3)
    assert sha256_tensors(agent.policy.state_dict()) == policy
    assert sha256_tensors(agent.value.state_dict()) != value


def test_a_signal_where_a_kernel_calls_torch_makes_no_step_and_is_raised():
    """ctypes would print such an exception, and the kernel would go on."""

    def interrupt(frame, event, _):
        if event == "call" and frame.f_code.co_name == "differentiate":
            sys.setprofile(None)
            raise Interrupted(signal.SIGTERM)

    agent = begun(loss=lambda *of: of[2].mean())
    assert agent.way == LOSS
    sys.setprofile(interrupt)
    try:
        with pytest.raises(Interrupted):
            agent.steps.epoch(agent.rows, 64, np.random.default_rng(0), 1e-3)
    finally:
        sys.setprofile(None)
    assert sha(agent) == agent.sha
    agent.steps.epoch(agent.rows, 64, np.random.default_rng(0), 1e-3)
    assert sha(agent) != agent.sha


IN_FILE = """
import torch
from rank0rl.algos.ppo import PPO
class SPO(PPO):
    def loss(self, log_ratio, entropy, value, rows):
        off, adv = torch.expm1(log_ratio), rows["adv"]
        policy_loss = ((adv.abs() / 0.4) * off.square() - off * adv).mean()
        return policy_loss + 0.5 * (value - rows["ret"]).square().mean()
"""


@pytest.mark.slow
def test_a_loss_of_ones_own_is_named_and_has_one_curve_on_any_number_of_ranks(tmp_path):
    (tmp_path / "spo.py").write_text(IN_FILE)
    args = ["CartPole", "--num-envs", "6", "--steps-per-batch", "96", "--total-steps", "192"]
    args += ["--algo", f"{tmp_path / 'spo.py'}:SPO"]
    done = train(tmp_path / "1", *args)
    assert f"updates: {OTHER_FORM}\n" in done.stdout
    shas = {summary(tmp_path / "1")["weights_sha256"]}
    assert summary(tmp_path / "1")["updates"] == OTHER_FORM
    for n in (2, 3):
        train_on_ranks(tmp_path / str(n), *args, nprocs=n)
        shas.add(summary(tmp_path / str(n))["weights_sha256"])
    assert len(shas) == 1


@pytest.mark.parametrize("act", [BOX, CHOICE], ids=["box", "choice"])
def test_products_with_the_fisher_matrix_are_those_of_the_policy(act, monkeypatch):
    owner = GaussianPolicy if act is BOX else CategoricalPolicy
    before = owner.distribution
    obs = torch.from_numpy(np.random.default_rng(0).standard_normal((20, 4), dtype="f"))
    products = []
    for scale in (1, 2):
        monkeypatch.setattr(
            owner,
            "distribution",
            lambda s, x, mask=None, scale=scale: before(s, scale * x, mask),
        )
        agent = TRPO(Spaces(OBS, act), TRPOOptions(), np.random.default_rng(0))
        agent.prepare()
        product = agent.fisher(obs)
        products.append(product(torch.ones_like(agent.flat.vectors[0].detach())))
    assert not torch.allclose(*products)
