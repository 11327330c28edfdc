"""What a stage takes is known before it runs: FLOPs are the published ones, memory is what a real forward leaves, money is arithmetic."""

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from sdlab import costs, launch, models, presets
from sdlab.config import ConfigError, Lora, Networks, Stage

ATTENTION = {"down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]}
SMALL: dict[str, Any] = {
    **{"in_channels": 4, "out_channels": 4, "block_out_channels": [64, 128], "layers_per_block": 1, **ATTENTION},
    **{"cross_attention_dim": 96, "attention_head_dim": 4, "norm_num_groups": 16},
}
SIZED = SMALL | {
    **{"addition_embed_type": "text_time", "addition_time_embed_dim": 16, "projection_class_embeddings_input_dim": 32 + 6 * 16},
    **{"use_linear_projection": True, "transformer_layers_per_block": [2, 1]},
}
RECIPE = Stage(resolution=128, global_batch_size=8, micro_batch_size=4, learning_rate=1e-4, schedule_steps=100)


def family(unet: dict[str, Any]) -> Networks:
    """Networks of which nothing is stored."""
    encoders = [{"hidden_size": 96, "max_position_embeddings": 20, "projection_dim": 32}]
    vae = {"latent_channels": 4, "block_out_channels": [32, 32, 64, 64]}
    return Networks(frozen="random", vae=vae, text_encoders=encoders, unet=unet, prediction_type="epsilon")


def memory(**changes: Any) -> costs.Memory:
    """Of the small UNet, with changes to the recipe or to how it is run."""
    of_recipe = {name: value for name, value in changes.items() if name in Stage.model_fields and name != "micro_batch_size"}
    running = {name: value for name, value in changes.items() if name not in of_recipe}
    recipe = RECIPE.model_copy(update=of_recipe)
    return costs.memory(family(SMALL), recipe, **{"micro_batch_size": 4, "frozen_parameters": 0, **running})


# Work


@pytest.mark.parametrize(
    ("preset", "resolution", "gflops"),
    [("sd15", 256, 180), ("sd15", 512, 803), ("sd20", 512, 804), ("sdxl", 256, 428), ("sdxl", 512, 1589), ("sdxl", 1024, 6761)],
)
def test_flops_of_a_forward_are_the_published_ones(preset: str, resolution: int, gflops: float) -> None:
    assert costs.forward_flops(presets.get(preset).networks, resolution) == pytest.approx(gflops * 1e9, rel=0.01)


def test_throughput_follows_from_flops_and_the_share_of_them_that_is_reached() -> None:
    networks = presets.get("sd20").networks
    ours: dict[str, Any] = {"device_flops": costs.PEAK_FLOPS["H200"], "utilisation": 0.31, "world_size": 8}
    rate = costs.throughput(networks, 512, **ours)
    assert rate == pytest.approx(1031, rel=0.02)  # MLPerf Training v4.0 on 8 x H200, which reached that share
    assert costs.throughput(networks, 512, **ours, gradient_checkpointing=True) == pytest.approx(0.75 * rate)


def test_time_and_money_are_arithmetic() -> None:
    spent = costs.cost(samples=7_200_000, samples_per_second=100.0, world_size=8, price_per_device_hour=2.5)
    assert (spent.days, spent.device_hours, spent.money) == pytest.approx((20 / 24, 160, 400))
    assert costs.cost(samples=1, samples_per_second=1.0, world_size=1).money is None


# Activations, against what a real forward leaves


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that were made under it and are still there, weights apart."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.weights:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return output

    def bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


class Counted:
    """Checkpoints as diffusers does, and counts what each part makes when it is computed again."""

    def __init__(self, live: Live) -> None:
        self.live, self.again, self.backward = live, [0], False

    def __call__(self, module: Callable[..., Tensor], *args: Any) -> Any:
        return checkpoint(lambda *given: self._run(module, *given), *args, use_reentrant=False)

    def _run(self, module: Callable[..., Tensor], *args: Any) -> Tensor:
        before = self.live.bytes()
        output = module(*args)
        if self.backward:
            self.again.append(self.live.bytes() - before)
        return output


def left_by_a_forward(unet: dict[str, Any], samples: int, *, mixed: bool, again: bool, lora: bool = False) -> int:
    """Bytes that are there at the end of a real forward, or, where parts are computed again, with the largest of them."""
    network = models.build_unet(family(unet)).train()
    live = Live(network)
    counted = Counted(live)
    if again:
        network.enable_gradient_checkpointing(counted)
    if lora:
        network.requires_grad_(False)
        for layer in [layer for name, layer in network.named_modules() if name.endswith(("to_q", "to_k", "to_v", "to_out.0"))]:
            adapt(layer, rank=4)
    kind = torch.bfloat16 if mixed else torch.float32
    added = {"text_embeds": torch.zeros(samples, 32, dtype=kind), "time_ids": torch.zeros(samples, 6, dtype=torch.int64)}
    inputs = (torch.zeros(samples, 4, 16, 16, dtype=kind), torch.zeros(samples, dtype=torch.int64))
    with live, set_checkpoint_early_stop(False), launch.attention(torch.device("cpu")):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            text = torch.zeros(samples, 20, 96, dtype=kind)
            output = network(*inputs, encoder_hidden_states=text, added_cond_kwargs=added, return_dict=False)[0]
            inside = live.bytes()
        after, counted.backward = live.bytes(), True
        output.float().mean().backward()
    return max(inside, after + max(counted.again))


def adapt(layer: Any, *, rank: int) -> None:
    """Add a low-rank change to a linear layer."""
    down, up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
    layer.register_forward_hook(lambda _, inputs, output: output + up(down(inputs[0])))


@pytest.mark.parametrize(
    ("unet", "precision", "samples"),
    [(SMALL, "32-true", 2), (SMALL, "bf16-mixed", 2), (SMALL, "bf16-mixed", 5), (SIZED, "32-true", 3), (SIZED, "bf16-mixed", 3)],
)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_activations_are_what_a_real_forward_leaves(unet: dict[str, Any], precision: str, samples: int, again: bool) -> None:
    told = costs.activation_bytes(family(unet), 128, samples, precision=precision, gradient_checkpointing=again, device_type="cpu")
    left = left_by_a_forward(unet, samples, mixed=precision != "32-true", again=again)
    assert told == pytest.approx(left, rel=0.02)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_an_adapter_keeps_less_and_as_much_as_a_real_one(precision: str) -> None:
    asked: dict[str, Any] = {"precision": precision, "gradient_checkpointing": False, "device_type": "cpu"}
    told = costs.activation_bytes(family(SMALL), 128, 4, lora=Lora(rank=4), **asked)
    assert told == pytest.approx(left_by_a_forward(SMALL, 4, mixed=precision != "32-true", again=False, lora=True), rel=0.1)
    assert told < costs.activation_bytes(family(SMALL), 128, 4, **asked)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_activations_are_what_a_real_forward_leaves_on_a_gpu(precision: str) -> None:
    networks, mixed = presets.get("sd15").networks, precision != "32-true"
    unet = models.build_unet(networks).train().cuda()
    kind = torch.bfloat16 if mixed else torch.float32
    inputs = torch.zeros(4, 4, 32, 32, dtype=kind, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    text, before = torch.zeros(4, 77, 768, dtype=kind, device="cuda"), torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
        output = unet(*inputs, encoder_hidden_states=text, return_dict=False)[0]
        left = torch.cuda.memory_allocated() - before
    assert output.requires_grad
    told = costs.activation_bytes(networks, 256, 4, precision=precision, gradient_checkpointing=False)
    assert told == pytest.approx(left, rel=0.15)


def test_gradient_checkpointing_and_mixed_precision_keep_less() -> None:
    networks = presets.get("sd15").networks
    kept = [
        costs.activation_bytes(networks, 512, 16, precision=precision, gradient_checkpointing=again)
        for precision, again in (("32-true", False), ("bf16-mixed", False), ("bf16-mixed", True))
    ]
    assert kept[0] > 1.3 * kept[1] and kept[1] > 3 * kept[2]


def test_nothing_is_allocated() -> None:
    preset = presets.get("sdxl")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for stage in preset.stages.values():
        costs.memory(preset.networks, stage, micro_batch_size=stage.micro_batch_size, frozen_parameters=0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes; the weights alone would be 10 gigabytes


# Memory


def test_state_is_four_floats_a_parameter_and_a_fifth_for_the_average() -> None:
    count = sum(parameter.numel() for parameter in models.build_unet(family(SMALL)).parameters())
    alone = memory(ema_decay=0.99, frozen_parameters=1000)
    assert (alone.weights, alone.gradients, alone.moments, alone.average) == (4 * count, 4 * count, 8 * count, 4 * count)
    assert (alone.frozen, alone.gathered) == (4000, 0)
    assert alone.total == 20 * count + 4000 + alone.activations
    assert memory(frozen_parameters=1000, frozen_bytes_per_parameter=2).frozen == 2000 and memory().average == 0


@pytest.mark.parametrize(("states", "share"), [("float32", 1), ("bfloat16", 1 / 2), ("8bit", (1 + 4 / 256) / 4)])
def test_moments_take_what_their_type_takes(states: str, share: float) -> None:
    assert memory(optimizer_states=states).moments == pytest.approx(share * memory().moments, abs=1)


def test_fsdp_divides_all_that_is_kept_of_parameters_and_holds_one_block_whole() -> None:
    unet, whole = models.build_unet(family(SMALL)), memory(ema_decay=0.99)
    shared = memory(ema_decay=0.99, strategy="fsdp", world_size=4)
    for part in ("weights", "gradients", "moments", "average"):
        assert getattr(shared, part) == getattr(whole, part) // 4
    blocks = [*unet.down_blocks, unet.mid_block, *unet.up_blocks]
    assert shared.gathered == 8 * max(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
    assert shared.activations == whole.activations


def test_ddp_holds_gradients_a_second_time_in_its_buckets() -> None:
    alone, together = memory(), memory(world_size=2)
    assert together.gradients == 2 * alone.gradients and together.weights == alone.weights


def test_of_an_adapter_only_its_own_parameters_are_trained() -> None:
    lora = Lora(rank=4, targets=["to_q", "to_out.0", "ff.net.2", "proj_in"])
    count, unet = 0, models.build_unet(family(SMALL))
    for name, layer in unet.named_modules():
        if any(f".{name}".endswith(f".{target}") for target in lora.targets):
            assert isinstance(layer, nn.Linear | nn.Conv2d)
            count += 4 * (layer.weight[0].numel() + layer.weight.shape[0])
    adapted = memory(lora=lora, ema_decay=0.99)
    assert (adapted.gradients, adapted.moments, adapted.average) == (4 * count, 8 * count, 4 * count)
    assert adapted.weights == 4 * (count + sum(parameter.numel() for parameter in unet.parameters()))


def test_peft_makes_as_many_parameters() -> None:
    peft = pytest.importorskip("peft")
    lora = Lora(rank=4, targets=["to_q", "to_out.0", "ff.net.2", "proj_in"])
    unet = models.build_unet(family(SMALL))
    unet.add_adapter(peft.LoraConfig(r=lora.rank, target_modules=lora.targets))
    assert memory(lora=lora).gradients == 4 * sum(parameter.numel() for parameter in unet.parameters() if parameter.requires_grad)


# Ways to make it fit


def test_ways_start_with_what_is_asked_for_and_each_takes_what_it_says() -> None:
    ways = costs.options(family(SMALL), RECIPE, micro_batch_size=4, frozen_parameters=0, world_size=2)
    assert ways[0].changes == {} and ways[0].memory == memory(world_size=2)
    for way in ways[1:]:
        assert way.memory == memory(world_size=2, **way.changes) and way.memory.total < ways[0].memory.total
    names = [way.name for way in ways]
    assert len(set(names)) == len(names) and names.index("strategy='fsdp'") < names.index("optimizer_states='bfloat16'")
    assert names[1] == "micro_batch_size=1" and "optimizer_states" in names[-1]


def test_a_smaller_micro_batch_is_the_largest_that_fits() -> None:
    enough = memory(micro_batch_size=3).total
    asked: dict[str, Any] = {"micro_batch_size": 12, "frozen_parameters": 0}
    ways = costs.options(family(SMALL), RECIPE, available_bytes=enough, **asked)
    fits = costs.what_fits(ways, enough)
    assert fits is not None and fits.changes == {"micro_batch_size": 3} and fits.name == "micro_batch_size=3"


def test_the_first_way_that_fits_is_named_and_none_where_none_does() -> None:
    ways = costs.options(family(SMALL), RECIPE, micro_batch_size=4, frozen_parameters=0)
    for way in ways:
        fits = costs.what_fits(ways, way.memory.total)
        assert fits is not None and ways.index(fits) <= ways.index(way)
    assert costs.what_fits(ways, 1) is None


def test_ways_that_the_devices_cannot_go_are_left_out() -> None:
    def names(precision: str = "32-true", **asked: Any) -> str:
        recipe = RECIPE.model_copy(update={"precision": precision})
        return " ".join(way.name for way in costs.options(family(SMALL), recipe, micro_batch_size=4, frozen_parameters=0, **asked))

    assert "fsdp" in names(world_size=2) and "8bit" in names()
    assert "fsdp" not in names() and "fsdp" not in names("16-mixed", world_size=2)
    assert "8bit" not in names(device_type="cpu") and "8bit" not in names(world_size=2, strategy="fsdp")


# What is refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": "fdsp"}, "strategy='fdsp' is not known; did you mean 'fsdp'"),
        ({"world_size": 0}, "world_size=0 cannot be used"),
        ({"resolution": 100}, "resolution=100 cannot be halved evenly"),
        ({"precision": "bf16"}, "precision='bf16' is not known"),
        ({"device_type": "tpu"}, "device_type='tpu' is not known"),
        ({"lora": Lora(targets=["to_q", "norm1"])}, "lora.targets: 'norm1' is no layer"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        memory(**changes)


def test_rates_and_prices_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="utilisation=31 is more than all"):
        costs.throughput(family(SMALL), 128, device_flops=1e12, utilisation=31)
    with pytest.raises(ConfigError, match="samples_per_second=0 cannot be used"):
        costs.cost(samples=1, samples_per_second=0, world_size=1)
    with pytest.raises(ConfigError, match="price_per_device_hour=-1"):
        costs.cost(samples=1, samples_per_second=1, world_size=1, price_per_device_hour=-1)
