"""Names and layouts of single files and of open_clip's text towers, against diffusers' importer, open_clip and published names."""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders import single_file_utils as importer
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdlab import layouts, ldm
from sdlab.config import ConfigError, Networks

PUBLISHED = json.loads((Path(__file__).parent / "published_keys.json").read_text())["files"]
SDXL_BLOCKS = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
}
VAE_BLOCKS = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2}


def text(
    width: int, *, layers: int, act: str = "gelu", heads: int = 2, vocab: int = 100, positions: int = 16, out: int = 24
) -> dict[str, Any]:
    """Arguments of a text encoder that ends its texts with its highest token, as open_clip's do."""
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "projection_dim": out,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "hidden_act": act,
        "bos_token_id": vocab - 2,
        "eos_token_id": vocab - 1,
    }


def networks(unet: dict[str, Any], widths: list[int], text_encoders: list[dict[str, Any]]) -> Networks:
    return Networks(
        frozen="random",
        unet=unet,
        vae={**VAE_BLOCKS, "block_out_channels": widths},
        text_encoders=text_encoders,
        prediction_type="epsilon",
    )


SMALL_UNET = {"block_out_channels": [32, 64, 128, 128], "cross_attention_dim": 24, "layers_per_block": 2}
SMALL_XL = {**SDXL_BLOCKS, "block_out_channels": [32, 64, 128], "transformer_layers_per_block": [1, 2, 2], "attention_head_dim": [2, 4, 8]}
SMALL = {
    "sd15": networks({**SMALL_UNET, "attention_head_dim": 8}, [32, 32, 64, 64], [text(32, layers=2, act="quick_gelu")]),
    "sd20": networks(
        {**SMALL_UNET, "attention_head_dim": [2, 4, 8, 8], "use_linear_projection": True}, [32, 32, 64, 64], [text(32, layers=2)]
    ),
    "sdxl": networks(
        {**SMALL_XL, "cross_attention_dim": 72, "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 72},
        [32, 32, 64, 64],
        [text(32, layers=2, act="quick_gelu"), text(40, layers=3)],
    ),
}
TEXT_L = text(768, layers=12, act="quick_gelu", heads=12, vocab=49408, positions=77, out=768)
TEXT_H = text(1024, layers=23, heads=16, vocab=49408, positions=77, out=1024)
TEXT_G = text(1280, layers=32, heads=20, vocab=49408, positions=77, out=1280)
REAL = {
    "sd15": networks({"cross_attention_dim": 768, "attention_head_dim": 8}, [128, 256, 512, 512], [TEXT_L]),
    "sd20": networks(
        {"cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "use_linear_projection": True}, [128, 256, 512, 512], [TEXT_H]
    ),
    "sdxl": networks(
        {
            **SDXL_BLOCKS,
            "block_out_channels": [320, 640, 1280],
            "transformer_layers_per_block": [1, 2, 10],
            "attention_head_dim": [5, 10, 20],
            "cross_attention_dim": 2048,
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        [128, 256, 512, 512],
        [TEXT_L, TEXT_G],
    ),
}
PARTS = [(name, part) for name, small in SMALL.items() for part in layouts.named_parts(small)]
PREFIXES = {
    ("sd15", "text_encoder"): "cond_stage_model.transformer.",
    ("sd20", "text_encoder"): "cond_stage_model.model.",
    ("sdxl", "text_encoder"): "conditioner.embedders.0.transformer.",
    ("sdxl", "text_encoder_2"): "conditioner.embedders.1.model.",
}


def build(part: str, made_from: Networks) -> nn.Module:
    """One part of a model with random weights, also where a network starts from ones and zeros."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "unet": lambda: UNet2DConditionModel(**made_from.unet),
        "vae": lambda: AutoencoderKL(**made_from.vae),
        "text_encoder": lambda: CLIPTextModel(CLIPTextConfig(**made_from.text_encoders[0])),
        "text_encoder_2": lambda: CLIPTextModelWithProjection(CLIPTextConfig(**made_from.text_encoders[1])),
    }
    return randomised(kinds[part]())


def randomised(network: nn.Module, *, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters() if not next(network.parameters()).is_meta else ():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return network.eval()


def state(part: str, made_from: Networks) -> dict[str, Tensor]:
    return build(part, made_from).state_dict()


@functools.cache
def small(name: str, part: str) -> Mapping[str, Tensor]:
    """One part of a small model, built once for all tests."""
    return MappingProxyType(state(part, SMALL[name]))


def single_file(name: str) -> dict[str, Tensor]:
    """A whole small model under the names of a single file."""
    made_from = SMALL[name]
    return {
        key: value
        for part in layouts.named_parts(made_from)
        for key, value in ldm.to_ldm(part, small(name, part), networks=made_from).items()
    }


def published(name: str, part: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a part of a published file; those of the VAE are the same in all."""
    return dict(expand(PUBLISHED["sd15" if part == "vae" else name].get(part, {})))


def expand(joined: Mapping[str, list[int]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for pattern, shape in joined.items():
        pieces = [numbers(piece) if i % 2 else [piece] for i, piece in enumerate(re.split(r"\{(.*?)\}", pattern))]
        yield from (("".join(chosen), tuple(shape)) for chosen in itertools.product(*pieces))


def numbers(ranges: str) -> list[str]:
    ends = [(start, end or start) for start, _, end in (each.partition("-") for each in ranges.split(","))]
    return [str(number) for start, end in ends for number in range(int(start), int(end) + 1)]


def sizes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


def imported(name: str, part: str, file: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What diffusers reads from a single file."""
    made_from, file = SMALL[name], dict(file)
    if part == "unet":
        return importer.convert_ldm_unet_checkpoint(file, {"layers_per_block": 2, **made_from.unet})
    if part == "vae":
        return importer.convert_ldm_vae_checkpoint(file, made_from.vae)
    if "transformer" in PREFIXES[name, part]:
        return importer.convert_ldm_clip_checkpoint(file)
    tower = SimpleNamespace(config=SimpleNamespace(hidden_size=made_from.text_encoders[-1]["hidden_size"]))
    return importer.convert_open_clip_checkpoint(tower, file, prefix=PREFIXES[name, part])


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_diffusers_reads_from_our_single_file_the_very_tensors_that_went_in(name: str, part: str) -> None:
    tensors = small(name, part)
    read = imported(name, part, ldm.to_ldm(part, tensors, networks=SMALL[name]))
    flat = part == "text_encoder"  # transformers' encoder without a projection has no prefix, and diffusers takes it off as we do here
    assert same({key.removeprefix("text_model.") if flat else key: value for key, value in read.items()}, tensors)


@pytest.mark.parametrize("name", SMALL)
def test_a_model_comes_back_from_a_single_file_bit_for_bit_in_every_part(name: str) -> None:
    parts = ldm.from_ldm(single_file(name), networks=SMALL[name])
    assert list(parts) == layouts.named_parts(SMALL[name])
    assert all(same(parts[part], small(name, part)) for part in parts)


@pytest.mark.parametrize("name", REAL)
def test_published_names_and_shapes_are_those_of_the_real_networks(name: str) -> None:
    file = {
        key: torch.empty(shape, device="meta")
        for part in (*layouts.named_parts(REAL[name]), "beside")
        for key, shape in published(name, part).items()
    }
    read = ldm.from_ldm(file, networks=REAL[name])
    with torch.device("meta"):
        built = {part: state(part, REAL[name]) for part in read}
    assert all(sizes(read[part]) == sizes(built[part]) for part in read)
    written = {key: size for part in read for key, size in sizes(ldm.to_ldm(part, built[part], networks=REAL[name])).items()}
    beyond = [key for key in file if key not in written]
    assert {key: sizes(file)[key] for key in written} == written
    assert all(ldm.LEFT_OUT.fullmatch(key) or re.search(r"^cond_stage_model\.model\.(text_proj|.*resblocks\.23\.)", key) for key in beyond)


def test_published_files_have_as_many_tensors_and_parameters_as_is_known_of_them() -> None:
    unets = {name: published(name, "unet") for name in REAL}
    assert [len(unet) for unet in unets.values()] == [686, 686, 1680]
    assert [len(published(*key)) for key in (("sd15", "vae"), ("sd15", "text_encoder"), ("sdxl", "text_encoder_2"))] == [248, 197, 390]
    counted = {name: sum(torch.Size(shape).numel() for shape in unet.values()) for name, unet in unets.items()}
    assert counted == {"sd15": 859_520_964, "sd20": 865_910_724, "sdxl": 2_567_463_684}
    assert sum(torch.Size(shape).numel() for shape in published("sd15", "vae").values()) == 83_653_863


@pytest.mark.parametrize("name", REAL)
def test_a_published_file_is_told_by_its_unet(name: str) -> None:
    assert ldm.family({key: torch.empty(shape, device="meta") for key, shape in published(name, "unet").items()}) == name


def test_arguments_that_are_not_given_are_diffusers_own() -> None:
    plain = Networks(
        frozen="random", unet={"sample_size": 64}, vae={"act_fn": "silu"}, text_encoders=[{"bos_token_id": 1}], prediction_type="sample"
    )
    with torch.device("meta"):
        for part in layouts.named_parts(plain):
            assert len(ldm.to_ldm(part, state(part, plain), networks=plain)) == len(state(part, plain))


def test_levels_may_differ_in_blocks_and_conditioning() -> None:
    unet = {
        **SMALL_UNET,
        "layers_per_block": [1, 2, 1, 3],
        "cross_attention_dim": [8, 16, 24, 32],
        "transformer_layers_per_block": [1, 2, 1, 2],
    }
    odd = SMALL["sd15"].model_copy(update={"unet": unet, "vae": {**SMALL["sd15"].vae, "layers_per_block": 1, "use_quant_conv": False}})
    for part in ("unet", "vae"):
        tensors = state(part, odd)
        assert len(ldm.to_ldm(part, tensors, networks=odd)) == len(tensors)


@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("out", [32, 24])
def test_text_towers_say_the_same_in_open_clip_and_transformers_both_ways(act: str, out: int) -> None:
    theirs = clip(act=act, out=out)
    ours = CLIPTextModelWithProjection(CLIPTextConfig(**text(32, layers=3, act=act, out=out))).eval()
    ours.load_state_dict(ldm.from_open_clip(theirs.state_dict()))
    assert_equal_states(ours, theirs)
    randomised(ours, seed=1)
    theirs.load_state_dict({**theirs.state_dict(), **ldm.to_open_clip(ours.state_dict())})
    assert_equal_states(ours, theirs)


def test_a_text_tower_without_projection_is_named_as_transformers_names_it() -> None:
    tensors = small("sd20", "text_encoder")
    assert "text_projection" not in ldm.to_open_clip(tensors)
    assert same(ldm.from_open_clip(ldm.to_open_clip(tensors)), tensors)


def clip(*, act: str, out: int = 24, layers: int = 3) -> open_clip.model.CLIP:
    vision = {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16}
    tower = {"context_length": 16, "vocab_size": 100, "width": 32, "heads": 2, "layers": layers}
    return randomised(open_clip.model.CLIP(out, vision, tower, quick_gelu=act == "quick_gelu"))


@torch.no_grad()
def open_clip_states(theirs: open_clip.model.CLIP, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States after the final norm, before the last block, and the pooled one."""
    seen: dict[str, Tensor] = {}
    hooks = [
        theirs.ln_final.register_forward_hook(lambda module, given, out: seen.update(last=out)),
        theirs.transformer.resblocks[-2].register_forward_hook(lambda module, given, out: seen.update(before=out)),
    ]
    pooled = theirs.encode_text(ids)
    for hook in hooks:
        hook.remove()
    return seen["last"], seen["before"], pooled


def token_ids() -> Tensor:
    ids = torch.randint(0, 98, (3, 16), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = 98
    ids[range(3), [15, 4, 9]] = 99
    return ids


@torch.no_grad()
def assert_equal_states(ours: CLIPTextModelWithProjection, theirs: open_clip.model.CLIP) -> None:
    said = ours(token_ids(), output_hidden_states=True)
    found = (said.last_hidden_state, said.hidden_states[-2], said.text_embeds)
    for one, other in zip(found, open_clip_states(theirs, token_ids()), strict=True):
        assert one.std() > 0.01
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_encoder_of_an_sd2_file_ends_before_its_last_block() -> None:
    theirs = clip(act="gelu", layers=3)
    file = single_file("sd20") | {f"cond_stage_model.model.{key}": value for key, value in theirs.state_dict().items()}
    encoder = CLIPTextModel(CLIPTextConfig(**SMALL["sd20"].text_encoders[0])).eval()
    encoder.load_state_dict(ldm.from_ldm(file, networks=SMALL["sd20"])["text_encoder"])
    _, before, _ = open_clip_states(theirs, token_ids())
    with torch.no_grad():
        torch.testing.assert_close(encoder(token_ids()).last_hidden_state, theirs.ln_final(before), rtol=0, atol=1e-5)


class OnDisk(Mapping[str, Tensor]):
    """Tensors that say their shapes for nothing and count how often they are read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.read = tensors, list[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def shapes(self) -> dict[str, Tensor]:
        return {name: tensor.to("meta") for name, tensor in self.tensors.items()}


def test_nothing_is_read_before_it_is_asked_for() -> None:
    file = OnDisk(single_file("sdxl"))
    parts = ldm.from_ldm(file, networks=SMALL["sdxl"])
    assert {part: sizes(parts[part].shapes()) for part in parts} == {part: sizes(small("sdxl", part)) for part in parts}
    assert not file.read
    assert parts["text_encoder_2"]["text_model.encoder.layers.1.self_attn.k_proj.weight"].shape == (40, 40)
    assert file.read == ["conditioner.embedders.1.model.transformer.resblocks.1.attn.in_proj_weight"]
    unet = OnDisk(small("sdxl", "unet"))
    assert len(ldm.to_ldm("unet", unet, networks=SMALL["sdxl"])) == len(unet)
    assert not unet.read


def test_queries_keys_and_values_can_be_saved_one_by_one() -> None:
    read = ldm.from_ldm(single_file("sdxl"), networks=SMALL["sdxl"])["text_encoder_2"]
    kept = [read[f"text_model.encoder.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == 3
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept)


def test_text_encoders_are_read_with_and_without_their_prefix() -> None:
    made_from = SMALL["sdxl"]
    for part in ("text_encoder", "text_encoder_2"):
        tensors = small("sdxl", part)
        bare = {key.removeprefix("text_model."): value for key, value in tensors.items()}
        full = {key if key == "text_projection.weight" else f"text_model.{key}": value for key, value in bare.items()}
        full["text_model.embeddings.position_ids"] = torch.arange(16)[None]
        wanted = ldm.to_ldm(part, tensors, networks=made_from)
        assert same(ldm.to_ldm(part, bare, networks=made_from), wanted)
        assert same(ldm.to_ldm(part, full, networks=made_from), wanted)
    file = {re.sub(r"transformer\.text_model\.", "transformer.", key): value for key, value in single_file("sd15").items()}
    assert same(ldm.from_ldm(file, networks=SMALL["sd15"])["text_encoder"], small("sd15", "text_encoder"))


def test_what_a_file_carries_beside_the_networks_is_left_out_by_name() -> None:
    beside = [*published("sd15", "beside"), "logvar", "cond_stage_model.logit_scale", "cond_stage_model.model.logit_scale"]
    beside += ["cond_stage_model.model.attn_mask", "cond_stage_model.transformer.text_model.embeddings.position_ids", "denoiser.sigmas"]
    beside += [
        "conditioner.embedders.1.model.logit_scale",
        "conditioner.embedders.1.model.visual.proj",
        "cond_stage_model.model.visual.conv1.weight",
    ]
    for name in SMALL:
        parts = ldm.from_ldm({**single_file(name), **dict.fromkeys(beside, torch.zeros(1))}, networks=SMALL[name])
        assert all(same(parts[part], small(name, part)) for part in parts)


def test_missing_surplus_and_misshapen_tensors_are_named_not_guessed() -> None:
    file = single_file("sd15")
    missing, misshapen = "first_stage_model.decoder.mid.attn_1.q.weight", "model.diffusion_model.input_blocks.1.1.proj_in.weight"
    del file[missing]
    file[misshapen] = file[misshapen][:, :, 0, 0]
    file["model.diffusion_model.input_blocks.1.1.lora.weight"] = torch.zeros(1)
    with pytest.raises(ConfigError, match="3 keys") as caught:
        ldm.from_ldm(file, networks=SMALL["sd15"])
    for told in (
        f"missing {missing}",
        "unknown model.diffusion_model.input_blocks.1.1.lora.weight",
        f"{misshapen} is (32, 32) and has to be (32, 32, 1, 1)",
    ):
        assert told in str(caught.value)


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_part_with_a_tensor_too_few_or_too_many_is_refused(name: str, part: str) -> None:
    tensors = small(name, part)
    lost = next(key for key in tensors if key.endswith("bias"))
    with pytest.raises(ConfigError, match=f"{part} .*missing {re.escape(lost.removeprefix('text_model.'))}"):
        ldm.to_ldm(part, {key: value for key, value in tensors.items() if key != lost}, networks=SMALL[name])
    with pytest.raises(ConfigError, match=r"unknown up\.extra"):
        ldm.to_ldm(part, {**tensors, "up.extra": torch.zeros(1)}, networks=SMALL[name])
    with pytest.raises(ConfigError, match=re.escape("is (1,) and has to be")):
        ldm.to_ldm(part, {**tensors, lost: torch.zeros(1)}, networks=SMALL[name])


def test_only_the_first_twenty_of_many_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"missing") as caught:
        ldm.to_ldm("vae", {}, networks=SMALL["sd15"])
    assert str(caught.value).count("missing") == 20
    assert str(caught.value).endswith("...")


def test_an_sd2_file_may_have_one_block_too_many_and_no_more() -> None:
    file = single_file("sd20")
    extra = {key.replace("resblocks.0", "resblocks.2"): value for key, value in file.items() if "resblocks.0" in key}
    projection = {"cond_stage_model.model.text_projection": torch.zeros(32, 32)}
    assert same(ldm.from_ldm(file | extra | projection, networks=SMALL["sd20"])["text_encoder"], small("sd20", "text_encoder"))
    with pytest.raises(ConfigError, match=r"unknown .*resblocks\.3"):
        ldm.from_ldm(file | {key.replace("resblocks.2", "resblocks.3"): value for key, value in extra.items()}, networks=SMALL["sd20"])


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_files_of_other_families_have_no_sd2_encoder_to_leave_out(name: str) -> None:
    for stray in ("text_projection", "transformer.resblocks.2.ln_1.bias"):
        with pytest.raises(ConfigError, match=r"trained with|unknown cond_stage_model\.model"):
            ldm.from_ldm(single_file(name) | {f"cond_stage_model.model.{stray}": torch.zeros(1)}, networks=SMALL[name])


def test_a_tensor_that_is_there_under_two_names_is_refused() -> None:
    tensors = small("sd15", "text_encoder")
    with pytest.raises(ConfigError, match="twice"):
        ldm.to_ldm("text_encoder", {**tensors, "text_model.final_layer_norm.bias": torch.zeros(32)}, networks=SMALL["sd15"])


def test_an_activation_that_the_weights_were_not_trained_with_is_refused() -> None:
    layouts.check_activation("quick_gelu", quick_gelu=True)
    layouts.check_activation("gelu", quick_gelu=False)
    with pytest.raises(ConfigError, match=r"'gelu'.*'quick_gelu'"):
        layouts.check_activation("gelu", quick_gelu=True)
    wrong = {"sd15": "gelu", "sd20": "quick_gelu"}
    for name, act in wrong.items():
        given = SMALL[name].model_copy(update={"text_encoders": [{**SMALL[name].text_encoders[0], "hidden_act": act}]})
        with pytest.raises(ConfigError, match=f"{act!r}.*trained with"):
            ldm.from_ldm(single_file(name), networks=given)
    swapped = SMALL["sdxl"].model_copy(update={"text_encoders": SMALL["sdxl"].text_encoders[::-1]})
    with pytest.raises(ConfigError, match=r"'gelu'.*'quick_gelu'"):
        ldm.to_ldm("text_encoder", {}, networks=swapped)
    with pytest.raises(ConfigError, match="'relu'"):
        ldm.to_ldm("text_encoder", {}, networks=SMALL["sd15"].model_copy(update={"text_encoders": [{"hidden_act": "relu"}]}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"addition_embed_type": "text"}, "addition_embed_type='text'"),
        ({"class_embed_type": "timestep"}, "class_embed_type='timestep'"),
        ({"down_block_types": ["AttnDownBlock2D"] * 4}, "blocks AttnDownBlock2D"),
        ({"block_out_channels": [32, 64]}, "2 levels"),
        ({"transformer_layers_per_block": [1, 2]}, r"transformer_layers_per_block=\[1, 2\]"),
        ({"addition_embed_type": "text_time"}, "projection_class_embeddings_input_dim=None"),
    ],
)
def test_networks_for_which_single_files_have_no_names_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ldm.to_ldm("unet", {}, networks=SMALL["sd15"].model_copy(update={"unet": {**SMALL_UNET, **changes}}))


def test_parts_that_the_networks_do_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"these networks have unet, vae, text_encoder$"):
        ldm.to_ldm("text_encoder_2", {}, networks=SMALL["sd15"])
    with pytest.raises(ConfigError, match=r"networks\.vae is empty"):
        ldm.from_ldm({}, networks=SMALL["sd15"].model_copy(update={"vae": {}}))
    with pytest.raises(ConfigError, match=r"networks\.text_encoders is empty"):
        ldm.from_ldm({}, networks=SMALL["sd15"].model_copy(update={"text_encoders": []}))


@pytest.mark.parametrize("tensors", [{}, {"token_embedding.weight": torch.zeros(1)}, {"logit_scale": torch.zeros(())}])
def test_what_is_no_text_tower_is_refused(tensors: dict[str, Tensor]) -> None:
    for convert in (ldm.from_open_clip, ldm.to_open_clip):
        with pytest.raises(ConfigError, match="no text tower"):
            convert(tensors)


def test_a_text_tower_with_a_gap_or_an_addition_is_refused() -> None:
    tensors = clip(act="gelu").state_dict()
    with pytest.raises(ConfigError, match=r"missing transformer\.resblocks\.1\.ln_1\.bias"):
        ldm.from_open_clip({key: value for key, value in tensors.items() if key != "transformer.resblocks.1.ln_1.bias"})
    with pytest.raises(ConfigError, match="unknown logit_bias"):
        ldm.from_open_clip({**tensors, "logit_bias": torch.zeros(())})


UNET = "model.diffusion_model."
WIDE = {f"{UNET}input_blocks.0.0.weight": (320, 4, 3, 3), f"{UNET}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (640, 768)}
ADDED = {f"{UNET}label_emb.0.0.weight": (1280, 2560)}


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({**WIDE, f"{UNET}input_blocks.0.0.weight": (320, 9, 3, 3)}, "inpainting model whose UNet takes 9 channels"),
        ({**WIDE, f"{UNET}input_blocks.0.0.weight": (320, 5, 3, 3)}, "depth model"),
        ({**WIDE, **ADDED, f"{UNET}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (768, 1280)}, "an SDXL refiner"),
        ({**WIDE, **ADDED, f"{UNET}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (640, 1024)}, "unCLIP"),
        ({**WIDE, f"{UNET}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (640, 512)}, "unknown family with conditioning 512"),
        ({f"{UNET}joint_blocks.0.context_block.attn.qkv.weight": (3, 1)}, "a Stable Diffusion 3 model"),
        ({"double_blocks.0.img_attn.qkv.weight": (3, 1)}, "a Flux model"),
        ({"lora_unet_up.weight": (3, 1)}, "no single-file checkpoint"),
        ({key.removeprefix(UNET): shape for key, shape in WIDE.items()}, "no single-file checkpoint"),
    ],
)
def test_files_of_other_families_are_refused_by_name(shapes: dict[str, tuple[int, ...]], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ldm.family({key: torch.empty(shape, device="meta") for key, shape in shapes.items()})
