"""What a run carries from step to step, on one device or many, and how it comes from and goes to a checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sdlab import launch, lora, models, optim, parents, parts, runs
from sdlab.checkpoints import Checkpoints
from sdlab.config import ConfigError, TrainConfig
from sdlab.files import Tensors

TIMEOUT_MINUTES = 20.0
"""How long a rank waits for the others, which may be writing a checkpoint or drawing a preview."""

logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message="The `srun` command is available")


@dataclass
class State:
    """What a run carries from step to step."""

    fabric: Fabric
    unet: Any
    """As Fabric wraps it: what training calls."""
    module: nn.Module
    """The UNet itself, whose parameters are sharded under FSDP."""
    optimizer: Any
    ema: optim.Ema | None
    step: int = 0
    """Optimizer steps, also those that the gradient scaler skipped."""
    skipped: int = 0
    """Steps that moved nothing, since gradients had overflown."""
    skipped_in_row: int = 0
    saved_step: int = 0

    @property
    def updates(self) -> int:
        """Steps that moved the weights: what the learning rate and the moving average follow."""
        return self.step - self.skipped

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the loss in 16-mixed."""
        return getattr(self.fabric.strategy.precision, "scaler", None)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes."""
        return self.fabric.is_global_zero


def make_fabric(config: TrainConfig) -> Fabric:
    """Fabric on this rank's device, for as many ranks as the config says; those are started already."""
    timeout = timedelta(minutes=TIMEOUT_MINUTES)
    strategy: Any = "auto"
    if config.strategy == "fsdp":
        strategy = ModelParallelStrategy(_shard, data_parallel_size=config.world_size, tensor_parallel_size=1, timeout=timeout)
    elif config.world_size > 1:
        strategy = DDPStrategy(timeout=timeout)
    ranks: dict[str, Any] = {"devices": config.devices, "num_nodes": config.num_nodes, "strategy": strategy}
    fabric = Fabric(accelerator=launch.device().type, precision=config.recipe.precision, **ranks)
    if strategy != "auto":
        fabric.launch()
    return fabric


def _shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard every block of a UNet apart, so that only one of them is whole at a time."""
    blocks: Any = module
    for block in (*blocks.down_blocks, blocks.mid_block, *blocks.up_blocks):
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def restore(config: TrainConfig, fabric: Fabric, folder: Path) -> State:
    """The state of the newest valid checkpoint, else of the parent's weights, else of random ones."""
    newest = _newest(folder) if fabric.is_global_zero else None
    checkpoint = fabric.broadcast(newest)
    unet = models.build_unet(config.networks, seed=config.seed)
    saved = {} if checkpoint is None else {path.stem: Tensors([path]) for path in checkpoint.glob("*.safetensors")}
    if config.init_from is not None and (checkpoint is None or config.recipe.lora is not None):
        models.hand_over(unet, _parent(config).state_dict(), source=config.init_from)
    if config.recipe.lora is not None:
        lora.add(unet, config.recipe.lora, seed=config.seed)
    if checkpoint is not None:
        _load(unet, saved["weights"], str(checkpoint))
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    wrapped: Any = fabric.setup_module(unet.train())
    module = wrapped.module
    optimizer = optim.make_optimizer(module, config.recipe)
    ema = optim.Ema(module, config.recipe.ema_decay) if config.recipe.ema_decay is not None else None
    state = State(fabric, wrapped, module, optimizer, ema)
    if checkpoint is not None:
        _restore_scalars(state, checkpoint)
        optim.restore_optimizer(module, optimizer, {name: saved[name].__getitem__ for name in optim.MOMENTS}, step=state.updates)
        if ema is not None:
            ema.restore(saved["ema"].__getitem__)
    state.optimizer = fabric.setup_optimizers(optimizer)
    return state


def _parent(config: TrainConfig) -> parents.Parent:
    """What the run starts from, as it was planned.

    Raises:
        ConfigError: it holds other weights by now.
    """
    assert config.init_from is not None
    parent = parents.load_parent(config.init_from, weights=config.init_weights)
    if parent.weights_hash != config.parent_hash:
        raise ConfigError(f"the weights of {parent.name} have changed since this run was planned; run again")
    return parent


@torch.no_grad()
def _load(unet: nn.Module, saved: Tensors, source: str) -> None:
    """Put saved weights into what is trained of a UNet."""
    parameters = optim.trained(unet)
    models.check_fit(parameters, saved.shapes(), source=source)
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])


def _newest(folder: Path) -> Path | None:
    return runs.find_checkpoint(folder) if runs.checkpoints(folder) else None


def _restore_scalars(state: State, checkpoint: Path) -> None:
    saved = runs.read_state(checkpoint)
    state.step = state.saved_step = runs.checkpoint_step(checkpoint)
    state.skipped, state.skipped_in_row = saved.get("skipped", 0), saved.get("skipped_in_row", 0)
    if state.scaler is not None and saved.get("scaler"):
        state.scaler.load_state_dict(saved["scaler"])


def save(state: State, written: Checkpoints) -> None:
    """Write a checkpoint of the present step, unless there is one; all ranks have to call.

    Raises:
        OSError, NoSpace: on every rank, when it cannot be written.
    """
    if state.step in (0, state.saved_step):
        return
    groups = tensors(state)
    scalars = {
        "saved": runs.now(),
        **{"skipped": state.skipped, "skipped_in_row": state.skipped_in_row, "ema_updates": state.updates},
        "scaler": state.scaler.state_dict() if state.scaler is not None else None,
    }
    gathered = _Gathered(groups)
    problem: Exception | None = None
    try:
        if state.is_first:
            written.save(state.step, groups, scalars, gather=gathered.take)
    except Exception as error:
        problem = error
    gathered.finish()
    problem = state.fabric.broadcast(problem)
    if problem is not None:
        raise problem
    state.saved_step = state.step


def tensors(state: State) -> dict[str, dict[str, Tensor]]:
    """Everything that a checkpoint holds, by group and parameter name; sharded under FSDP."""
    groups = {"weights": {name: parameter.detach() for name, parameter in optim.trained(state.module).items()}}
    if state.ema is not None:
        groups["ema"] = state.ema.tensors
    return {**groups, **optim.optimizer_tensors(state.module, state.optimizer)}


class _Gathered:
    """Puts sharded tensors together in one order on all ranks, on those that do not write as on the one that does, however far it comes."""

    def __init__(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.left = [tensor for group in groups.values() for tensor in group.values()]

    def take(self, tensor: Tensor) -> Tensor:
        """The next one, which has to be `tensor`."""
        assert self.left[0] is tensor
        return optim.whole(self.left.pop(0))

    def finish(self) -> None:
        """Those that nobody asked for."""
        while self.left:
            optim.whole(self.left.pop(0))


def drawing(state: State, config: TrainConfig, frozen: parts.Frozen, name: str) -> models.TextToImage | None:
    """The model as it draws now, by its moving average where it keeps one, on the first rank; all ranks have to call."""
    source, weights = (state.ema.tensors, "ema") if state.ema is not None else (tensors(state)["weights"], "raw")
    together = {}
    for key, tensor in source.items():
        whole = optim.whole(tensor)
        if state.is_first:
            together[key] = whole
    if not state.is_first:
        return None
    with torch.device("meta"):
        unet = models.build_unet(config.networks)
    change, full = config.recipe.lora, together
    if change is not None:
        base = _parent(config).state_dict()
        full = {key: tensor.to(state.fabric.device) for key, tensor in lora.merged(base, _on_cpu(together), change).items()}
    unet.load_state_dict(full, assign=True)
    return models.TextToImage(
        frozen=frozen,
        unet=unet.eval().requires_grad_(False),
        networks=config.networks,
        name=name,
        weights=weights,
        step=state.step,
        weights_hash="",
        resolution=config.recipe.resolution,
        adapter=together if change is not None else None,
    )


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.cpu() for key, tensor in tensors.items()}
