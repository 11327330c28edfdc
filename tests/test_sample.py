"""Drawing: an image depends on its prompt, seed and settings alone, and bad requests stop before the first forward."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import diffusers
import numpy as np
import pytest
import torch

from sdlab import drawing, guidance, models, predictor, sample, solvers
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


def floats(model, batch_size, **settings):
    """Pictures in [0, 1] before they are rounded, by prompt."""
    vae, seen = model.frozen.vae, {}
    with pytest.MonkeyPatch.context() as patched:
        decode = vae.decode
        patched.setattr(vae, "decode", lambda latents: seen.setdefault(len(seen), decode(latents)))
        sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "batch_size": batch_size, **settings})
    return torch.cat([one.sample for one in seen.values()]).clamp(-1, 1)[: len(PROMPTS)] / 2 + 0.5


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-4), ("bf16-mixed", 0.02)])
@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_between_batch_sizes_pixels_stay_within_the_tolerance_of_their_number_format(model, solver, precision, tolerance):
    one, other = (floats(model, batch_size, solver=solver, precision=precision) for batch_size in (1, 5))
    assert (one - other).abs().max() <= tolerance


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
    conditional = sample.sample(model, PROMPTS, seeds=SEEDS, guidance=lambda cond, uncond, scale, at: cond, **QUICK)
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
    mine = lambda cond, uncond, scale, at: scales.append(scale.flatten().tolist()) or guidance.constant(cond, uncond, scale + 1)  # noqa: E731
    ours = sample.sample(model, PROMPTS[:1], seeds=[1], guidance=mine, **{**QUICK, "guidance_scale": 1})
    theirs = sample.sample(model, PROMPTS[:1], seeds=[1], **{**QUICK, "guidance_scale": 2})
    assert np.array_equal(ours, theirs) and scales == [[1], [1], [1]]


def test_ones_own_guidance_is_told_where_the_drawing_is(model):
    seen = []
    mine = lambda cond, uncond, scale, at: seen.append(at) or cond  # noqa: E731
    sample.sample(model, PROMPTS[:1], seeds=[1], guidance=mine, **QUICK)
    assert [at.timestep for at in seen] == solvers.trailing(3, 1000)
    assert [at.progress for at in seen] == sorted(at.progress for at in seen) and seen[0].progress == 0
    assert [at.sigma for at in seen] == sorted((at.sigma for at in seen), reverse=True) and seen[0].sigma == pytest.approx(14.61, abs=0.01)


@pytest.mark.parametrize("mine", [lambda cond, uncond, scale, at: cond.mean(), lambda cond, uncond, scale, at: None])
def test_guidance_that_gives_no_prediction_is_refused(model, mine):
    with pytest.raises(ConfigError, match=r"has to give a tensor \(1, 8, 8, 8\)"):
        sample.sample(model, PROMPTS[:1], seeds=[1], guidance=mine, **QUICK)


def test_guidance_that_gives_a_pair_goes_with_first_order_solvers_alone(model):
    pair = lambda cond, uncond, scale, at: (cond, uncond)  # noqa: E731
    settings = {"guidance": pair, **QUICK}
    plus_plus = sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "guidance": "cfgpp", "guidance_scale": 1, "solver": "ddim"})
    ours = sample.sample(model, PROMPTS, seeds=SEEDS, solver="ddim", **settings)
    assert np.abs(ours.astype(int) - plus_plus).max() <= 1
    with pytest.raises(ConfigError, match="guidance gave a pair, which solver 'dpmpp_2m' cannot follow; use ddim or euler"):
        sample.sample(model, PROMPTS, seeds=SEEDS, **settings)


def test_one_batch_may_carry_different_scales_and_each_image_is_as_if_alone(model):
    scales = [1, 5.0, 2.5, 0, 5.0]
    together = sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "guidance_scale": scales})
    for place, scale in enumerate(scales):
        alone = sample.sample(model, [PROMPTS[place]], seeds=[SEEDS[place]], **{**QUICK, "guidance_scale": scale})
        assert np.array_equal(together[place], alone[0])


def test_images_of_one_prediction_and_of_two_never_share_a_forward_and_each_text_is_encoded_once(model):
    with Rows(model.unet) as unet, Rows(model.frozen.text_encoders[0]) as text:
        sample.sample(model, PROMPTS * 2, seeds=range(10), **{**QUICK, "guidance_scale": [1] * 4 + [2] * 6})
    assert unet == [4] * 3 + [8] * 6
    assert text == [4, 4]


@pytest.mark.parametrize("scale", [0, 1, 3])
@pytest.mark.parametrize("kind", ["constant", "interval(0.5, 3)", "rising", "rescale", "mine"])
@pytest.mark.parametrize("solver", ["plms", "dpmpp_2m"])
def test_evaluations_and_rows_of_an_image_are_told_as_they_are_run(model, kind, scale, solver):
    chosen = (lambda cond, uncond, scale, at: uncond) if kind == "mine" else kind
    how = drawing.configure(model, guidance=chosen, solver=solver, num_inference_steps=5, batch_size=1)
    with Rows(model.unet) as unet:
        list(sample.stream(model, how, drawing.shots_of(PROMPTS[:1], seeds=[0], guidance_scale=scale)))
    assert how.work(scale) == drawing.Work(len(unet), sum(unet))


def test_guidance_in_an_interval_saves_the_rows_outside_it_and_is_constant_guidance_inside(model):
    one, outside, inside = (
        sample.sample(model, PROMPTS, seeds=SEEDS, guidance=kind, **{**QUICK, "guidance_scale": scale})
        for kind, scale in (("constant", 1), ("interval(100, 200)", 3), ("interval(0, 100)", 3))
    )
    three = sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "guidance_scale": 3})
    assert np.array_equal(one, outside) and np.array_equal(three, inside) and not np.array_equal(one, three)


def test_a_part_of_the_scale_is_taken_as_it_is_by_cfg_plus_plus(model):
    settings = {**QUICK, "guidance": "cfgpp", "solver": "ddim"}
    none, full = (sample.sample(model, PROMPTS, seeds=SEEDS, **{**settings, "guidance_scale": scale}) for scale in (0, 1))
    plain = sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "guidance_scale": 0, "solver": "ddim"})
    assert np.array_equal(none, plain) and not np.array_equal(none, full)


def test_a_sweep_runs_the_first_evaluation_once_for_all_scales_and_draws_what_each_scale_draws_alone(model):
    prompts, seeds, scales = PROMPTS[:3], SEEDS[:3], [1, 2.0, 4.0, 6.0]
    each = [scale for scale in scales for _ in prompts]
    asked = []
    with Rows(model.unet) as unet:
        settings = {**QUICK, "guidance_scale": each, "on_evaluation": lambda *at: asked.append(at)}
        together = sample.sample(model, prompts * 4, seeds=seeds * 4, **settings)
    mixed, guided = {4: 3, 8: 2}, {8: 2 * 2}
    assert Counter(unet) == Counter({8: 1}) + Counter(mixed) + Counter(guided)
    assert asked == [(done, len(unet)) for done in range(len(unet))]
    for place, scale in enumerate(scales):
        alone = sample.sample(model, prompts, seeds=seeds, **{**QUICK, "guidance_scale": scale})
        assert np.array_equal(together[3 * place : 3 * place + 3], alone)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_batches_drawn_beside_each_other_are_what_each_is_alone_and_the_number_of_threads_stays(model, two_threads):
    together = sample.sample(model, PROMPTS * 2, seeds=range(10), **{**QUICK, "batch_size": 2})
    for place in (0, 4, 9):
        alone = sample.sample(model, [PROMPTS[place % 5]], seeds=[place], **{**QUICK, "batch_size": 2})
        assert np.array_equal(together[place], alone[0])
    assert torch.get_num_threads() == 2


def test_what_ends_one_batch_ends_those_beside_it(model, two_threads):
    asked = []

    def stop(done, total):
        asked.append(done)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample.sample(model, PROMPTS, seeds=SEEDS, on_evaluation=stop, **{**QUICK, "batch_size": 1, "num_inference_steps": 30})
    assert len(asked) < 12 and torch.get_num_threads() == 2


def test_the_text_states_of_a_few_batches_are_held_at_a_time(model, monkeypatch):
    held = []
    real = predictor.Forward.__init__
    monkeypatch.setattr(
        predictor.Forward, "__init__", lambda self, *given, **more: held.append(len(given[2])) or real(self, *given, **more)
    )
    how = drawing.configure(model, num_inference_steps=1, batch_size=2)
    shots = drawing.shots_of([f"an owl {number}" for number in range(40)], seeds=range(40), guidance_scale=1)
    stream = sample.stream(model, how, shots)
    first, images = next(stream)
    assert first == [0, 1] and images.shape == (2, 3, 64, 64) and held == [2 * sample.BATCHES_A_PART]
    assert sorted([*first, *(which for some, _ in stream for which in some)]) == list(range(40))


class NoMemory:
    """Memory runs out in forwards of more than so many rows."""

    def __init__(self, module, most):
        self.most = most
        self.hook = module.register_forward_pre_hook(self.look)

    def look(self, module, arguments):
        if len(arguments[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hook.remove()


def test_where_memory_runs_out_the_batch_is_halved_once_with_a_note(model, capsys):
    with NoMemory(model.unet, 4):
        images = sample.sample(model, PROMPTS, seeds=SEEDS, **QUICK)
    assert np.array_equal(images, sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "batch_size": 2}))
    assert "out of memory at batch_size 4: drawing goes on at 2" in capsys.readouterr().out


def test_where_half_a_batch_is_too_much_too_the_error_comes_through(model):
    with NoMemory(model.unet, 2), pytest.raises(torch.OutOfMemoryError):
        sample.sample(model, PROMPTS, seeds=SEEDS, **QUICK)


def test_other_sizes_and_sides_of_different_length_can_be_drawn(model):
    wide = sample.sample(model, PROMPTS[:1], seeds=[0], resolution=(32, 96), **QUICK)
    assert wide.shape == (1, 3, 32, 96)
    assert sample.sample(model, PROMPTS[:1], seeds=[0], resolution=32, **QUICK).shape == (1, 3, 32, 32)


def test_prompts_that_are_cut_are_counted(model):
    long = " ".join(["owl"] * 200)
    assert drawing.truncated(model, PROMPTS) == ""
    told = drawing.truncated(model, [*PROMPTS, long, long])
    assert (
        told.startswith(f"1 of 5 prompts go beyond the {model.frozen.max_tokens} tokens") and "\u201cowl owl" in told and "has 402" in told
    )


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
    noise = predictor.draw_noise(model, SEEDS[:2])
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


def test_numbers_of_numpy_are_numbers(model, drawn):
    scales = np.linspace(1, 8, 5)
    ours = sample.sample(model, PROMPTS, seeds=np.array(SEEDS), **{**QUICK, "guidance_scale": scales})
    theirs = sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "guidance_scale": scales.tolist()})
    assert np.array_equal(ours, theirs)
    for two in (np.float64(2), np.float32(2), np.int64(2)):
        assert np.array_equal(sample.sample(model, PROMPTS, seeds=SEEDS, **{**QUICK, "guidance_scale": two}), drawn)


def test_a_drawing_within_a_drawing_is_part_of_it(model, two_threads, drawn):
    inner = []

    def draw_too(done, total):
        if not inner:
            inner.append(None)
            inner[0] = sample.sample(model, PROMPTS[:1], seeds=SEEDS[:1], **QUICK)

    sample.sample(model, PROMPTS, seeds=SEEDS, on_evaluation=draw_too, **QUICK)
    assert np.array_equal(inner[0][0], drawn[0])


def test_threads_that_draw_at_the_same_time_draw_what_each_draws_alone(model, two_threads):
    settings = {**QUICK, "batch_size": 2}
    expected = sample.sample(model, PROMPTS, seeds=SEEDS, **settings)
    with ThreadPoolExecutor(3) as pool:
        draws = [pool.submit(sample.sample, model, PROMPTS[:count], seeds=SEEDS[:count], **settings) for count in (5, 3, 1) * 8]
        assert all(np.array_equal(draw.result(), expected[: len(draw.result())]) for draw in draws)
    assert torch.get_num_threads() == 2


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
    "guidance_scale=1e\\+31": {"guidance_scale": 1e31},
    "guidance_scale=inf.*finite": {"guidance_scale": 10**400},
    "guidance_scale=None": {"guidance_scale": None},
    "guidance_scale=tensor": {"guidance_scale": torch.tensor(2.0)},
    "guidance_scale=b'2'": {"guidance_scale": b"2"},
    "no list of seeds for 2 prompts": {"seeds": 5},
    "prompts=5 is no list": {"prompts": 5},
    r"prompts\[0\]='.*' holds half of a character": {"prompts": ["\ud800", "an owl"]},
    "resolution='64': give one whole number": {"resolution": "64"},
    r"resolution=\[64.0, 64.0\]": {"resolution": [64.0, 64.0]},
    "3 guidance scales for 2 prompts": {"guidance_scale": [1, 2, 3]},
    "guidance_scale=True": {"guidance_scale": [True, 2]},
    "spacing 'trailling' is not known.*did you mean 'trailing'": {"spacing": "trailling"},
    "guidance 'intervall' is not known.*did you mean 'interval'": {"guidance": "intervall"},
    "take four arguments": {"guidance": lambda cond, uncond, scale: cond},
    "from 0 to 1 with guidance 'cfgpp'": {"guidance": "cfgpp", "solver": "ddim", "guidance_scale": 2},
    "use it with solver ddim or euler": {"guidance": "cfgpp", "guidance_scale": 0.5},
    "resolution=36 cannot be": {"resolution": 36},
    "give one whole number of pixels a side, or height and width": {"resolution": [32, 32, 32]},
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
