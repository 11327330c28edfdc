"""Learning rates are a function of the step alone; averages forget the start."""

import pytest
import torch

from sdlab import optim, presets

CONSTANT = presets.get("tiny").stages["stage1_32"].model_copy(update={"warmup_steps": 10, "learning_rate": 1.0, "lr_schedule": "constant"})
COSINE = CONSTANT.model_copy(update={"lr_schedule": "cosine", "schedule_steps": 110})


def test_the_warm_up_is_linear_and_then_the_rate_is_constant() -> None:
    assert [optim.learning_rate(CONSTANT, step) for step in (1, 5, 10, 11, 10_000)] == pytest.approx([0.1, 0.5, 1, 1, 1])


def test_the_cosine_falls_from_the_full_rate_to_nearly_zero_at_the_horizon() -> None:
    rates = [optim.learning_rate(COSINE, step) for step in range(10, 111)]
    assert rates[0] == 1 and rates == sorted(rates, reverse=True) and 0 < rates[-1] < 1e-3
    assert optim.learning_rate(COSINE, 500) == 0


def test_the_average_follows_the_closed_form() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    ema = optim.Ema(layer, decay=0.9)
    start = expected = layer.weight.item()
    for step in range(1, 200):
        with torch.no_grad():
            layer.weight.fill_(start + step)
        ema.update(layer, step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * (start + step)
    assert ema.tensors["weight"].item() == pytest.approx(expected, rel=1e-5)


def test_adam_moments_come_back_bit_for_bit() -> None:
    def one_step(layer: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        layer(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    optimizer = optim.make_optimizer(layer, CONSTANT)
    one_step(layer, optimizer)
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(layer.state_dict())
    restored = optim.make_optimizer(twin, CONSTANT)
    saved = optim.optimizer_tensors(layer, optimizer)
    moments = {name: {key: value.clone() for key, value in group.items()} for name, group in saved.items()}
    optim.restore_optimizer(twin, restored, {name: group.__getitem__ for name, group in moments.items()}, step=1)
    one_step(layer, optimizer)
    one_step(twin, restored)
    assert torch.equal(layer.weight, twin.weight)


def test_a_saved_average_comes_back_bit_for_bit() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    ema, other = optim.Ema(layer, decay=0.9), optim.Ema(torch.nn.Linear(3, 2), decay=0.9)
    other.restore(ema.tensors.__getitem__)
    assert all(torch.equal(ema.tensors[name], other.tensors[name]) for name in ema.tensors)


def test_before_the_first_step_the_moments_are_zero() -> None:
    layer = torch.nn.Linear(3, 2)
    saved = optim.optimizer_tensors(layer, optim.make_optimizer(layer, CONSTANT))
    assert all(not tensor.any() for group in saved.values() for tensor in group.values())


@pytest.mark.parametrize(("precision", "fused"), [("32-true", True), ("bf16-mixed", True), ("16-mixed", False)])
def test_adam_is_fused_but_for_scaled_gradients(precision: str, fused: bool) -> None:
    optimizer = optim.make_optimizer(torch.nn.Linear(3, 2), CONSTANT.model_copy(update={"precision": precision}))
    assert optimizer.param_groups[0]["fused"] is fused
