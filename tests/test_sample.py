"""Drawing: an image depends on its prompt, seed and settings alone, and bad requests stop before the first forward."""

import threading

import diffusers
import numpy as np
import pytest
import torch

from sdlab import diffusion, models, sample, scenes, solvers
from sdlab.config import ConfigError

PROMPTS = [
    "a large owl on a pink background",
    "a cat above a rocket on a yellow background",
    "a small tulip on a white background",
    "a frog left of a car on a blue background",
    "",
]
SEEDS = [5, 3, 11, 2**40, 0]
QUICK = {"guidance_scale": 2.0, "num_inference_steps": 3, "batch_size": 4}


@pytest.fixture(scope="module")
def model():
    """The built-in networks with a random UNet whose last layer is not tiny, so that prompts and seeds show."""
    tiny = models.load("tiny")
    unet = models.build_unet(tiny.networks, seed=1).eval().requires_grad_(False)
    return models.TextToImage(tiny.frozen, unet, tiny.networks, "random", "raw", 0, "", tiny.resolution)


@pytest.fixture(scope="module")
def drawn(model):
    return sample.sample(model, PROMPTS, seeds=SEEDS, **QUICK)


class Rows:
    """Counts the rows of every forward of a module."""

    def __init__(self, module):
        self.seen = []
        self.hook = module.register_forward_pre_hook(lambda module, arguments: self.seen.append(len(arguments[0])))

    def __enter__(self):
        return self.seen

    def __exit__(self, *_):
        self.hook.remove()


def test_images_are_uint8_of_the_models_resolution_and_differ_by_prompt_and_seed(model, drawn):
    assert drawn.dtype == np.uint8 and drawn.shape == (5, 3, model.resolution, model.resolution)
    others = sample.sample(model, [PROMPTS[0], PROMPTS[1]], seeds=[6, 5], **QUICK)
    assert not np.array_equal(others[0], drawn[0])
    assert not np.array_equal(others[1], drawn[0])


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [0], [3, 3, 0, 3, 1, 2]])
def test_an_image_is_the_same_bit_for_bit_whatever_its_place_and_neighbours(model, drawn, order):
    again = sample.sample(model, [PROMPTS[i] for i in order], seeds=[SEEDS[i] for i in order], **QUICK)
    assert np.array_equal(again, drawn[order])


def test_between_batch_sizes_pixels_differ_by_rounding_at_most(model, drawn):
    again = sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "batch_size": 7})
    assert np.abs(again.astype(int) - drawn).max() <= 1


def test_the_global_random_state_is_neither_read_nor_moved(model, drawn):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert np.array_equal(sample.sample(model, PROMPTS[:1], seeds=SEEDS[:1], **QUICK)[0], drawn[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("guidance_scale", "rows"), [(0, 4), (1, 4), (1.5, 8)])
def test_every_forward_has_exactly_batch_size_prompts_and_twice_the_rows_when_guided(model, guidance_scale, rows):
    frozen = model.frozen
    with Rows(model.unet) as unet, Rows(frozen.text_encoders[0]) as text, Rows(frozen.vae.decoder) as vae:
        sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "guidance_scale": guidance_scale})
    assert unet == [rows] * 6
    assert text == [4, 4]
    assert vae == [4, 4]


def test_guidance_at_one_is_the_conditional_prediction_alone(model):
    plain = sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "guidance_scale": 1})
    conditional = sample.sample(model, PROMPTS, seeds=SEEDS, guidance=lambda cond, uncond, scale: cond, **QUICK)
    assert np.abs(plain.astype(int) - conditional).max() <= 1


def test_guidance_at_zero_does_not_look_at_the_prompt_but_at_the_negative_one(model):
    zero = {**QUICK, "guidance_scale": 0}
    first, second = (sample.sample(model, [prompt], seeds=[1], **zero) for prompt in PROMPTS[:2])
    away = sample.sample(model, PROMPTS[:1], seeds=[1], negative_prompt=PROMPTS[3], **zero)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, away)


def test_a_negative_prompt_equal_to_the_prompt_takes_guidance_away(model):
    one, eight = (
        sample.sample(model, PROMPTS[:1], seeds=[1], negative_prompt=PROMPTS[0], **{**QUICK, "guidance_scale": scale}) for scale in (1, 8)
    )
    assert np.abs(one.astype(int) - eight).max() <= 1


def test_ones_own_guidance_is_followed_at_every_scale(model):
    scales = []
    mine = lambda cond, uncond, scale: scales.append(scale) or diffusion.constant_guidance(cond, uncond, scale + 1)  # noqa: E731
    ours = sample.sample(model, PROMPTS[:1], seeds=[1], guidance=mine, **{**QUICK, "guidance_scale": 1})
    theirs = sample.sample(model, PROMPTS[:1], seeds=[1], **{**QUICK, "guidance_scale": 2})
    assert np.array_equal(ours, theirs) and scales == [1, 1, 1]


@pytest.mark.parametrize("mine", [lambda cond, uncond, scale: cond.mean(), lambda cond, uncond, scale: None])
def test_guidance_that_gives_no_epsilon_is_refused(model, mine):
    with pytest.raises(ConfigError, match=r"has to give a tensor \(4, 8, 8, 8\)"):
        sample.sample(model, PROMPTS[:1], seeds=[1], guidance=mine, **QUICK)


@pytest.mark.parametrize("solver", ["ddim", "plms"])
def test_pictures_are_those_of_diffusers_own_pipeline(model, solver):
    """PNDM is given epsilon, because it is right only there."""
    kind = {"ddim": model.networks.prediction_type, "plms": "epsilon"}[solver]
    networks = model.networks.model_copy(update={"prediction_type": kind})
    scheduler = {"ddim": diffusers.DDIMScheduler, "plms": diffusers.PNDMScheduler}[solver](
        **networks.noise_schedule.model_dump(exclude={"rescale_betas_zero_snr"}),
        prediction_type=kind,
        steps_offset=1,
        set_alpha_to_one=False,
        **({"clip_sample": False} if solver == "ddim" else {"skip_prk_steps": True}),
    )
    frozen = model.frozen
    parts = {"vae": frozen.vae, "text_encoder": frozen.text_encoders[0], "tokenizer": frozen.tokenizers[0], "unet": model.unet}
    pipeline = diffusers.StableDiffusionPipeline(
        **parts, scheduler=scheduler, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = sample.draw_noise(model, SEEDS[:2])
    theirs = pipeline(PROMPTS[:2], latents=noise, guidance_scale=3.0, num_inference_steps=4, output_type="np").images.transpose(0, 3, 1, 2)
    same = models.TextToImage(**{**vars(model), "networks": networks})
    ours = sample.sample(same, PROMPTS[:2], seeds=SEEDS[:2], guidance_scale=3.0, num_inference_steps=4, solver=solver, batch_size=2)
    assert np.abs(ours - theirs * 255).max() <= 1


def test_bf16_stays_near_float32(model, drawn):
    near = sample.sample(model, PROMPTS, seeds=SEEDS, precision="bf16-mixed", **QUICK)
    assert np.abs(near.astype(int) - drawn).mean() < 3


def test_progress_is_reported_in_images_and_in_unet_evaluations(model):
    finished, asked = [], []
    sample.sample(model, PROMPTS, seeds=SEEDS, solver="plms", report=finished.append, on_evaluation=lambda *at: asked.append(at), **QUICK)
    assert finished == [4, 1]
    assert asked == [(done, 8) for done in range(8)]
    assert len(asked) == 2 * solvers.evaluations("plms", 3)


def test_what_is_raised_before_an_evaluation_ends_the_drawing_and_the_model_stays_usable(model, drawn):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample.sample(model, PROMPTS, seeds=SEEDS, on_evaluation=stop, **QUICK)
    assert np.array_equal(sample.sample(model, PROMPTS[:1], seeds=SEEDS[:1], **QUICK)[0], drawn[0])


def test_two_threads_draw_the_same_pictures_as_one(model, drawn):
    results = {}
    draw = lambda name, keep: results.update({name: sample.sample(model, PROMPTS[keep], seeds=SEEDS[keep], **QUICK)})  # noqa: E731
    threads = [threading.Thread(target=draw, args=(name, keep)) for name, keep in (("a", slice(0, 3)), ("b", slice(2, 5)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(results["a"], drawn[:3]) and np.array_equal(results["b"], drawn[2:])


def test_a_grid_keeps_each_prompts_noise_over_all_scales(model):
    grid = sample.sample_grid(model, PROMPTS[:2], guidance_scales=[1, 4.0], seed=7, num_inference_steps=2)
    assert grid.shape == (2, 2, 3, 64, 64)
    for column, scale in enumerate([1, 4.0]):
        alone = sample.sample(model, PROMPTS[:2], guidance_scale=scale, seeds=[7, 8], num_inference_steps=2, batch_size=2)
        assert np.array_equal(grid[:, column], alone)


BAD = {
    "did you mean 'ddim'": {"solver": "dim"},
    "num_inference_steps=0: .*from 1 to 1000": {"num_inference_steps": 0},
    "num_inference_steps=1001: .*from 1 to 1000": {"num_inference_steps": 1001},
    "guidance_scale=-1": {"guidance_scale": -1},
    "guidance_scale=nan": {"guidance_scale": float("nan")},
    "guidance_scale=inf": {"guidance_scale": float("inf")},
    "guidance_scale='2'": {"guidance_scale": "2"},
    "prompts is empty": {"prompts": [], "seeds": []},
    "is one text; give a list": {"prompts": "an owl"},
    r"prompts\[1\]=None is NoneType": {"prompts": ["an owl", None]},
    "negative_prompt=3 is int": {"negative_prompt": 3},
    "1 seeds for 2 prompts": {"seeds": [1]},
    "seed -1 cannot be used": {"seeds": [0, -1]},
    "seed 1.5 cannot be used": {"seeds": [0, 1.5]},
    "batch_size=0": {"batch_size": 0},
    "precision='16-mixed'; allowed are '32-true', 'bf16-mixed'": {"precision": "16-mixed"},
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_drawn_is_refused_before_the_first_forward(model, message):
    request = {"prompts": PROMPTS[:2], "seeds": [0, 1], **QUICK, **BAD[message]}
    with Rows(model.unet) as unet, Rows(model.frozen.text_encoders[0]) as text, pytest.raises(ConfigError, match=message):
        sample.sample(model, **request)
    assert unet == text == []


def test_a_resolution_that_the_networks_cannot_halve_is_refused(model):
    odd = models.TextToImage(**{**vars(model), "resolution": 40})
    with pytest.raises(ConfigError, match="resolution=40 cannot be halved evenly"):
        sample.sample(odd, PROMPTS[:1], seeds=[0], **QUICK)


@pytest.mark.parametrize(("scales", "message"), [([], "guidance_scales is empty"), ([1, -2], "guidance_scale=-2")])
def test_a_grid_with_bad_scales_is_refused_before_the_first_forward(model, scales, message):
    with Rows(model.unet) as unet, pytest.raises(ConfigError, match=message):
        sample.sample_grid(model, PROMPTS[:1], guidance_scales=scales, seed=0)
    assert unet == []


def test_the_reader_says_right_or_what_is_wrong_and_skips_prompts_that_are_no_scene():
    wanted = [scenes.parse(prompt) for prompt in (PROMPTS[0], PROMPTS[1])]
    pictures = scenes.render(wanted)
    grid = np.stack([pictures, pictures[::-1], pictures], axis=1)[[0, 1, 0]]
    rows = sample.read_grid(grid, [PROMPTS[0], PROMPTS[1], "a castle at dawn"], [1, 2.5, 8])
    assert rows == [
        {"prompt": PROMPTS[0], "1": "right", "2.5": "wrong: background, objects", "8": "right"},
        {"prompt": PROMPTS[1], "1": "right", "2.5": "wrong: background, objects", "8": "right"},
    ]


def test_the_reader_has_nothing_to_say_of_pictures_of_another_size():
    assert sample.read_grid(np.zeros((1, 1, 3, 32, 32), np.uint8), PROMPTS[:1], [1]) == []


def test_tiles_are_enlarged_by_whole_factors_and_laid_out_in_rows():
    images = np.arange(3 * 3 * 4 * 4, dtype=np.uint8).reshape(3, 3, 4, 4)
    sheet = sample.tile(images, columns=2, min_side=8)
    assert sheet.size == (2 * 8 + 4, 2 * 8 + 4)
    assert sheet.getpixel((12, 1)) == tuple(images[1, :, 0, 0])
    assert sheet.getpixel((2, 14)) == tuple(images[2, :, 1, 1])
