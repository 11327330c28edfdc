"""The frozen parts of the built-in family, made here: tokenizer, VAE, the CLIP that conditions and the CLIP that judges.

They stand where Stable Diffusion has its public VAE and CLIP: trained once, shipped, taken as given by every stage.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from diffusers import AutoencoderKL
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, CLIPTextModel, CLIPTokenizer

from sdlab import export, files, launch, models, parts, pictures, runs, scenes, single
from sdlab.config import ConfigError, resolve_path

CONTEXT = 24
"""Tokens a caption, start and end included."""
MERGES = 8192
"""Merges taken from CLIP's byte-pair encoding, the most frequent first."""
MAX_BYTES = 32_000_000
"""What everything that is shipped may weigh together."""


class Size(NamedTuple):
    """How long each part is trained, in optimizer steps, and on how many pictures."""

    vae_steps: int
    clip_steps: int
    judge_steps: int
    pictures: int
    """Scenes that the UNet is trained on."""
    stage1_steps: int
    stage2_steps: int


SIZES = {
    "smoke": Size(6, 4, 6, pictures=64, stage1_steps=3, stage2_steps=4),
    "full": Size(5000, 1200, 1800, pictures=2048, stage1_steps=100, stage2_steps=1200),
}


def make_tokenizer() -> CLIPTokenizer:
    """The tokenizer of the built-in family, which knows a sixth of CLIP's merges."""
    return single.make_tokenizer({"vocab_size": 512 + MERGES + 2, "max_position_embeddings": CONTEXT})


def tokenize(tokenizer: CLIPTokenizer, captions: Iterable[str]) -> torch.Tensor:
    """Token ids of captions, int64 (B, CONTEXT), padded and cut."""
    return tokenizer(list(captions), padding="max_length", max_length=CONTEXT, truncation=True, return_tensors="pt").input_ids


def train_vae(*, steps: int, seed: int = 0) -> AutoencoderKL:
    """Train the autoencoder on object-centred crops, whole pictures and half-size pictures of scenes.

    Loss: L1 + 2 MSE + L1 of finite differences + 2e-6 KL. `scaling_factor` is set to one over the latents' standard deviation.

    Args:
        steps: optimizer steps; 6,600 give about 35 dB.
        seed: of weights, pictures and order.
    """
    torch.manual_seed(seed)
    blocks = 4
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(32, 64, 96, 128),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        sample_size=scenes.SIDE,
        mid_block_add_attention=False,
    )
    draw_batch = _vae_batches(seed, pictures=min(8192, 8 * steps + 64))

    def loss_of(step: int) -> torch.Tensor:
        pixel_values = draw_batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(pixel_values).latent_dist
            decoded = vae.decode(posterior.sample()).sample
        decoded = decoded.float()
        edges = sum(F.l1_loss(decoded.diff(dim=d), pixel_values.diff(dim=d)) for d in (2, 3))
        likelihood = F.l1_loss(decoded, pixel_values) + 2 * F.mse_loss(decoded, pixel_values) + edges
        return likelihood + 2e-6 * posterior.kl().float().sum() / len(pixel_values)

    _fit(vae, loss_of, steps=steps, learning_rate=2e-3, betas=(0.9, 0.95), weight_decay=1e-4, title="VAE")
    latents = encode(vae, parts.to_pixel_values(scenes.render(scenes.draw(512, seed=999))))
    vae.register_to_config(scaling_factor=round(float(1 / latents.std()), 5))
    return vae


def _vae_batches(seed: int, *, pictures: int) -> Callable[[int], torch.Tensor]:
    drawn = scenes.draw(pictures, seed=300 + seed)
    whole = torch.from_numpy(scenes.render(drawn))
    generator = np.random.default_rng(seed)
    crops = torch.stack([_crop(picture, scene, generator) for picture, scene in zip(whole, drawn, strict=True)])
    half = F.interpolate(whole.float(), scale_factor=0.5, mode="bicubic", antialias=True).clamp(0, 255).round().byte()
    cycle = ((crops, 32), (whole, 8), (crops, 32), (half, 32), (whole, 8), (crops, 32))

    def draw_batch(step: int) -> torch.Tensor:
        images, size = cycle[step % len(cycle)]
        batch = images[torch.randint(len(images), (size,))]
        return parts.to_pixel_values(batch.flip(-1) if torch.rand(()) < 0.5 else batch)

    return draw_batch


def _crop(picture: torch.Tensor, scene: scenes.Scene, generator: np.random.Generator, side: int = 32) -> torch.Tensor:
    item = scene.objects[generator.integers(len(scene.objects))]
    left, top = (int(np.clip(c - side / 2 + generator.integers(-12, 13), 0, scenes.SIDE - side)) for c in item.centre)
    return picture[:, top : top + side, left : left + side]


def train_clip(tokenizer: CLIPTokenizer, *, steps: int, seed: int, batch_size: int = 64) -> CLIPModel:
    """Train a small CLIP on scenes with the symmetric contrastive loss.

    Half of each batch are scenes of one object, half are families of four: the same two objects in all four relations. Without
    these a batch can be told apart by its objects alone, and the text states carry nothing of who is above whom.

    Args:
        tokenizer: of `make_tokenizer`.
        steps: optimizer steps; 600 find 98 % of captions among 64 and two of three relations among four, 1,200 find 99 % and all of them.
        seed: of weights, pictures and order: another seed is another judge.
        batch_size: pairs a step.
    """
    torch.manual_seed(seed)
    tower = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "projection_dim": 128}
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    text = dict(tower, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=dict(tower, image_size=scenes.SIDE, patch_size=8), projection_dim=128))
    drawn = _with_siblings(min(2048, 8 * steps), seed=1000 * (seed + 1))
    images, ids = torch.from_numpy(scenes.render(drawn)), tokenize(tokenizer, [scene.caption for scene in drawn])
    labels, half = torch.arange(batch_size), len(drawn) // 2

    def loss_of(step: int) -> torch.Tensor:
        families = 4 * torch.randint(half // 4, (batch_size // 8, 1)) + torch.arange(4)
        pick = torch.cat([half + torch.randint(half, (batch_size // 2,)), families.flatten()])
        output = clip(input_ids=ids[pick], pixel_values=parts.to_pixel_values(images[pick]))
        return (F.cross_entropy(output.logits_per_image, labels) + F.cross_entropy(output.logits_per_text, labels)) / 2

    _fit(clip, loss_of, steps=steps, learning_rate=1e-3, betas=(0.9, 0.98), weight_decay=0.05, title=f"CLIP (seed {seed})")
    return clip


def _with_siblings(families: int, *, seed: int) -> list[scenes.Scene]:
    """Families of four scenes that differ in their relation alone, then as many scenes of one object."""
    pairs = scenes.draw(families, seed=seed, two_object_share=1.0)
    captions = [[scene.caption.replace(_relation(scene), relation) for relation in scenes.RELATIONS] for scene in pairs]
    siblings = [scenes.parse(caption) for family in captions for caption in family]
    random = np.random.default_rng(seed)
    moved = [_moved(scene, random) for scene in siblings if scene is not None]
    return moved + scenes.draw(len(moved), seed=seed + 1, two_object_share=0.0)


def _relation(scene: scenes.Scene) -> str:
    return next(relation for relation in scenes.RELATIONS if f" {relation} " in scene.caption)


def _moved(scene: scenes.Scene, random: np.random.Generator) -> scenes.Scene:
    moves = 2 * random.integers(-1, 2, (len(scene.objects), 2))
    placed = (replace(item, left=item.left + int(x), top=item.top + int(y)) for item, (x, y) in zip(scene.objects, moves, strict=True))
    return replace(scene, objects=tuple(placed))


def _fit(
    model: Any,
    loss_of: Callable[[int], torch.Tensor],
    *,
    steps: int,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    title: str,
) -> None:
    """Plain AdamW: short warm-up, constant for half the steps, then linear to 2 %."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / (0.03 * steps)) * min(1, max(0.02, 2 - 2 * s / steps))
    )
    model.train()
    bar = launch.progress(total=steps, title=title, unit=" steps")
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        bar.update()
    bar.close()
    model.eval()


@torch.no_grad()
def encode(vae: AutoencoderKL, pixel_values: torch.Tensor) -> torch.Tensor:
    """Unscaled latent means (B, C, h, w) of `pixel_values` (B, 3, H, W), in batches of 64."""
    return torch.cat([vae.encode(batch).latent_dist.mode() for batch in pixel_values.split(64)])


@torch.no_grad()
def measure_vae(vae: AutoencoderKL, *, count: int = 192) -> dict[str, float]:
    """PSNR in dB of encode-decode on unseen scenes, and the share of them that the exact reader still reads right."""
    drawn = scenes.draw(count, seed=9_999)
    images = scenes.render(drawn)
    latents = encode(vae, parts.to_pixel_values(images))
    decoded = parts.to_images(torch.cat([vae.decode(batch).sample for batch in latents.split(64)]))
    found = scenes.check(decoded.numpy(), [scene.caption for scene in drawn])
    return {"psnr_db": float(pictures.psnr(images, decoded.numpy()).mean()), "read_right": float(found["strict"].mean())}


@torch.no_grad()
def measure_clip(clip: CLIPModel, tokenizer: CLIPTokenizer, *, count: int = 1024) -> dict[str, float]:
    """How well captions are found by their pictures, on unseen scenes, and mean cosines of right and of wrong pairs.

    `top1_of_64`: among the captions of 64 scenes (any equal text is right); `relation_right`: among the four relations of two objects.
    """
    drawn = scenes.draw(count, seed=9_998, two_object_share=0.5)
    captions, cosine = np.array([scene.caption for scene in drawn]), _cosines(clip, tokenizer, drawn)
    best = np.concatenate([i + cosine[i : i + 64, i : i + 64].argmax(1).numpy() for i in range(0, count - 63, 64)])
    families = _cosines(clip, tokenizer, _with_siblings(count // 8, seed=9_997)[: count // 2]).unflatten(1, (-1, 4))
    own = families[torch.arange(count // 2), torch.arange(count // 2) // 4]
    return {
        "top1_of_64": float((captions[best] == captions[: len(best)]).mean()),
        "relation_right": float((own.argmax(1) == torch.arange(count // 2) % 4).float().mean()),
        "cosine_right": float(cosine.diagonal().mean()),
        "cosine_wrong": float(cosine.roll(1, 0).diagonal().mean()),
    }


def _cosines(clip: CLIPModel, tokenizer: CLIPTokenizer, drawn: Sequence[scenes.Scene]) -> torch.Tensor:
    pixel_values = parts.to_pixel_values(scenes.render(drawn))
    output = clip(input_ids=tokenize(tokenizer, [scene.caption for scene in drawn]), pixel_values=pixel_values)
    return output.image_embeds @ output.text_embeds.T


def save(folder: str | Path, *, tokenizer: CLIPTokenizer, vae: AutoencoderKL, clip: CLIPModel, judge: CLIPModel) -> Path:
    """Write the frozen parts in float16, diffusers' `vae`, `text_encoder` and `tokenizer` and the `judge`; returns the absolute path."""
    root = resolve_path(folder)
    root.mkdir(parents=True, exist_ok=True)
    text_encoder = CLIPTextModel(clip.config.text_config)
    text_encoder.load_state_dict(clip.text_model.state_dict())
    tokenizer.save_pretrained(root / "tokenizer")
    for part, module in (("vae", vae), ("text_encoder", text_encoder), ("judge", judge)):
        export.save_part(module.half(), root / part)
        module.float()
    return root


def write_preset(path: Path, parts: Path) -> str:
    """Write a preset file for the tiny family on other frozen parts, and return its path."""
    path.write_text(yaml.safe_dump({"extends": "tiny", "networks": {"frozen": str(parts)}}), encoding="utf-8")
    return str(path)


def adopt_unet(folder: str | Path, pipeline: str | Path) -> None:
    """Put the UNet of a trained pipeline beside the frozen parts, in float16, so that the folder is a pipeline itself."""
    root, trained = resolve_path(folder), resolve_path(pipeline)
    export.save_part(models.load(str(trained)).unet.half(), root / "unet")
    shutil.copytree(trained / "scheduler", root / "scheduler", dirs_exist_ok=True)
    for name in ("model_index.json", "sdlab.json"):
        shutil.copy(trained / name, root / name)


def measure_pictures(images: np.ndarray, captions: Sequence[str]) -> dict[str, float]:
    """Shares of drawn scenes that the exact reader finds right: background, and all of it for one and for two objects.

    Args:
        images: uint8 (B, 3, 64, 64).
        captions: B captions of scenes.
    """
    found = scenes.check(images, captions)
    shares = {"background_right": found["background"]}
    for name, chosen in (("one_object_right", ~found["two"]), ("two_objects_right", found["two"])):
        shares |= {name: found["strict"][chosen]} if chosen.any() else {}
    return {name: float(right.mean()) for name, right in shares.items()}


def describe(folder: str | Path, *, size: Size, seed: int, figures: Mapping[str, Any]) -> Path:
    """Write `components.json` (how, how good, hashes) and the model card of a folder of parts.

    Raises:
        ConfigError: a part is missing, or all together are heavier than `MAX_BYTES`.
    """
    root = resolve_path(folder)
    weights = {part: root / part for part in ("vae", "text_encoder", "judge", "unet")}
    missing = [part for part, path in weights.items() if not list(path.glob("*.safetensors"))]
    total = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    if missing or total > MAX_BYTES:
        raise ConfigError(f"{root}: missing {', '.join(missing) or 'nothing'}; {total} bytes of at most {MAX_BYTES}")
    about = {
        "seed": seed,
        "steps": size._asdict(),
        "figures": figures,
        "sha256": {part: files.hash_weights(path) for part, path in weights.items()},
    }
    runs.write_json(root / "components.json", about)
    card = root / "README.md"
    card.write_text(_card(about), encoding="utf-8")
    return card


def _card(about: Mapping[str, Any]) -> str:
    size, seed = about["steps"], about["seed"]
    good = {part: ", ".join(f"{name} {value:.3g}" for name, value in figures.items()) for part, figures in about["figures"].items()}
    unet_steps = f"{size['stage1_steps']} + {size['stage2_steps']}"
    lines = [
        *("---", "license: apache-2.0", "---", ""),
        "# The built-in model",
        "",
        "Made by `notebooks/00_tiny_components.ipynb` from pictures that `sdlab.scenes` draws; float16 safetensors; Apache License 2.0.",
        "It draws ten emoji on six backgrounds and knows nothing else.",
        "",
        "| part | what | trained for | how good, on unseen scenes |",
        "|---|---|---|---|",
        f"| `vae` | AutoencoderKL, factor 8, 8 latent channels | {size['vae_steps']} steps, seed {seed} | {good['vae']} |",
        f"| `text_encoder` | CLIP text tower, width 128, 3 layers | {size['clip_steps']} steps, seed {seed + 1} | {good['clip']} |",
        f"| `judge` | CLIP of the same size | {size['judge_steps']} steps, seed {seed + 2} | {good['judge']} |",
        f"| `unet` | UNet2DConditionModel, v-prediction, moving average | {unet_steps} steps of 32, seed {seed} | {good['unet']} |",
        "",
        "The judge scores what the model draws and takes no part in training it. SHA-256 of the weights are in `components.json`.",
        "",
    ]
    return "\n".join(lines)
