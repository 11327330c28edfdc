"""Solvers against a model whose answer is known in closed form, and against diffusers where diffusers is right.

The data are independent Gaussians, so epsilon is exact at every timestep, and the flow keeps each point's standardised place.
"""

import itertools

import diffusers
import pytest
import torch

from sdlab import diffusion, solvers
from sdlab.config import ConfigError, NoiseSchedule

SCHEDULE = NoiseSchedule()
ALPHAS = diffusion.alphas_cumprod(SCHEDULE)
MEAN = torch.tensor([1.0, -0.5, 0.2, 0.0], dtype=torch.float64).view(1, 4, 1, 1)
SPREAD = torch.tensor([0.3, 0.8, 1.5, 0.05], dtype=torch.float64).view(1, 4, 1, 1)
NOISE = torch.randn(4, 4, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def exact_epsilon(latents, timestep, alphas=ALPHAS):
    alpha = alphas[int(timestep)]
    return (1 - alpha).sqrt() * (latents - alpha.sqrt() * MEAN) / (alpha * SPREAD**2 + 1 - alpha)


def exact_end(start_timestep, last_alpha):
    start, last = ALPHAS[start_timestep], torch.as_tensor(last_alpha, dtype=torch.float64)
    place = (NOISE - start.sqrt() * MEAN) / (start * SPREAD**2 + 1 - start).sqrt()
    return last.sqrt() * MEAN + (last * SPREAD**2 + 1 - last).sqrt() * place


def exact_prediction(latents, timestep, prediction_type):
    epsilon, alpha = exact_epsilon(latents, timestep), ALPHAS[int(timestep)]
    denoised = (latents - (1 - alpha).sqrt() * epsilon) / alpha.sqrt()
    v = alpha.sqrt() * epsilon - (1 - alpha).sqrt() * denoised
    return {"epsilon": epsilon, "sample": denoised, "v_prediction": v}[prediction_type]


def error(solver, steps):
    end = 1.0 if solver in ("dpmpp_2m", "euler") else ALPHAS[0]
    start = solvers.SPACINGS[solver](steps, 1000)[0]
    found = solvers.solve(solver, exact_epsilon, NOISE, num_inference_steps=steps, alphas=ALPHAS)
    return float((found - exact_end(start, end)).pow(2).mean().sqrt())


@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_every_solver_approaches_the_exact_end_as_steps_grow(solver):
    errors = [error(solver, steps) for steps in (10, 30, 100)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.03


def test_multistep_solvers_are_nearer_than_first_order_ones_at_equal_steps():
    assert error("plms", 20) < error("ddim", 20) / 5
    assert error("dpmpp_2m", 20) < error("euler", 20) / 1.5


@pytest.mark.parametrize(("solver", "order"), [("ddim", 1), ("euler", 1), ("plms", 2), ("dpmpp_2m", 2)])
def test_twice_the_steps_divide_the_error_by_two_to_the_order(solver, order):
    finest = 2048
    alphas = torch.sigmoid(torch.linspace(6, -5, finest + 1, dtype=torch.float64))

    def end(steps):
        predict = lambda latents, timestep: exact_epsilon(latents, timestep, alphas)  # noqa: E731
        return solvers.SOLVERS[solver](predict, NOISE, timesteps=range(finest, -1, -finest // steps), alphas=alphas)

    coarse, fine = ((end(steps) - end(finest)).norm() for steps in (32, 64))
    assert order - 0.15 < (coarse / fine).log2() < order + 0.15


def diffusers_end(scheduler, steps, *, prediction_type="epsilon"):
    scheduler.set_timesteps(steps)
    latents = NOISE.float()
    if isinstance(scheduler, diffusers.EulerDiscreteScheduler):
        latents = latents * (scheduler.sigmas[0] ** 2 + 1).sqrt()
    for timestep in scheduler.timesteps:
        model_pred = exact_prediction(scheduler.scale_model_input(latents, timestep).double(), timestep, prediction_type).float()
        latents = scheduler.step(model_pred, timestep, latents).prev_sample
    return latents


def ours_end(solver, steps):
    predict = lambda latents, timestep: exact_epsilon(latents.double(), timestep).float()  # noqa: E731
    return solvers.solve(solver, predict, NOISE.float(), num_inference_steps=steps, alphas=ALPHAS)


def settings(**more):
    return {**SCHEDULE.model_dump(exclude={"rescale_betas_zero_snr"}), **more}


COMPVIS = {"set_alpha_to_one": False, "steps_offset": 1}


@pytest.mark.parametrize("steps", [2, 7, 20, 50])
@pytest.mark.parametrize(
    ("solver", "scheduler"),
    [
        ("ddim", lambda: diffusers.DDIMScheduler(**settings(clip_sample=False, **COMPVIS))),
        ("plms", lambda: diffusers.PNDMScheduler(**settings(skip_prk_steps=True, **COMPVIS))),
        ("dpmpp_2m", lambda: diffusers.DPMSolverMultistepScheduler(**settings(timestep_spacing="trailing"))),
        ("euler", lambda: diffusers.EulerDiscreteScheduler(**settings(timestep_spacing="trailing"))),
    ],
)
def test_solvers_agree_with_diffusers_on_an_epsilon_model(solver, scheduler, steps):
    torch.testing.assert_close(ours_end(solver, steps), diffusers_end(scheduler(), steps), atol=1e-5, rtol=1e-5)


def test_diffusers_pndm_loses_its_order_on_a_v_model_and_ours_does_not():
    pndm = lambda kind: diffusers.PNDMScheduler(**settings(skip_prk_steps=True, prediction_type=kind, **COMPVIS))  # noqa: E731
    exact = exact_end(981, ALPHAS[0]).float()
    ours = (ours_end("plms", 50) - exact).pow(2).mean().sqrt()
    theirs = (diffusers_end(pndm("v_prediction"), 50, prediction_type="v_prediction") - exact).pow(2).mean().sqrt()
    assert theirs > 5 * ours


@pytest.mark.parametrize("prediction_type", ["v_prediction", "sample"])
@pytest.mark.parametrize("solver", solvers.SOLVERS)
def test_a_model_of_any_prediction_type_gives_the_same_latents(solver, prediction_type):
    def predict(latents, timestep):
        model_pred = exact_prediction(latents.double(), timestep, prediction_type).float()
        timesteps = torch.full((len(latents),), timestep)
        return diffusion.to_epsilon(model_pred, latents, timesteps, alphas=ALPHAS, prediction_type=prediction_type)

    found = solvers.solve(solver, predict, NOISE.float(), num_inference_steps=20, alphas=ALPHAS)
    torch.testing.assert_close(found, ours_end(solver, 20), atol=2e-5, rtol=2e-5)


def test_latents_keep_their_type_and_the_noise_is_left_as_it_was():
    noise = NOISE.float()
    for solver in solvers.SOLVERS:
        found = solvers.solve(solver, lambda latents, timestep: latents, noise, num_inference_steps=5, alphas=ALPHAS)
        assert found.dtype == torch.float32 and found.shape == noise.shape
    assert torch.equal(noise, NOISE.float())


def test_fifty_plms_steps_are_51_evaluations_and_other_solvers_take_one_a_step():
    assert {solver: solvers.evaluations(solver, 50) for solver in solvers.SOLVERS} == {"plms": 51, "ddim": 50, "dpmpp_2m": 50, "euler": 50}


def test_plms_visits_981_961_and_then_every_twentieth_timestep_down_to_1():
    visited = []
    solvers.solve("plms", lambda x, t: visited.append(t) or x, torch.ones(1), num_inference_steps=50, alphas=ALPHAS)
    assert visited == [981, 961, *range(961, 0, -20)]


@pytest.mark.parametrize("steps", [1, 3, 10, 333, 501, 999, 1000])
@pytest.mark.parametrize("spacing", [solvers.leading, solvers.trailing])
def test_timesteps_fall_without_repeating_and_stay_inside_the_schedule(spacing, steps):
    timesteps = spacing(steps, 1000)
    assert len(timesteps) == steps
    assert all(a > b for a, b in itertools.pairwise(timesteps))
    assert timesteps[-1] >= 0 and timesteps[0] <= 999


def test_trailing_timesteps_start_at_the_last_one():
    assert solvers.trailing(10, 1000) == list(range(999, 0, -100))


def test_an_unknown_solver_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'dpmpp_2m'"):
        solvers.check("dpmpp_2", 10)


@pytest.mark.parametrize("steps", [0, -1, 1001, 2.5, True, "10"])
def test_numbers_of_steps_outside_the_schedule_are_refused(steps):
    with pytest.raises(ConfigError, match="from 1 to 1000"):
        solvers.check("ddim", steps)
