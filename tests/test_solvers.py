"""Solvers against a model whose answer is known in closed form, and against diffusers where diffusers is right.

The data are independent Gaussians, so picture, noise and v are exact at every timestep, and the flow keeps each point's standardised place.
"""

import itertools
import math

import diffusers
import pytest
import torch

from sdlab import diffusion, drawing, solvers
from sdlab.config import ConfigError, Networks, NoiseSchedule

MEAN = torch.tensor([1.0, -0.5, 0.2, 0.0], dtype=torch.float64).view(1, 4, 1, 1)
SPREAD = torch.tensor([0.3, 0.8, 1.5, 0.5], dtype=torch.float64).view(1, 4, 1, 1)
NOISE = torch.randn(4, 4, 2, 2, generator=torch.Generator().manual_seed(0)).double()
KINDS = ["epsilon", "v_prediction", "sample"]
ENDS_AT_FIRST_ALPHA = ("ddim", "plms")


def networks(prediction_type="epsilon", **schedule):
    return Networks(frozen="tiny", unet={}, prediction_type=prediction_type, noise_schedule=NoiseSchedule(**schedule))


def alphas_of(of):
    return diffusion.alphas_cumprod(of.noise_schedule)


SD = networks()
ZERO_SNR = networks("v_prediction", rescale_betas_zero_snr=True)
ALPHAS = alphas_of(SD)
ALLOWED = [
    (of, solver, spacing, kind)
    for of, solver, spacing, kind in itertools.product((SD, ZERO_SNR), solvers.SOLVERS, solvers.SPACINGS, KINDS)
    if of is SD or (solver != "plms" and spacing != "leading" and kind != "epsilon")
]
IDS = [f"{'zero-snr-' if of is ZERO_SNR else ''}{solver}-{spacing}-{kind}" for of, solver, spacing, kind in ALLOWED]


def model_pred(latents, alpha, kind):
    """What a perfect UNet says, computed in float64 and said in the latents' type."""
    signal, sigma = math.sqrt(alpha), math.sqrt(1 - alpha)
    off = (latents.double() - signal * MEAN) / (alpha * SPREAD**2 + 1 - alpha)
    denoised, epsilon = MEAN + signal * SPREAD**2 * off, sigma * off
    said = {"epsilon": epsilon, "sample": denoised, "v_prediction": signal * epsilon - sigma * denoised}[kind]
    return said.to(latents.dtype)


def predictor(alphas, kind="epsilon"):
    def predict(latents, timestep):
        alpha = float(alphas[timestep])
        return diffusion.read_prediction(model_pred(latents, alpha, kind), latents, alpha=alpha, prediction_type=kind)

    return predict


def exact(start, end):
    """Where the flow takes `NOISE`, which stands for latents at alpha `start`, to at alpha `end`."""
    place = (NOISE - math.sqrt(start) * MEAN) / (start * SPREAD**2 + 1 - start).sqrt()
    return math.sqrt(end) * MEAN + (end * SPREAD**2 + 1 - end).sqrt() * place


def solved(of, solver, spacing, kind, steps, latents=NOISE):
    return solvers.solve(solver, predictor(alphas_of(of), kind), latents, num_inference_steps=steps, networks=of, spacing=spacing)


def rms(difference):
    return float(difference.double().square().mean().sqrt())


def exact_end(of, solver, spacing, steps):
    alphas = alphas_of(of)
    start = float(alphas[solvers.timesteps_of(solver, steps, spacing, networks=of)[0]])
    return exact(start, float(alphas[0]) if solver in ENDS_AT_FIRST_ALPHA else 1.0)


def error(of, solver, spacing, kind, steps):
    return rms(solved(of, solver, spacing, kind, steps) - exact_end(of, solver, spacing, steps))


# Closed forms


@pytest.mark.parametrize(("of", "solver", "spacing", "kind"), ALLOWED, ids=IDS)
def test_every_solver_approaches_the_exact_end_as_steps_grow(of, solver, spacing, kind):
    errors = [error(of, solver, spacing, kind, steps) for steps in (10, 30, 100)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.03


def test_multistep_solvers_are_nearer_than_first_order_ones_at_equal_steps():
    assert error(SD, "plms", None, "epsilon", 20) < error(SD, "ddim", None, "epsilon", 20) / 5
    assert error(SD, "dpmpp_2m", None, "epsilon", 20) < error(SD, "euler", None, "epsilon", 20) / 1.5


def orders(solver, spacing, alphas, steps):
    """Measured order from so many steps to twice and four times as many, down to the last timestep visited.

    The last step of euler and dpmpp_2m says the picture of where they are, whatever the number of steps, so it is taken exactly.
    """
    errors = []
    for number in (steps, 2 * steps, 4 * steps):
        timesteps = solvers.SPACINGS[spacing](number, len(alphas))
        found = solvers.SOLVERS[solver](predictor(alphas, "v_prediction"), NOISE, timesteps=timesteps, alphas=alphas)
        start, last = float(alphas[timesteps[0]]), float(alphas[timesteps[-1]])
        known = exact(start, float(alphas[0])) if solver in ENDS_AT_FIRST_ALPHA else model_pred(exact(start, last), last, "sample")
        errors.append(rms(found - known))
    return math.log2(errors[0] / errors[1]), math.log2(errors[1] / errors[2])


@pytest.mark.parametrize("spacing", solvers.SPACINGS)
@pytest.mark.parametrize(("solver", "order"), [("ddim", 1), ("euler", 1), ("plms", 2), ("dpmpp_2m", 2)])
def test_twice_the_steps_divide_the_error_by_two_to_the_order(solver, order, spacing):
    """On a schedule that is even in log-SNR: near no noise at all, equal strides in SD's timesteps are no smooth steps for any solver."""
    alphas = torch.sigmoid(torch.linspace(6, -5, 2048, dtype=torch.float64))
    assert sum(orders(solver, spacing, alphas, 32)) / 2 == pytest.approx(order, abs=0.15)


@pytest.mark.parametrize("spacing", ["trailing", "linspace"])
@pytest.mark.parametrize(("solver", "order"), [("ddim", 1), ("euler", 1), ("dpmpp_2m", 2)])
def test_the_order_stays_where_the_first_step_leaves_noise_alone(solver, order, spacing):
    angles = torch.linspace(0.05, math.pi / 2, 8192, dtype=torch.float64)
    found = orders(solver, spacing, (angles.cos() ** 2).clamp(min=2.0**-24), 128)
    assert sum(found) / 2 == pytest.approx(order, abs=0.2)


def even_sigmas(top, finest):
    return 1 / (1 + torch.linspace(0, top, finest + 1, dtype=torch.float64) ** 2)


def plms_order(top, steps, finest=800):
    errors = []
    for number in (steps, 2 * steps):
        alphas = even_sigmas(top, finest)
        found = solvers.plms(predictor(alphas), NOISE, timesteps=range(finest, 0, -finest // number), alphas=alphas)
        errors.append(rms(found - exact(float(alphas[-1]), 1.0)))
    return math.log2(errors[0] / errors[1])


def test_plms_is_of_order_four_in_even_steps_of_sigma_and_of_order_three_where_its_start_counts():
    """Its weights are those of equal steps in sigma; SD's timesteps are not, and that alone makes it one of order two there.

    From much noise the flow starts straight, so that the error is that of the Adams-Bashforth steps; from little it starts bent.
    """
    assert plms_order(3.0, 200) == pytest.approx(4, abs=0.15)
    assert plms_order(0.5, 200) == pytest.approx(3, abs=0.25)


@pytest.mark.parametrize("degree", [0, 1, 2, 3, 4])
def test_plms_steps_are_exact_for_polynomials_in_sigma_up_to_one_less_than_their_order(degree):
    """The first two steps up to degree 1, the third up to 2, all later ones up to 3."""
    alphas, visited = even_sigmas(1.0, 10), []
    sigmas = ((1 - alphas) / alphas).sqrt()

    def predict(latents, timestep):
        visited.append(latents / alphas[timestep].sqrt())
        return diffusion.Prediction(latents, sigmas[timestep] ** degree * torch.ones(1, dtype=torch.float64))

    end = solvers.plms(predict, torch.zeros(1, dtype=torch.float64), timesteps=range(10, 0, -1), alphas=alphas)
    states = torch.cat([visited[0], *visited[2:], end])
    known = sigmas.flip(0) ** (degree + 1) / (degree + 1)
    right = (states.diff() - known.diff()).abs() < 1e-12
    assert right.tolist() == [degree <= most for most in (1, 1, 2, *[3] * 7)]


@pytest.mark.parametrize("kind", ["v_prediction", "sample"])
@pytest.mark.parametrize("solver", ["ddim", "euler", "dpmpp_2m"])
@pytest.mark.parametrize("steps", [1, 2, 10, 50])
def test_float32_loses_nothing_on_the_way_from_noise_alone(solver, kind, steps):
    """Noise over signal is 4096 there: reading the picture from the noise would lose a thousand times more than is allowed here."""
    single, double = (solved(ZERO_SNR, solver, "trailing", kind, steps, latents) for latents in (NOISE.float(), NOISE))
    assert single.dtype == torch.float32
    assert (single - double).abs().max() < 2e-6 * double.abs().max()


@pytest.mark.parametrize("solver", ["ddim", "euler", "dpmpp_2m"])
def test_one_step_from_noise_alone_gives_the_mean_of_all_pictures(solver):
    """Up to the 4096th part of the signal that stays; ddim puts the noise of its first alpha on it."""
    end = float(alphas_of(ZERO_SNR)[0]) if solver == "ddim" else 1.0
    found = solved(ZERO_SNR, solver, "trailing", "v_prediction", 1)
    torch.testing.assert_close(found, math.sqrt(end) * MEAN + math.sqrt(1 - end) * NOISE, atol=8 / 4096, rtol=0)


@pytest.mark.parametrize("kind", ["v_prediction", "sample"])
@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_a_model_of_any_prediction_type_gives_the_same_latents(solver, kind):
    found, expected = (solved(SD, solver, None, one, 20, NOISE.float()) for one in (kind, "epsilon"))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_latents_keep_their_type_and_the_noise_is_left_as_it_was():
    noise = NOISE.float()
    for solver in solvers.SOLVERS:
        found = solved(SD, solver, None, "v_prediction", 5, noise)
        assert found.dtype == torch.float32 and found.shape == noise.shape
    assert torch.equal(noise, NOISE.float())


def test_euler_is_ddim_that_goes_on_to_no_noise():
    """Their steps are the same until the last, which ddim takes to the first alpha."""
    states = {"ddim": [], "euler": []}
    for solver, seen in states.items():
        asked = predictor(ALPHAS)
        predict = lambda latents, timestep, asked=asked, seen=seen: seen.append(latents) or asked(latents, timestep)  # noqa: E731
        solvers.solve(solver, predict, NOISE, num_inference_steps=5, networks=SD, spacing="trailing")
    assert all(torch.equal(a, b) for a, b in zip(*states.values(), strict=True))
    timesteps = solvers.trailing(5, 1000)
    left = predictor(ALPHAS)(states["ddim"][-1], timesteps[-1])
    first = float(ALPHAS[0])
    torch.testing.assert_close(solved(SD, "euler", "trailing", "epsilon", 5), left.denoised)
    torch.testing.assert_close(
        solved(SD, "ddim", "trailing", "epsilon", 5), math.sqrt(first) * left.denoised + math.sqrt(1 - first) * left.epsilon
    )


# Diffusers

SCHEDULERS = {
    "ddim": lambda **settings: diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, **settings),
    "plms": lambda **settings: diffusers.PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=False, **settings),
    "dpmpp_2m": diffusers.DPMSolverMultistepScheduler,
    "euler": diffusers.EulerDiscreteScheduler,
}


def scheduler_of(of, solver, spacing, kind="epsilon"):
    settings = of.noise_schedule.model_dump(exclude={"rescale_betas_zero_snr"} if solver == "plms" else set())
    return SCHEDULERS[solver](**settings, prediction_type=kind, timestep_spacing=spacing, steps_offset=1)


def diffusers_end(of, solver, spacing, kind, steps, *, last_alpha=None):
    """Theirs from float32 latents; DPM-Solver and Euler are given our timesteps, since their own spacing rounds and counts otherwise."""
    scheduler, alphas = scheduler_of(of, solver, spacing, kind), alphas_of(of)
    if last_alpha is not None:
        scheduler.alphas_cumprod[-1] = last_alpha
    if solver in ENDS_AT_FIRST_ALPHA:
        scheduler.set_timesteps(steps)
    else:
        scheduler.set_timesteps(timesteps=solvers.SPACINGS[spacing](steps, len(alphas)))
    latents = NOISE.float()
    if solver == "euler":
        latents = latents * (scheduler.sigmas[0] ** 2 + 1).sqrt()
    for timestep in scheduler.timesteps:
        said = model_pred(scheduler.scale_model_input(latents, timestep), float(alphas[int(timestep)]), kind)
        latents = scheduler.step(said, timestep, latents).prev_sample
    return latents


AGREED = [
    *(("ddim", "leading", kind, steps) for kind in KINDS for steps in (2, 7, 20, 50, 333)),
    *(("ddim", "trailing", kind, steps) for kind in KINDS for steps in (2, 5, 20, 50)),
    *(("plms", "leading", "epsilon", steps) for steps in (2, 7, 20, 50)),
    *(("plms", "trailing", "epsilon", steps) for steps in (2, 5, 20, 50)),
    *itertools.product(("dpmpp_2m", "euler"), solvers.SPACINGS, KINDS, (2, 7, 20, 50)),
]


@pytest.mark.parametrize(("solver", "spacing", "kind", "steps"), AGREED)
def test_solvers_agree_with_diffusers(solver, spacing, kind, steps):
    ours = solved(SD, solver, spacing, kind, steps, NOISE.float())
    torch.testing.assert_close(ours, diffusers_end(SD, solver, spacing, kind, steps), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["v_prediction", "sample"])
@pytest.mark.parametrize("steps", [2, 5, 20, 50])
def test_dpmpp_agrees_with_diffusers_on_a_schedule_that_ends_in_noise_alone(kind, steps):
    ours = solved(ZERO_SNR, "dpmpp_2m", "trailing", kind, steps, NOISE.float())
    torch.testing.assert_close(ours, diffusers_end(ZERO_SNR, "dpmpp_2m", "trailing", kind, steps), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["v_prediction", "sample"])
@pytest.mark.parametrize("steps", [2, 5, 20, 50])
def test_ddim_agrees_with_diffusers_on_a_schedule_that_ends_in_noise_alone_once_both_end_alike(kind, steps):
    """Their DDIM has alpha 0 at the last timestep, where their DPM-Solver and Euler, and sdlab, keep 2 ** -24: 1 / 4096 of the signal."""
    ours = solved(ZERO_SNR, "ddim", "trailing", kind, steps, NOISE.float())
    as_they_are = diffusers_end(ZERO_SNR, "ddim", "trailing", kind, steps)
    torch.testing.assert_close(ours, diffusers_end(ZERO_SNR, "ddim", "trailing", kind, steps, last_alpha=2.0**-24), atol=1e-5, rtol=1e-5)
    assert 1e-5 < (ours - as_they_are).abs().max() < 2 / 4096


@pytest.mark.parametrize("kind", ["v_prediction", "sample"])
@pytest.mark.parametrize(("steps", "loss"), [(2, 5e-4), (5, 5e-4), (20, 5e-5), (50, 1e-5)])
def test_euler_agrees_with_diffusers_on_a_schedule_that_ends_in_noise_alone_but_for_their_rounding(kind, steps, loss):
    """Their latents are 4096 times as large there, in float32, of which a large first step leaves little; ours are of unit size.

    With 20 steps and more the first step ends at more noise, where the same rounding is a smaller part.
    """
    ours, double = (solved(ZERO_SNR, "euler", "trailing", kind, steps, latents) for latents in (NOISE.float(), NOISE))
    theirs = diffusers_end(ZERO_SNR, "euler", "trailing", kind, steps)
    assert (theirs - double).abs().max() < loss
    assert (ours - double).abs().max() < min(5e-6, (theirs - double).abs().max())


@pytest.mark.parametrize(("solver", "steps"), [("ddim", 7), ("ddim", 30), ("plms", 7)])
def test_diffusers_steps_to_other_timesteps_than_it_visits_next_where_steps_do_not_divide_the_schedule(solver, steps):
    """Their DDIM and PNDM step from t to t - 1000 // n, whatever timestep comes next: trailing strides of 142 and 143 for 7 steps.

    With strides of linspace, 999 / (n - 1), that is so for every number of steps. Our solver, let to land where theirs does, is theirs.
    """
    timesteps = solvers.trailing(steps, 1000)
    landed = [timestep - 1000 // steps for timestep in timesteps]
    assert landed[:-1] != timesteps[1:]
    theirs = diffusers_end(SD, solver, "trailing", "epsilon", steps)
    assert (solved(SD, solver, "trailing", "epsilon", steps) - theirs).abs().max() > 1e-3
    if solver == "ddim":
        latents = NOISE
        for timestep, after in zip(timesteps, landed, strict=True):
            levels = [float(ALPHAS[timestep]), float(ALPHAS[max(after, 0)])]
            denoised, epsilon = predictor(ALPHAS)(latents, timestep)
            latents = math.sqrt(levels[1]) * denoised + math.sqrt(1 - levels[1]) * epsilon
        torch.testing.assert_close(latents.float(), theirs, atol=1e-5, rtol=1e-5)


def test_diffusers_pndm_loses_its_order_on_a_v_model_and_ours_does_not():
    """It adds up v of different timesteps as if it were noise (diffusers#14816), and is then no better than DDIM."""
    known = exact_end(SD, "plms", "leading", 50)
    ours, ddim = (rms(solved(SD, solver, "leading", "v_prediction", 50) - known) for solver in ("plms", "ddim"))
    theirs = rms(diffusers_end(SD, "plms", "leading", "v_prediction", 50) - known)
    assert theirs > 5 * ours
    assert theirs > 0.9 * ddim


# Timesteps


def test_plms_visits_981_961_and_then_every_twentieth_timestep_down_to_1():
    visited = []
    predict = lambda latents, timestep: visited.append(timestep) or diffusion.Prediction(latents, latents)  # noqa: E731
    solvers.solve("plms", predict, torch.ones(1), num_inference_steps=50, networks=SD)
    assert visited == [981, 961, *range(961, 0, -20)]
    assert solvers.evaluated("plms", solvers.timesteps_of("plms", 50, networks=SD)) == visited


def test_spacings_are_those_of_the_papers_table():
    assert solvers.leading(10, 1000) == list(range(901, 0, -100))
    assert solvers.leading(50, 1000) == list(range(981, 0, -20))
    assert solvers.trailing(10, 1000) == list(range(999, 0, -100))
    assert solvers.trailing(20, 1000) == list(range(999, 0, -50))
    assert solvers.linspace(4, 1000) == [999, 666, 333, 0]
    assert solvers.linspace(10, 1000) == list(range(999, -1, -111))


@pytest.mark.parametrize("train", [1, 2, 10, 1000])
@pytest.mark.parametrize("spacing", solvers.SPACINGS)
def test_timesteps_fall_without_repeating_and_stay_inside_the_schedule(spacing, train):
    for steps in {1, 2, 3, 7, 333, 501, 999, 1000, *range(10, 1000, 11)}:
        if steps <= train:
            timesteps = solvers.SPACINGS[spacing](steps, train)
            assert len(timesteps) == steps and all(type(timestep) is int for timestep in timesteps)
            assert all(a > b for a, b in itertools.pairwise(timesteps))
            assert timesteps[-1] >= 0 and timesteps[0] <= train - 1


@pytest.mark.parametrize("train", [10, 1000])
def test_trailing_and_linspace_start_at_the_last_timestep_and_linspace_and_all_of_them_end_at_the_first(train):
    for steps in (1, 2, 3, 7, train):
        assert solvers.trailing(steps, train)[0] == solvers.linspace(steps, train)[0] == train - 1
        assert steps == 1 or solvers.linspace(steps, train)[-1] == 0
    for spacing in solvers.SPACINGS.values():
        assert spacing(train, train) == list(reversed(range(train)))


@pytest.mark.parametrize("steps", [1, 2, 7, 20, 50, 333, 999])
@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_timesteps_are_those_of_diffusers_where_its_spacings_mean_the_same(solver, steps):
    """Not so: DPM-Solver's leading and linspace, which take n + 1 points and drop the last, and Euler's linspace, which is not rounded.

    Nor leading with all 1000 steps, whose offset of 1 leads theirs out of the schedule, and linspace with one step, which is at 0 there.
    """
    for spacing in {"dpmpp_2m": ["trailing"], "euler": ["leading", "trailing"]}.get(solver, solvers.SPACINGS):
        if (solver, steps) == ("plms", 1) or (spacing, steps) == ("linspace", 1):
            continue
        scheduler = scheduler_of(SD, solver, spacing)
        scheduler.set_timesteps(steps)
        assert list(dict.fromkeys(scheduler.timesteps.tolist())) == solvers.SPACINGS[spacing](steps, 1000)


def test_a_solver_without_a_spacing_takes_its_own_and_one_that_starts_at_the_end_where_that_is_noise_alone():
    first = {solver: solvers.timesteps_of(solver, 50, networks=SD)[0] for solver in solvers.SOLVERS}
    assert first == {"plms": 981, "ddim": 981, "dpmpp_2m": 999, "euler": 999}
    assert solvers.timesteps_of("ddim", 50, networks=ZERO_SNR) == solvers.trailing(50, 1000)


def test_solve_takes_the_spacing_that_is_given():
    for spacing, timesteps_of in solvers.SPACINGS.items():
        visited = []
        predict = lambda latents, timestep, visited=visited: visited.append(timestep) or diffusion.Prediction(latents, latents)  # noqa: E731
        solvers.solve("euler", predict, torch.ones(1), num_inference_steps=7, networks=SD, spacing=spacing)
        assert visited == timesteps_of(7, 1000)


# Evaluations


def test_fifty_plms_steps_are_51_evaluations_and_other_solvers_take_one_a_step():
    assert {solver: solvers.evaluations(solver, 50) for solver in solvers.SOLVERS} == {"plms": 51, "ddim": 50, "dpmpp_2m": 50, "euler": 50}
    assert [solvers.evaluations("plms", steps) for steps in (1, 2, 3, 1000)] == [2, 3, 4, 1001]


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("spacing", solvers.SPACINGS)
@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_the_evaluations_that_are_foretold_are_those_that_are_made(solver, spacing, steps):
    made = []
    predict = lambda latents, timestep: made.append(timestep) or predictor(ALPHAS)(latents, timestep)  # noqa: E731
    solvers.solve(solver, predict, NOISE, num_inference_steps=steps, networks=SD, spacing=spacing)
    how = drawing.Drawing(SD, solver, steps, spacing)
    assert how.evaluated == solvers.evaluated(solver, how.timesteps) == made
    assert solvers.evaluations(solver, steps) == len(made)


# Refusals


def refusal(*given, **more):
    with pytest.raises(ConfigError) as caught:
        solvers.check(*given, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("solver", "said"),
    [("dpmpp_2", "did you mean 'dpmpp_2m'"), ("dimm", "did you mean 'ddim'"), ("", "known are"), (None, "known are"), (["ddim"], "ddim")],
)
def test_an_unknown_solver_is_refused_with_the_nearest_name(solver, said):
    assert said in refusal(solver, 10)


@pytest.mark.parametrize(
    ("spacing", "said"),
    [("trailin", "did you mean 'trailing'"), ("lin_space", "did you mean 'linspace'"), ("", "known are"), (["leading"], "leading")],
)
def test_an_unknown_spacing_is_refused_with_the_nearest_name(spacing, said):
    assert said in refusal("ddim", 10, spacing)
    with pytest.raises(ConfigError, match="spacing"):
        solvers.solve("ddim", predictor(ALPHAS), NOISE, num_inference_steps=10, networks=SD, spacing=spacing)


@pytest.mark.parametrize("steps", [0, -1, 1001, 2.5, True, "10", None])
def test_numbers_of_steps_outside_the_schedule_are_refused(steps):
    assert f"num_inference_steps={steps!r}: it has to be a whole number from 1 to 1000" == refusal("ddim", steps, networks=SD)
    with pytest.raises(ConfigError, match="from 1 to 1000"):
        solvers.solve("ddim", predictor(ALPHAS), NOISE, num_inference_steps=steps, networks=SD)


def test_a_shorter_schedule_allows_fewer_steps():
    short = networks(num_train_timesteps=10)
    solvers.check("ddim", 10, networks=short)
    assert "from 1 to 10" in refusal("ddim", 11, networks=short)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "10"])
def test_without_a_model_numbers_of_steps_below_one_are_refused(steps):
    assert "from 1 up" in refusal("ddim", steps)
    with pytest.raises(ConfigError, match="from 1 up"):
        solvers.evaluations("plms", steps)


@pytest.mark.parametrize("spacing", [None, *solvers.SPACINGS])
def test_plms_is_refused_where_the_last_timestep_is_noise_alone(spacing):
    assert "use ddim, dpmpp_2m or euler" in refusal("plms", 10, spacing, networks=ZERO_SNR)


@pytest.mark.parametrize("solver", ["ddim", "euler", "dpmpp_2m"])
def test_leading_timesteps_are_refused_where_the_last_timestep_is_noise_alone(solver):
    assert "use trailing or linspace" in refusal(solver, 10, "leading", networks=ZERO_SNR)
    for spacing in (None, "trailing", "linspace"):
        solvers.check(solver, 10, spacing, networks=ZERO_SNR)
