"""Learning rates are a function of the step alone; averages forget the start; shorter moments train as long ones do."""

import importlib.machinery
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_ci
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sdlab import optim, presets
from sdlab.checkpoints import Checkpoints
from sdlab.config import ConfigError, Stage
from sdlab.files import Tensors

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


PLAIN = CONSTANT.model_copy(update={"learning_rate": 1e-3, "betas": (0.9, 0.999)})
ROUNDED = PLAIN.model_copy(update={"optimizer_states": "bfloat16"})
IN_8_BITS = PLAIN.model_copy(update={"optimizer_states": "8bit"})


def descend(recipe: Stage, steps: int) -> tuple[list[float], torch.Tensor]:
    """Losses of a small network that learns a smooth function of two numbers, and its first weights."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    inputs = torch.rand(256, 2)
    target = (3 * inputs[:, :1]).sin() * inputs[:, 1:]
    optimizer, losses = optim.make_optimizer(net, recipe), []
    for _ in range(steps):
        loss = (net(inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net[0].weight.detach()


def push(module: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Optimizer steps `first` to `last` with gradients that depend on the step alone."""
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).add_(0.5)
            parameter.grad = optim.sharded_like(gradient, parameter.detach())
        optimizer.step()


def layer_like(shape: tuple[int, int]) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(*shape)


def save(folder: Path, step: int, layer: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Tensors]:
    """The weights and moments as they come back from a checkpoint."""
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    with Checkpoints(folder) as written:
        saved = written.save(step, {"weights": weights, **optim.optimizer_tensors(layer, optimizer)}, {}, gather=optim.whole)
    return {path.stem: Tensors([path]) for path in saved.glob("*.safetensors")}


def continued(saved: Mapping[str, Tensors], layer: torch.nn.Module, recipe: Stage, *, step: int) -> torch.optim.Optimizer:
    layer.load_state_dict(dict(saved["weights"]))
    optimizer = optim.make_optimizer(layer, recipe)
    optim.restore_optimizer(layer, optimizer, {name: saved[name].__getitem__ for name in optim.MOMENTS}, step=step)
    return optimizer


def test_rounding_at_random_is_right_on_average_and_gives_a_neighbour() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-10, 10).repeat(25)
    draws = torch.stack([optim.rounded(values, optim.random_bits(values, step, first=7)).double() for step in range(1, 4001)])
    unit = 2.0 ** (values.abs().log2().floor().double() - 7)
    assert torch.equal(draws.bfloat16().double(), draws) and ((draws - values).abs() < unit).all()
    assert ((draws.mean(0) - values).abs() < 5 * unit / 2 / 4000**0.5).all()
    assert ((draws.mean(0) - values) / unit).mean().abs() < 5 / 2 / (4000 * 500) ** 0.5


def test_what_bfloat16_holds_is_not_rounded() -> None:
    values = torch.randn(1000).bfloat16().float()
    assert torch.equal(optim.rounded(values, optim.random_bits(values, 1, first=0)).float(), values)


def test_random_bits_belong_to_a_step_and_an_element() -> None:
    whole = optim.random_bits(torch.zeros(50, 20), 3, first=2**32 - 500)
    part = optim.random_bits(torch.zeros(30, 20), 3, first=2**32 - 500 + 400)
    assert torch.equal(part, whole[20:])
    steps = torch.stack([optim.random_bits(torch.zeros(1000), step, first=0) for step in range(1, 1001)])
    assert steps.min() < 20 and steps.max() > 65515 and steps.min() >= 0 and steps.max() <= 65535
    uniform = steps.double() / 65535 - 0.5
    assert uniform.mean(0).abs().max() < 0.05 and uniform.mean(1).abs().max() < 0.05
    assert uniform.square().mean() == pytest.approx(1 / 12, rel=0.01)
    for other in (uniform.roll(1, 0), uniform.roll(1, 1)):
        assert abs((uniform * other).mean()) < 5 / 12 / 1e3


def test_random_bits_are_the_upper_half_of_the_published_hash() -> None:
    def lowbias32(number: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            number = (number ^ number >> shift) * factor % 2**32
        return number ^ number >> 16

    expected = [lowbias32((12345 + element + 7 * 0x9E3779B9) % 2**32) >> 16 for element in range(100)]
    assert optim.random_bits(torch.zeros(100), 7, first=12345).tolist() == expected


def test_the_second_moment_reaches_its_steady_state_where_rounding_to_the_nearest_stands_still() -> None:
    layer = torch.nn.Linear(4096, 1, bias=False)
    optimizer = optim.make_optimizer(layer, ROUNDED)
    nearest = torch.zeros(4096).bfloat16()
    for _ in range(3000):
        layer.weight.grad = torch.full_like(layer.weight, 2.0)
        optimizer.step()
        nearest = (0.999 * nearest.float() + 0.001 * 2.0**2).bfloat16()
    expected = 4 * (1 - 0.999**3000)
    square = optimizer.state[layer.weight]["exp_avg_sq"].double()
    assert square.mean().item() == pytest.approx(expected, rel=0.01) and square.std().item() < 0.1 * expected
    assert nearest.max().item() < 0.6 * expected


def test_bfloat16_moments_go_down_a_quadratic_as_float32_ones_do() -> None:
    def distances(recipe: Stage) -> list[float]:
        layer = layer_like((64, 64))
        optimizer, curvature, left = optim.make_optimizer(layer, recipe), torch.logspace(-2, 2, 64), []
        for _ in range(300):
            layer.weight.grad = layer.weight.detach() * curvature
            optimizer.step()
            left.append((layer.weight.detach().square() * curvature).sum().item())
        return left

    long, short = distances(PLAIN), distances(ROUNDED)
    assert short[::20] == pytest.approx(long[::20], rel=0.03) and long[-1] < 0.01 * long[0]


def test_a_network_learns_with_bfloat16_moments_as_with_float32_ones() -> None:
    long, theirs = descend(PLAIN, 500)
    short, ours = descend(ROUNDED, 500)
    assert short[::25] == pytest.approx(long[::25], rel=0.05) and long[-1] < 0.2 * long[0]
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_the_first_step_is_that_of_float32() -> None:
    layers = layer_like((3, 2)), layer_like((3, 2))
    for layer, recipe in zip(layers, (ROUNDED, PLAIN), strict=True):
        push(layer, optim.make_optimizer(layer, recipe), 1, 1)
    assert torch.allclose(layers[0].weight, layers[1].weight, rtol=1e-6, atol=0)


def test_bfloat16_moments_that_come_from_a_checkpoint_go_on_bit_for_bit(tmp_path: Path) -> None:
    layer, twin = layer_like((30, 20)), layer_like((30, 20))
    optimizer = optim.make_optimizer(layer, ROUNDED)
    push(layer, optimizer, 1, 5)
    restored = continued(save(tmp_path, 5, layer, optimizer), twin, ROUNDED, step=5)
    push(layer, optimizer, 6, 12)
    push(twin, restored, 6, 12)
    ours, theirs = optim.optimizer_tensors(layer, optimizer), optim.optimizer_tensors(twin, restored)
    assert torch.equal(layer.weight, twin.weight) and torch.equal(layer.bias, twin.bias)
    assert all(torch.equal(ours[moment][name], theirs[moment][name]) for moment in optim.MOMENTS for name in ("weight", "bias"))


def test_bfloat16_moments_take_half_the_bytes_in_memory_and_on_the_disk(tmp_path: Path) -> None:
    sizes = {}
    for states in ("float32", "bfloat16"):
        layer = layer_like((100, 100))
        optimizer = optim.make_optimizer(layer, ROUNDED.model_copy(update={"optimizer_states": states}))
        before = optim.optimizer_tensors(layer, optimizer)
        push(layer, optimizer, 1, 1)
        after = optim.optimizer_tensors(layer, optimizer)
        save(tmp_path / states, 1, layer, optimizer)
        there = [sum(tensor.nbytes for group in kept.values() for tensor in group.values()) for kept in (before, after)]
        files = [path.stat().st_size for path in (tmp_path / states).glob("checkpoints/*/exp_avg*.safetensors")]
        sizes[states] = [*there, sum(files) // 1000 * 1000]
    assert sizes["bfloat16"] == [20_200 * 2, 20_200 * 2, 40_000] and sizes["float32"] == [20_200 * 4, 20_200 * 4, 81_000]


def _on_a_rank(rank: int, folder: Path) -> None:
    """Steps of a sharded layer whose rows do not divide evenly, a checkpoint after five of them, and what is there at the end."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    module = torch.nn.Sequential(layer_like((4, 5)), layer_like((5, 3)))
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = optim.make_optimizer(module, ROUNDED)
    for first, last in ((1, 5), (6, 8)):
        push(module, optimizer, first, last)
        groups = {"weights": dict(module.named_parameters()), **optim.optimizer_tensors(module, optimizer)}
        wholes = {name: {key: optim.whole(tensor) for key, tensor in group.items()} for name, group in groups.items()}
        optimizer = optim.make_optimizer(module, ROUNDED)
        optim.restore_optimizer(module, optimizer, {name: wholes[name].__getitem__ for name in optim.MOMENTS}, step=last)
    if rank == 0:
        torch.save(wholes, folder / "wholes.pt")
    torch.distributed.destroy_process_group()


@in_ci
def test_shards_with_bfloat16_moments_are_parts_of_the_whole_bit_for_bit(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_on_a_rank, (tmp_path,), nprocs=2)
    sharded = torch.load(tmp_path / "wholes.pt", weights_only=True)
    module = torch.nn.Sequential(layer_like((4, 5)), layer_like((5, 3)))
    optimizer = optim.make_optimizer(module, ROUNDED)
    push(module, optimizer, 1, 8)
    wholes = {"weights": dict(module.named_parameters()), **optim.optimizer_tensors(module, optimizer)}
    assert all(torch.equal(sharded[name][key], tensor) for name, group in wholes.items() for key, tensor in group.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_random_bits_and_bfloat16_moments_are_the_same_on_a_gpu() -> None:
    values = torch.randn(1000, 33)
    bits = optim.random_bits(values, 9, first=2**31 - 5)
    assert torch.equal(optim.random_bits(values.cuda(), 9, first=2**31 - 5).cpu(), bits)
    assert torch.equal(optim.rounded(values.cuda(), bits.cuda()).cpu(), optim.rounded(values, bits))


def made_up(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """As if bitsandbytes were installed, or not."""
    spec = importlib.machinery.ModuleSpec("bitsandbytes", None) if there else None
    monkeypatch.setattr("importlib.util.find_spec", {"bitsandbytes": spec}.__getitem__)


@pytest.mark.parametrize(
    ("device_type", "strategy", "there", "message"),
    [
        ("cpu", "auto", True, "optimizer_states='8bit' needs a GPU; use optimizer_states='bfloat16'"),
        ("cuda", "fsdp", True, "'8bit' cannot be used with strategy='fsdp'; use optimizer_states='bfloat16', or ddp"),
        ("cuda", "ddp", False, r"pip install 'sdlab\[bitsandbytes\]', or use optimizer_states='bfloat16'"),
    ],
)
def test_8_bits_are_refused_where_they_cannot_be(
    device_type: str, strategy: str, there: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(monkeypatch, there)
    with pytest.raises(ConfigError, match=message):
        optim.check_states(IN_8_BITS, device_type, strategy=strategy)
    for recipe in (CONSTANT, ROUNDED):
        optim.check_states(recipe, device_type, strategy=strategy)


def test_8_bits_are_allowed_on_a_gpu_with_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, True)
    optim.check_states(IN_8_BITS, "cuda", strategy="ddp")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Any:
    """Where bitsandbytes is tried: its CPU kernels do the same to moments as those of a GPU."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return request.param


def test_moments_in_8_bits_come_back_from_a_checkpoint_nearly_as_they_were(device: str, tmp_path: Path) -> None:
    layer, twin = layer_like((200, 101)).to(device), layer_like((200, 101)).to(device)
    optimizer = optim.make_optimizer(layer, IN_8_BITS)
    push(layer, optimizer, 1, 20)
    before = {moment: optim.whole(optim.optimizer_tensors(layer, optimizer)[moment]["weight"]) for moment in optim.MOMENTS}
    saved = save(tmp_path, 20, layer, optimizer)
    restored = continued(saved, twin, IN_8_BITS, step=20)
    state, other = optimizer.state[layer.weight], restored.state[twin.weight]
    assert other.keys() == state.keys() and other["step"] == 20 and other["state1"].dtype == torch.uint8
    assert restored.state[twin.bias]["state1"].dtype == torch.float32
    assert torch.equal(restored.state[twin.bias]["state2"], optimizer.state[layer.bias]["state2"])
    for moment in optim.MOMENTS:
        assert torch.equal(saved[moment]["weight"], before[moment].cpu())
        again = optim.whole(optim.optimizer_tensors(twin, restored)[moment]["weight"])
        assert (again - before[moment]).norm() < 0.02 * before[moment].norm()
    push(layer, optimizer, 21, 40)
    push(twin, restored, 21, 40)
    moved = layer.weight - saved["weights"]["weight"].to(device)
    assert (layer.weight - twin.weight).norm() < 0.02 * moved.norm()


def test_moments_in_8_bits_are_made_long_one_at_a_time(device: str) -> None:
    layer = layer_like((200, 101)).to(device)
    optimizer = optim.make_optimizer(layer, IN_8_BITS)
    before = optim.optimizer_tensors(layer, optimizer)
    assert all(tensor.dtype == torch.float32 and not tensor.any() for group in before.values() for tensor in group.values())
    push(layer, optimizer, 1, 1)
    tensor = optim.optimizer_tensors(layer, optimizer)["exp_avg"]["weight"]
    assert tensor.is_meta and (tensor.shape, tensor.dtype) == (layer.weight.shape, torch.float32)
    expected = 0.1 * layer.weight.grad
    assert (optim.whole(tensor) - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_network_learns_with_moments_in_8_bits(device: str) -> None:
    layer, exact = layer_like((128, 128)).to(device), layer_like((128, 128)).to(device)
    for one, recipe in ((layer, IN_8_BITS), (exact, PLAIN)):
        push(one, optim.make_optimizer(one, recipe), 1, 100)
    assert (layer.weight - exact.weight).norm() < 0.05 * exact.weight.norm()
