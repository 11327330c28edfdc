"""Guidance in closed form, its names, and which forwards it saves."""

import functools
import hashlib
import importlib
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

from sdlab import diffusion, drawing, guidance, predictor, sample
from sdlab.config import ConfigError, Networks
from sdlab.guidance import At
from sdlab.parts import TextStates

RANDOM = torch.Generator().manual_seed(2)
COND, UNCOND = torch.randn(4, 4, 8, 8, generator=RANDOM), torch.randn(4, 4, 8, 8, generator=RANDOM)
SD = Networks(frozen="tiny", unet={}, prediction_type="epsilon")
HERE = At(500, 1.6, 0.5)


def points(solver="ddim", steps=50, spacing="leading"):
    """Where a drawing is at each of its evaluations."""
    how = drawing.Drawing(SD, solver, steps, spacing)
    return [how.at(timestep) for timestep in how.evaluated]


# Constant


def test_guidance_at_one_is_the_condition_and_at_zero_the_unconditional_prediction():
    torch.testing.assert_close(guidance.constant(COND, UNCOND, 1.0), COND)
    assert torch.equal(guidance.constant(COND, UNCOND, 0.0), UNCOND)


def test_guidance_goes_on_beyond_the_condition():
    cond, uncond = torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1, 1), 1.0)
    assert guidance.constant(cond, uncond, 7.5).item() == 16


@pytest.mark.parametrize("combine", [guidance.constant, guidance.rescaled, lambda *given: guidance.plus_plus(*given)[0]])
def test_one_batch_may_carry_one_scale_an_image(combine):
    scales = torch.tensor([0.0, 1.0, 2.0, 8.0]).view(-1, 1, 1, 1)
    together = combine(COND, UNCOND, scales)
    for row, scale in enumerate(scales.flatten().tolist()):
        torch.testing.assert_close(together[row : row + 1], combine(COND[row : row + 1], UNCOND[row : row + 1], scale))


def test_constant_guidance_leaves_out_what_it_does_not_need():
    needs = {scale: guidance.CONSTANT.needs(scale, HERE) for scale in (0, 0.5, 1, 1.5, 7.5)}
    assert needs == {0: (False, True), 0.5: (True, True), 1: (True, False), 1.5: (True, True), 7.5: (True, True)}


# Rescaled


@pytest.mark.parametrize("mix", [0, 0.7, 1])
def test_rescaled_guidance_is_that_of_diffusers(mix):
    expected = rescale_noise_cfg(guidance.constant(COND, UNCOND, 7.5), COND, guidance_rescale=mix)
    torch.testing.assert_close(guidance.rescaled(COND, UNCOND, 7.5, mix=mix), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(guidance.rescale(mix).combine(COND, UNCOND, 7.5, HERE), expected, atol=1e-5, rtol=1e-5)


def test_rescaled_guidance_has_the_spread_of_the_condition_image_by_image():
    cond = COND * torch.tensor([0.1, 1.0, 2.0, 30.0]).view(-1, 1, 1, 1)
    found = guidance.rescaled(cond, UNCOND, 7.5, mix=1)
    torch.testing.assert_close(found.std(dim=(1, 2, 3)), cond.std(dim=(1, 2, 3)))


def test_rescaled_guidance_measures_the_spread_in_float32_and_keeps_the_type():
    half = guidance.rescaled(COND.bfloat16(), UNCOND.bfloat16(), 7.5, mix=1)
    guided = guidance.constant(COND.bfloat16(), UNCOND.bfloat16(), 7.5)
    share = COND.bfloat16().float().std(dim=(1, 2, 3)) / guided.float().std(dim=(1, 2, 3))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, guided * share.bfloat16().view(-1, 1, 1, 1))


def test_rescaled_guidance_leaves_out_unconditional_rows_at_one_where_it_is_the_condition():
    torch.testing.assert_close(guidance.rescaled(COND, UNCOND, 1.0), COND, atol=1e-5, rtol=1e-5)
    assert guidance.rescale().needs(1, HERE) == (True, False)
    assert guidance.rescale().needs(0, HERE) == guidance.rescale().needs(2, HERE) == (True, True)


# Interval


def test_outside_the_interval_the_condition_alone_is_run_and_inside_the_scale_is_as_given():
    guided = guidance.interval(0.4, 3)
    for sigma, inside in [(14.6, False), (3.001, False), (3, True), (1, True), (0.401, True), (0.4, False), (0.03, False)]:
        at = At(0, sigma, 0.5)
        assert guided.scale_at(7.5, at) == (7.5 if inside else 1)
        assert guided.needs(7.5, at) == (True, inside)


def test_on_sds_schedule_the_default_interval_guides_29_of_50_steps_from_timestep_681_to_121():
    guided = [at.timestep for at in points() if guidance.interval().needs(7.5, at) == (True, True)]
    assert guided == list(range(681, 120, -20)) and len(guided) == 29
    plms = drawing.Drawing(SD, "plms", 50, guidance=guidance.interval()).work(7.5)
    assert (plms.evaluations, plms.rows) == (51, 80)
    assert drawing.Drawing(SD, "plms", 50).work(7.5).rows == 102


# Rising


@pytest.mark.parametrize("least", [0, 1, 3])
@pytest.mark.parametrize("scale", [1.0, 1.2, 3.0, 7.5])
def test_a_rising_scale_never_falls_is_never_below_its_least_and_is_on_average_as_given(scale, least):
    """The clamp lifts the start, so the slope is less than that of 2 x progress; a scale at or below the least stays as it is."""
    count = 20000
    scales = [guidance.rising(least).scale_at(scale, At(0, 1.0, (index + 0.5) / count)) for index in range(count)]
    assert sum(scales) / count == pytest.approx(scale, rel=1e-4)
    assert all(a <= b for a, b in itertools.pairwise(scales))
    assert min(scales) >= min(least, scale)
    assert scale <= least or scales[-1] > 1.2 * scale


def test_without_a_least_a_rising_scale_goes_from_nothing_to_twice_as_given():
    assert [guidance.rising(0).scale_at(7.5, At(0, 1.0, progress)) for progress in (0, 0.25, 1)] == [0, 3.75, 15]


def test_a_rising_scale_runs_no_unconditional_rows_while_it_is_one():
    needed = [guidance.rising().needs(7.5, at)[1] for at in points()]
    first = needed.index(True)
    assert 0 < first < 10 and all(needed[first:])


def test_progress_goes_from_nothing_to_all_and_sigma_falls():
    trailing = points(spacing="trailing")
    assert trailing[0].progress == 0 and points(spacing="linspace")[-1].progress == 1
    assert all(a.progress < b.progress and a.sigma > b.sigma for a, b in itertools.pairwise(trailing))
    alpha = float(diffusion.alphas_cumprod(SD.noise_schedule)[999])
    assert trailing[0].sigma == pytest.approx(math.sqrt(1 / alpha - 1)) and trailing[0].timestep == 999


# CFG++


class Told:
    """A model whose UNet reads the prompt as a number, and whose latents are kept in place of a picture."""

    device, config, vae_factor = torch.device("cpu"), SimpleNamespace(in_channels=4), 8

    def __init__(self):
        self.unet, self.frozen, self.latents = self, self, []

    def __call__(self, latents, timesteps, *, encoder_hidden_states, added_cond_kwargs):
        return SimpleNamespace(sample=told(latents, encoder_hidden_states.view(-1, 1, 1, 1), timesteps.view(-1, 1, 1, 1)))

    def parameters(self):
        return []

    def tokenize(self, texts):
        return torch.tensor([[[float(text)]] for text in texts])

    def encode_text(self, tokens):
        return TextStates(tokens)

    def decode(self, latents):
        self.latents.append(latents)
        return torch.zeros(len(latents), 3, 64, 64, dtype=torch.uint8)


def told(latents, prompt, timestep):
    return 0.3 * latents + prompt * (1 + timestep / 1000)


def drawn(prediction_type, guided, scale):
    """How, the noise, and the latents that come of it with prompt 0.5 against -0.2."""
    of = Networks(frozen="tiny", unet={}, prediction_type=prediction_type)
    how, model = drawing.Drawing(of, "ddim", 4, guidance=guided, size=(64, 64), batch_size=2), Told()
    list(sample.stream(model, how, [drawing.Shot("0.5", seed, scale, negative_prompt="-0.2") for seed in (1, 2)]))
    return how, predictor.draw_noise(model, [1, 2], (64, 64)), model.latents[0]


@pytest.mark.parametrize("scale", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_cfg_plus_plus_with_ddim_is_its_algorithm(prediction_type, scale):
    """The picture comes from the guided prediction, the noise that is put on it again from the unconditional one."""
    how, latents, found = drawn(prediction_type, guidance.named("cfgpp"), scale)
    for timestep, after in itertools.pairwise([*how.timesteps, 0]):
        now, later = float(how.alphas[timestep]), float(how.alphas[after])
        uncond, cond = told(latents, -0.2, timestep), told(latents, 0.5, timestep)
        guided = (1 - scale) * uncond + scale * cond
        read = functools.partial(diffusion.read_prediction, noisy_latents=latents, alpha=now, prediction_type=prediction_type)
        latents = math.sqrt(later) * read(guided).denoised + math.sqrt(1 - later) * read(uncond).epsilon
    torch.testing.assert_close(found, latents, atol=2e-5, rtol=2e-5)


def test_cfg_plus_plus_at_one_reads_the_picture_from_the_condition_and_the_noise_without_it():
    picture, noise = guidance.plus_plus(COND, UNCOND, 1.0)
    torch.testing.assert_close(picture, COND)
    assert torch.equal(noise, UNCOND)
    guided = guidance.named("cfgpp")
    assert guided.needs(1, HERE) == guided.needs(0.6, HERE) == (True, True)
    assert guided.needs(0, HERE) == (False, True)


@pytest.mark.parametrize("solver", ["plms", "dpmpp_2m"])
def test_cfg_plus_plus_is_refused_with_solvers_that_follow_one_prediction(solver):
    model = SimpleNamespace(networks=SD, resolution=64)
    with pytest.raises(ConfigError, match="use it with solver ddim or euler"):
        drawing.configure(model, solver=solver, guidance="cfgpp")


@pytest.mark.parametrize("scale", [1.01, 7.5, -0.1, math.nan])
def test_cfg_plus_plus_takes_scales_from_zero_to_one(scale):
    with pytest.raises(ConfigError, match="from 0 to 1 with guidance 'cfgpp'"):
        drawing.check_scales(guidance.named("cfgpp"), [0.6, scale])
    drawing.check_scales(guidance.named("cfgpp"), [0, 0.6, 1])


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_a_pair_of_the_same_prediction_is_as_good_as_one(prediction_type):
    pair = guidance.own(lambda cond, uncond, scale, at: (guidance.constant(cond, uncond, scale),) * 2)
    of_pair, of_one = (drawn(prediction_type, guided, 3.0)[2] for guided in (pair, guidance.CONSTANT))
    assert torch.equal(of_pair, of_one)


# Names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("constant", "constant"),
        ("constant()", "constant"),
        (" interval ", "interval(0.38, 3.22)"),
        ("interval(0.4, 3)", "interval(0.4, 3)"),
        ("interval(0.4,high=3)", "interval(0.4, 3)"),
        ("interval(low=0.4, high=3)", "interval(0.4, 3)"),
        ("interval(high=3, low=4e-1)", "interval(0.4, 3)"),
        ("rising", "rising(1.0)"),
        ("rising(2)", "rising(2)"),
        ("rescale", "rescale(0.7)"),
        ("rescale(0.5)", "rescale(0.5)"),
        ("cfgpp", "cfgpp"),
    ],
)
def test_a_name_is_read_and_its_guidance_goes_by_a_name_that_is_read_to_the_same(text, name):
    found = guidance.named(text)
    assert found.name == name
    for at, scale in itertools.product(points(steps=10), (0, 0.5, 1, 7.5)):
        again = guidance.named(name)
        assert again.scale_at(scale, at) == found.scale_at(scale, at) and again.needs(scale, at) == found.needs(scale, at)


def test_arguments_reach_the_guidance():
    assert guidance.named("interval(0.4, 3)").scale_at(7.5, At(0, 3.1, 0.5)) == 1
    assert guidance.named("rising(2)").scale_at(7.5, At(0, 1.0, 0.0)) == 2
    expected = guidance.rescaled(COND, UNCOND, 7.5, mix=0.5)
    assert torch.equal(guidance.named("rescale(0.5)").combine(COND, UNCOND, 7.5, HERE), expected)
    assert guidance.named("constant") is guidance.CONSTANT


REFUSED = {
    "intervall": "did you mean 'interval'",
    "cfg": "did you mean 'cfgpp'",
    "nothing like it": "is neither one of constant",
    "xxxxxxxx": "known are",
    "": "is neither one of constant",
    "  ": "is neither one of constant",
    "interval(3, 1)": "0 <= low < high",
    "interval(1, 1)": "0 <= low < high",
    "interval(-1, 1)": "0 <= low < high",
    "rescale(2)": "between 0 and 1",
    "rescale(-0.1)": "between 0 and 1",
    "rising(-1)": "0 or more",
    "interval(a)": "its arguments are finite numbers: interval(low=0.38, high=3.22)",
    "interval(__import__('os'))": "its arguments are finite numbers",
    "interval(0.4, 3, 5)": "its arguments are finite numbers",
    "interval(0.4, low=3)": "its arguments are finite numbers",
    "interval(low=0.4, low=1)": "its arguments are finite numbers",
    "interval(lowest=0.4)": "its arguments are finite numbers",
    "interval(interval(0.4, 3))": "its arguments are finite numbers",
    "interval(0.4)(0.5)": "its arguments are finite numbers",
    "interval(0.4).scale_at(0.5)": "its arguments are finite numbers",
    "interval(0.4, 3": "is neither one of constant",
    "interval(0.4, 3))": "its arguments are finite numbers",
    "interval(nan, 3)": "its arguments are finite numbers",
    "interval(0, inf)": "its arguments are finite numbers",
    "interval(0, 1e999)": "its arguments are finite numbers",
    "interval(0, 1" + "0" * 400 + ")": "its arguments are finite numbers",
    "rescale(True)": "its arguments are finite numbers: rescale(mix=0.7)",
    "rescale(None)": "its arguments are finite numbers",
    "rescale('0.5')": "its arguments are finite numbers",
    "rescale([0.5])": "its arguments are finite numbers",
    "rescale(*[0.5])": "its arguments are finite numbers",
    "rescale(**{})": "its arguments are finite numbers",
    "rescale(1j)": "its arguments are finite numbers",
    "rescale(" + "-" * 100000 + "1)": "its arguments are finite numbers",
    "constant(1)": "its arguments are finite numbers: constant()",
    "cfgpp(0.6)": "its arguments are finite numbers: cfgpp()",
    "x:y": "ModuleNotFoundError: No module named 'x'",
    "math:nothing": "has no attribute 'nothing'",
    "math:pi": "has to take four arguments",
    "math:sin": "has to take four arguments",
    ".x:y": "cannot be imported",
    "x:y(1)": "a function takes no arguments here; give it as 'x:y'",
    "x:": "is neither one of constant",
    ":y": "is neither one of constant",
    "x:y:z": "is neither one of constant",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_what_is_no_guidance_is_refused_in_one_sentence(text):
    with pytest.raises(ConfigError) as caught:
        guidance.named(text)
    assert REFUSED[text] in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("guidance")


# One's own


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of one's own and imports it afresh."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source, name="my_guidance"):
        (tmp_path / f"{name}.py").write_text(source)
        for own in ("my_guidance", "my_other"):
            sys.modules.pop(own, None)
        importlib.invalidate_caches()

    yield write
    for own in ("my_guidance", "my_other"):
        sys.modules.pop(own, None)


TWICE = "def twice(cond, uncond, guidance_scale, at):\n    return uncond + {} * guidance_scale * (cond - uncond)\n"


def test_a_function_of_a_module_is_found_runs_every_row_and_goes_by_its_place(module):
    module(TWICE.format(2))
    found = guidance.named("my_guidance:twice")
    assert found.name == "my_guidance:twice" and not found.splits
    torch.testing.assert_close(found.combine(COND, UNCOND, 3.0, HERE), guidance.constant(COND, UNCOND, 6.0))
    assert found.needs(0, HERE) == found.needs(1, HERE) == (True, True)


def test_the_source_hash_of_a_module_follows_its_file(module):
    hashes = []
    for source in (TWICE.format(2), TWICE.format(3), "helper = 1\n" + TWICE.format(2), TWICE.format(2)):
        module(source)
        hashes.append(guidance.named("my_guidance:twice").source_hash)
    assert hashes[0] == hashes[3] and len(set(hashes)) == 3
    assert all(len(one) == 64 for one in hashes)


def test_the_source_hash_follows_the_file_that_makes_a_function_and_the_one_that_it_comes_from(module):
    """A partial, whose own module is functools, and a function that another module brings in."""
    hashes = []
    for mix, factor in [(0.3, 2), (0.4, 2), (0.4, 3)]:
        module(TWICE.format(factor), "my_other")
        lines = ["import functools", "from my_other import twice", "from sdlab import guidance"]
        module("\n".join([*lines, f"part = functools.partial(guidance.rescaled, mix={mix})\n"]))
        hashes.append([guidance.named(f"my_guidance:{name}").source_hash for name in ("part", "twice")])
    (part, brought), (other_part, same), (last_part, changed) = hashes
    assert part != other_part == last_part
    assert brought != same != changed


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def twice(:", "SyntaxError"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("", "has no attribute 'twice'"),
        ("def twice(cond, uncond, guidance_scale): pass", "has to take four arguments: cond, uncond, guidance_scale, at"),
        ("def twice(cond, uncond, guidance_scale, at, more): pass", "has to take four arguments"),
        ("def twice(cond, *, uncond, guidance_scale, at): pass", "has to take four arguments"),
        ("twice = 3", "has to take four arguments"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused_in_one_sentence(module, source, said):
    module(source)
    with pytest.raises(ConfigError) as caught:
        guidance.named("my_guidance:twice")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_functions_of_ones_own_may_take_more_than_four_arguments_with_defaults(module):
    module("def twice(cond, uncond, guidance_scale, at, more=1): return cond\ndef any(*given): return given[0]\n")
    for name in ("twice", "any"):
        assert guidance.named(f"my_guidance:{name}").combine(COND, UNCOND, 2.0, HERE) is COND


def of_this_file(cond, uncond, guidance_scale, at, more=1):
    return cond


def test_ones_own_functions_go_by_their_names_and_are_hashed_by_their_file():
    nameless, function, partial = (
        guidance.own(one) for one in (lambda c, u, s, at: c, of_this_file, functools.partial(of_this_file, more=2))
    )
    assert (nameless.name, function.name, partial.name) == ("own function", "own function of_this_file", "own function partial")
    this_file = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert nameless.source_hash == function.source_hash == partial.source_hash == this_file
    assert guidance.own(guidance.rescaled).source_hash not in (None, this_file)
    assert function.needs(0, HERE) == function.needs(1, HERE) == (True, True)


def test_a_function_without_source_has_no_hash():
    made = {}
    exec("def made(cond, uncond, guidance_scale, at): return cond", made)
    assert guidance.own(made["made"]).source_hash is None


def test_reading_takes_names_functions_and_guidances():
    guided = guidance.interval(0.4, 3)
    assert guidance.read(guided) is guided
    assert guidance.read("interval(0.4, 3)").name == guided.name
    assert guidance.read(of_this_file).combine is of_this_file


@pytest.mark.parametrize("given", [None, 3, 2.5, True, ["constant"], b"constant", {}])
def test_reading_refuses_anything_else_in_one_sentence(given):
    with pytest.raises(ConfigError, match="give one of constant, interval, rising, rescale, cfgpp, a function, or 'module:function'"):
        guidance.read(given)


def test_a_module_that_is_edited_is_imported_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "edited_guidance.py"
    module.write_text("def mine(cond, uncond, guidance_scale, at):\n    return cond\n")
    first = guidance.named("edited_guidance:mine")
    module.write_text("def mine(cond, uncond, guidance_scale, at):\n    return uncond  # now\n")
    second = guidance.named("edited_guidance:mine")
    assert first.combine(1, 2, 3, None) == 1 and second.combine(1, 2, 3, None) == 2
    assert first.source_hash != second.source_hash


def test_a_module_that_was_imported_before_it_was_edited_is_read_as_it_is_now(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "imported_early.py"
    module.write_text("def mine(cond, uncond, guidance_scale, at):\n    return cond\n")
    importlib.import_module("imported_early")
    module.write_text("def mine(cond, uncond, guidance_scale, at):\n    return uncond  # now\n")
    assert guidance.named("imported_early:mine").combine(1, 2, 3, None) == 2


def test_a_function_that_another_module_brings_in_is_read_as_it_is_now(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "front_door.py").write_text("from behind_it import mine\n")
    module = tmp_path / "behind_it.py"
    module.write_text("def mine(cond, uncond, guidance_scale, at):\n    return cond\n")
    first = guidance.named("front_door:mine")
    module.write_text("def mine(cond, uncond, guidance_scale, at):\n    return uncond  # now\n")
    second = guidance.named("front_door:mine")
    assert (first.combine(1, 2, 3, None), second.combine(1, 2, 3, None)) == (1, 2) and first.source_hash != second.source_hash
