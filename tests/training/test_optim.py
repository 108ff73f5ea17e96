"""Plan, parameter groups, optimiser, schedule, and golden losses."""

import copy
import dataclasses
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import timm.optim.muon
import torch
import torch.nn.functional as F

from locality.errors import UserError
from locality.models import build
from locality.training import OptimConfig, ScheduleConfig
from locality.training.config import EngineConfig, RunConfig
from locality.training.optim import (
    check_optimizer,
    create_optimizer,
    create_schedule,
    make_plan,
    parameter_groups,
)

from .conftest import rates


@pytest.mark.parametrize("optimizer", ["adamw", "adamuon"])
@pytest.mark.parametrize("name", ["convit_nano", "deit_nano", "cvt_13"])
def test_every_parameter_is_in_exactly_one_group(name, optimizer):
    with torch.device("meta"):
        model = build(name)
    groups = parameter_groups(model, OptimConfig(optimizer))
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def spared(name: str, **options: Any) -> set[str]:
    model = build(name)
    undecayed = parameter_groups(model, OptimConfig(**options))[1]["params"]
    chosen = {id(parameter) for parameter in undecayed}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def test_decay_spares_biases_norms_tokens_positions_and_gates():
    left_alone = spared("convit_nano")
    model = build("convit_nano")
    for name, parameter in model.named_parameters():
        special = name in ("cls_token", "pos_embed") or name.endswith("v_pos")
        assert (name in left_alone) == (parameter.ndim <= 1 or special), name
    assert any(name.endswith("gating") for name in left_alone)
    assert any(name.endswith("v_pos") for name in left_alone)
    assert any(name.endswith("pos_proj.weight") for name in spared("timm/convit_tiny"))
    timms = "model.pos_embed.token_projection.weight"  # by a pattern
    assert timms in spared("timm/xcit_nano_12_p16_224")


@pytest.mark.parametrize("name", ["convit_nano", "timm/convit_tiny"])
def test_a_factor_multiplies_the_rate_of_positions_and_gates_at_every_step(name):
    model = build(name)
    factor = OptimConfig(lr=1e-2, position_lr_factor=10)
    schedule = ScheduleConfig(steps=100, warmup=10)
    optimizer = create_optimizer(model, factor, 64)
    plan = make_plan(RunConfig(optim=factor, schedule=schedule, engine=EngineConfig(64)), 1000)
    scheduler = create_schedule(optimizer, plan)
    plain = create_optimizer(model, OptimConfig(lr=1e-2), 64)
    usual = create_schedule(plain, plan)
    for step in (0, 5, 50, 99):
        scheduler.step_update(step)
        usual.step_update(step)
        rate = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
        before = {id(p): g["lr"] for g in plain.param_groups for p in g["params"]}
        assert rate.keys() == before.keys() == {id(p) for p in model.parameters()}
        for name, parameter in model.named_parameters():
            positional = name.endswith(("v_pos", "gating", "pos_proj.weight", "gating_param"))
            expected = before[id(parameter)] * (10 if positional else 1)
            assert rate[id(parameter)] == pytest.approx(expected), name


def test_frozen_parameters_are_in_no_group():
    model = build("convit_nano", freeze_gpsa=True)
    grouped = {id(p) for group in parameter_groups(model, OptimConfig()) for p in group["params"]}
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    assert frozen and not grouped & frozen
    with pytest.raises(UserError, match="trainable"):
        create_optimizer(model.requires_grad_(False), OptimConfig(), 64)


def test_settings_reach_the_optimiser():
    model = build("convit_nano")
    config = OptimConfig("adamw", lr=1e-3, lr_batch=32, betas=(0.8, 0.9), eps=1e-6)
    for group in create_optimizer(model, config, 64).param_groups:
        assert group["lr"] == pytest.approx(2e-3)
        assert group["betas"] == (0.8, 0.9)
        assert group["eps"] == 1e-6
        assert group["fused"] is True
    sgd = create_optimizer(model, OptimConfig("sgd", lr=0.1, momentum=0.7), 64)
    assert {group["momentum"] for group in sgd.param_groups} == {0.7}


def assert_same_updates(model, config, reference, rtol, atol):
    """Four steps of our optimiser, and of the reference on a copy, end in the same weights."""
    other = copy.deepcopy(model)
    ours, theirs = create_optimizer(model, config, 64), reference(parameter_groups(other, config))
    for optimizer, net in ((ours, model), (theirs, other)):
        for step in range(4):
            for number, parameter in enumerate(net.parameters()):
                torch.manual_seed(10 * number + step)
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["convit_nano", "cvt_nano", "timm/test_resnet"])
def test_muon_updates_weights_of_layers_and_adamw_the_rest(name):
    model = build(name)
    groups = parameter_groups(model, OptimConfig("adamuon", position_lr_factor=10))
    chosen = {id(p) for group in groups if group["use_muon"] for p in group["params"]}
    for parameter_name, parameter in model.named_parameters():
        layer = model.get_submodule(parameter_name.rpartition(".")[0])
        depthwise = getattr(layer, "groups", 1) > 1
        matrix = isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)) and not depthwise
        expected = matrix and parameter.ndim > 1 and not parameter_name.endswith("v_pos")
        assert (id(parameter) in chosen) == expected, parameter_name


@pytest.mark.parametrize("algo", ["muon", "adamuon"])
@pytest.mark.parametrize("name", ["convit_nano", "cvt_nano", "timm/test_resnet"])
def test_muon_is_that_of_timm(name, algo, monkeypatch):
    reference = timm.optim.muon
    exact = partial(reference.zeropower_via_newtonschulz, dtype=torch.float32)
    monkeypatch.setattr(reference, "zeropower_via_newtonschulz", exact)
    torch.manual_seed(0)
    config = OptimConfig(algo, lr=1e-3, weight_decay=0.1)
    theirs = partial(reference.Muon, lr=1e-3, momentum=0.9, algo=algo)
    assert_same_updates(build(name), config, theirs, rtol=1e-4, atol=1e-5)


def test_an_optimiser_or_setting_that_cannot_work_is_refused():
    refused = {
        "sgd": ("sgdd", {}),
        "betas": ("sgd", {"betas": (0.9, 0.99)}),
        "second derivatives": ("adahessian", {}),
        "fusedadam": ("fusedadam", {}),  # apex is not installed
    }
    for named, (name, settings) in refused.items():
        with pytest.raises(UserError, match=named):
            check_optimizer(OptimConfig(name, **settings))


def test_the_rate_rises_linearly_and_falls_as_a_cosine():
    schedule = ScheduleConfig(steps=100, warmup=10, warmup_lr=1e-6, min_lr=1e-4)
    optim = OptimConfig(lr=1e-2)
    found = rates(RunConfig(optim=optim, schedule=schedule, engine=EngineConfig(64)), 100)
    assert found[0] == pytest.approx(1e-6)
    rises = [b - a for a, b in itertools.pairwise(found[:10])]
    assert rises == pytest.approx([rises[0]] * len(rises))
    for step in range(10, 100):
        cosine = 1e-4 + 0.5 * (1e-2 - 1e-4) * (1 + math.cos(math.pi * step / 100))
        assert found[step] == pytest.approx(cosine)


@pytest.mark.parametrize("name", ["convit_nano", "cvt_13", "timm/test_resnet"])
def test_layer_decay_multiplies_once_more_for_every_layer_below_the_classifier(name):
    with torch.device("meta"):
        model = build(name)
    rates = {
        id(parameter): group.get("lr_scale", 1.0)
        for group in parameter_groups(model, OptimConfig(layer_decay=0.5))
        for parameter in group["params"]
    }
    by_name = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert len(rates) == len(by_name)
    number = model.layer_ids()
    top = max(number.values())
    assert by_name == {name: 0.5 ** (top - number[name]) for name in by_name}
    first, *_, last = by_name.values()
    assert first == min(by_name.values()) < last == 1


def config(batch: int = 100, **schedule: object) -> RunConfig:
    fields = {"warmup": 0, "steps": None, **schedule}
    return RunConfig(
        schedule=ScheduleConfig(**fields),  # type: ignore[arg-type]
        engine=EngineConfig(batch_size=batch),
    )


def test_every_epoch_is_evaluated_once_even_when_its_end_lies_within_a_step():
    plan = make_plan(config(epochs=10, eval_every=1), 1234)
    due = [step for step in range(plan.steps + 1) if plan.evaluates(step)]
    assert len(due) == 10
    assert due[-1] == plan.steps
    for epoch, step in enumerate(due, start=1):
        assert abs(plan.epoch(step) - epoch) <= 0.5 * 100 / 1234 + 1e-9


@pytest.mark.parametrize("every", [1, 3, 7, 2.5])
def test_steps_fall_due_at_multiples_and_at_the_end(every):
    plan = make_plan(config(steps=20, epochs=None, eval_every=every), 1000)
    due = {step for step in range(21) if plan.evaluates(step)}
    assert due == {round(k * every) for k in range(1, int(20 / every) + 1)} | {20}
    assert plan.evaluations == len(due)
    assert make_plan(config(steps=20, epochs=None, eval_every=0.1), 1000).evaluations == 20


def test_saving_follows_evaluation_unless_told_otherwise():
    follows = make_plan(config(steps=20, epochs=None, eval_every=5), 1000)
    own = make_plan(config(steps=20, epochs=None, eval_every=5, save_every=3), 1000)
    assert [s for s in range(21) if follows.saves(s)] == [5, 10, 15, 20]
    assert [s for s in range(21) if own.saves(s)] == [3, 6, 9, 12, 15, 18, 20]


def test_snapshots_include_the_first_and_the_last_step():
    plan = make_plan(config(steps=20, epochs=None, snapshot_every=8), 1000)
    assert [step for step in range(21) if plan.snapshots(step)] == [0, 8, 16, 20]
    plan = make_plan(config(steps=20, epochs=None), 1000)
    assert not any(plan.snapshots(step) for step in range(21))


def test_a_fraction_keeps_images_and_schedule_when_told_to():
    whole = config(epochs=10, warmup=1)
    part = dataclasses.replace(
        whole,
        data=dataclasses.replace(whole.data, fraction=0.1),
        schedule=dataclasses.replace(whole.schedule, constant_images=True),
    )
    plan = make_plan(part, 500)
    assert dataclasses.replace(plan, schedule=whole.schedule) == make_plan(whole, 5000)


def test_a_run_of_no_step_is_refused():
    with pytest.raises(UserError, match="less than one step"):
        make_plan(config(epochs=0.01), 1000)
    with pytest.raises(UserError, match="no images"):
        make_plan(config(epochs=1), 0)


# Losses of three steps. Golden values: any change to the arithmetic of a model, its parameter
# groups or the optimiser shifts them. Weights and images come from NumPy, which is stable across
# versions.
LOSSES = {
    ("convit_nano", "adamw"): (2.296639158388, 2.264323223529, 2.249768110045),
    ("convit_nano", "adamuon"): (2.296639158388, 2.283891365811, 2.273672226266),
    ("deit_nano", "adamw"): (2.331459534009, 2.282069881537, 2.266933074213),
    ("cvt_micro", "adamw"): (4.620787518966, 3.889110750829, 3.570785459298),
}


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(shape, seed):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


SLOW = ("cvt_micro", "adamw")


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [pytest.param(*each, marks=pytest.mark.slow if each == SLOW else ()) for each in LOSSES],
)
def test_ten_steps_lose_what_they_did(name, optimizer, float64):
    model = build(name, drop_path_rate=0.0)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.add_(-parameter + 0.1 * drawn(parameter.shape, seed))
    updates = create_optimizer(model, OptimConfig(optimizer, lr=1e-3, weight_decay=0.05), 16)
    images, labels = drawn((16, 3, *model.img_size), 1000), torch.arange(16) % 10
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(images), labels)
        updates.zero_grad()
        loss.backward()
        updates.step()
        losses.append(loss.item())
    assert losses[::4] == pytest.approx(LOSSES[name, optimizer], rel=0, abs=1e-9)
