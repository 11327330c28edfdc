"""Config models refuse what cannot be used, in words that say what to do."""

from pathlib import Path

import pytest

from sdlab import config


def test_all_problems_are_reported_together_and_unknown_names_get_the_nearest() -> None:
    values = {"beta_strt": 0.1, "beta_end": 2, "num_train_timesteps": "many"}
    with pytest.raises(
        config.ConfigError, match=r"my file: .*beta_end.*num_train_timesteps.*|my file: .*num_train_timesteps.*beta_end.*"
    ) as caught:
        config.build(config.NoiseSchedule, values, where="my file")
    assert "'beta_strt' is not a known name; did you mean 'beta_start'?" in str(caught.value)
    assert "(given: 2)" in str(caught.value)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config.NoiseSchedule().beta_end = 0.5


@pytest.mark.parametrize(("micro", "world", "steps"), [(32, 1, 1), (8, 1, 4), (4, 2, 4)])
def test_batches_that_divide_give_whole_accumulation_steps(micro: int, world: int, steps: int) -> None:
    assert config.accumulation_steps(32, micro, world_size=world) == steps


def test_batches_that_do_not_divide_are_refused_with_a_size_that_fits() -> None:
    with pytest.raises(config.ConfigError, match=r"global_batch_size=32 is not a multiple of micro_batch_size=5.*use micro_batch_size=4"):
        config.accumulation_steps(32, 5, world_size=1)


@pytest.mark.parametrize("resolution", [40, 8, 0, -64])
def test_a_resolution_that_cannot_be_halved_is_refused_with_neighbours(resolution: int) -> None:
    with pytest.raises(config.ConfigError, match="multiple of 16"):
        config.check_resolution(resolution, vae_factor=8, unet_factor=2)


def test_relative_paths_start_at_the_project_from_inside_its_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert config.resolve_path("out") == tmp_path / "notebooks" / "out"
    (tmp_path / "papermill_runs").mkdir()
    assert config.resolve_path("out") == tmp_path / "out"
    assert config.resolve_path("/a/b") == Path("/a/b")


def test_an_epsilon_model_cannot_have_a_last_timestep_without_signal():
    networks = {"frozen": "tiny", "unet": {}, "prediction_type": "epsilon", "noise_schedule": {"rescale_betas_zero_snr": True}}
    with pytest.raises(config.ConfigError, match="nothing to learn at the last timestep"):
        config.build(config.Networks, networks, where="here")
