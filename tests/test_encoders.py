"""Text encoders as open_clip writes them, in place of transformers' files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from safetensors.torch import load_file, save_file

from sdlab import encoders, parents, parts, places, presets
from sdlab.config import ConfigError, Networks

TEXT = {"context_length": 77, "vocab_size": 8706, "width": 32, "heads": 2, "layers": 2}


def make_open_clip(folder: Path, *, quick_gelu: bool, **sizes: int) -> CLIP:
    """A small CLIP as open_clip writes it for the hub, and what is there of a text encoder before is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = {**TEXT, **sizes}
    vision = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16}
    torch.manual_seed(3)
    model = CLIP(text["width"], CLIPVisionCfg(**vision), CLIPTextCfg(**text), quick_gelu=quick_gelu).eval()
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, folder / encoders.OPEN_CLIP)
    config = {"embed_dim": text["width"], "vision_cfg": vision, "text_cfg": text, **({"quick_gelu": True} if quick_gelu else {})}
    (folder / encoders.OPEN_CLIP_CONFIG).write_text(json.dumps({"model_cfg": config}))
    return model


def family(tmp_path: Path, name: str) -> Networks:
    """A small family whose parts lie in a folder of their own."""
    networks = presets.get(name).networks
    folder = tmp_path / "parts"
    shutil.copytree(places.frozen_folder(networks), folder)
    return networks.model_copy(update={"frozen": str(folder)})


def states(model: CLIP, ids: torch.Tensor) -> list[torch.Tensor]:
    """What comes in to each layer of the text tower, and out of the last one."""
    seen: list[torch.Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for block in model.transformer.resblocks]
    hooks.append(model.transformer.resblocks[-1].register_forward_hook(lambda *called: seen.append(called[2])))
    with torch.no_grad():
        model.encode_text(ids)
    for hook in hooks:
        hook.remove()
    return seen


def test_openais_encoder_gives_its_last_state_after_the_norm(tmp_path: Path) -> None:
    networks = family(tmp_path, "sd15_tiny")
    model = make_open_clip(tmp_path / "parts/text_encoder", quick_gelu=True)
    frozen = parts.load_frozen(networks)
    ids = frozen.tokenize(["a cat", ""])
    torch.testing.assert_close(frozen.encode_text(ids).prompt_embeds, model.ln_final(states(model, ids)[-1]).detach(), rtol=0, atol=1e-5)


def test_of_laions_only_encoder_the_state_before_the_last_layer_is_normed(tmp_path: Path) -> None:
    networks = family(tmp_path, "sd20_tiny")
    model = make_open_clip(tmp_path / "parts/text_encoder", quick_gelu=False, layers=networks.text_encoders[0]["num_hidden_layers"] + 1)
    frozen = parts.load_frozen(networks)
    ids = frozen.tokenize(["a cat", ""])
    torch.testing.assert_close(frozen.encode_text(ids).prompt_embeds, model.ln_final(states(model, ids)[-2]).detach(), rtol=0, atol=1e-5)


def test_the_second_of_two_gives_its_penultimate_and_its_projected_state(tmp_path: Path) -> None:
    networks = family(tmp_path, "sdxl_tiny")
    model = make_open_clip(tmp_path / "parts/text_encoder_2", quick_gelu=False, width=64)
    frozen = parts.load_frozen(networks)
    ids = frozen.tokenize(["a cat"])
    said, own = frozen.encode_text(ids), ids.chunk(2, dim=1)[1]
    torch.testing.assert_close(said.prompt_embeds[:, :, 32:], states(model, own)[-2], rtol=0, atol=1e-5)
    torch.testing.assert_close(said.pooled_prompt_embeds, model.encode_text(own).detach(), rtol=0, atol=1e-5)


def test_the_wrong_activation_is_refused_with_both(tmp_path: Path) -> None:
    networks = family(tmp_path, "sd15_tiny")
    make_open_clip(tmp_path / "parts/text_encoder", quick_gelu=False, layers=3)
    with pytest.raises(ConfigError, match=r"text_encoder\.hidden_act is 'gelu', not 'quick_gelu'"):
        parts.load_frozen(networks)


def test_the_same_encoder_in_either_form_is_the_same_to_a_parent(tmp_path: Path) -> None:
    family(tmp_path, "sd15_tiny")
    folder = tmp_path / "parts"
    make_open_clip(folder / "text_encoder", quick_gelu=True)
    before = parents.hash_content(folder)
    kept = dict(encoders.tensors(folder / "text_encoder", alone=True))
    shutil.rmtree(folder / "text_encoder")
    shutil.copytree(places.frozen_folder(presets.get("sd15_tiny").networks) / "text_encoder", folder / "text_encoder")
    save_file(kept, folder / "text_encoder" / "model.safetensors", metadata={"format": "pt"})
    assert parents.hash_content(folder) == before


@pytest.mark.parametrize("lost", ["ln_final.weight", "transformer.resblocks.1.attn.in_proj_weight"])
def test_what_is_missing_is_named_with_its_file(tmp_path: Path, lost: str) -> None:
    networks = family(tmp_path, "sd15_tiny")
    make_open_clip(tmp_path / "parts/text_encoder", quick_gelu=True)
    path = tmp_path / "parts/text_encoder" / encoders.OPEN_CLIP
    save_file({key: tensor for key, tensor in load_file(path).items() if key != lost}, path)
    with pytest.raises(ConfigError, match=f"{encoders.OPEN_CLIP}.*missing.*{lost}"):
        parts.load_frozen(networks)


def test_a_config_without_sizes_is_named(tmp_path: Path) -> None:
    networks = family(tmp_path, "sd15_tiny")
    make_open_clip(tmp_path / "parts/text_encoder", quick_gelu=True)
    (tmp_path / "parts/text_encoder" / encoders.OPEN_CLIP_CONFIG).write_text('{"model_cfg": {"embed_dim": 32}}')
    with pytest.raises(ConfigError, match=r"open_clip_config\.json lacks 'text_cfg'"):
        parts.load_frozen(networks)
