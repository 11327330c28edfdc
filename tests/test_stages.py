"""What a stage takes is said before there is anything to run it with, and what cannot be is refused with a way out."""

import resource
from pathlib import Path

import pytest

from sdlab import launch, models, presets, stages, tables
from sdlab.config import ConfigError

PUBLISHED = [(family, stage) for family in ("sd15", "sd20", "sdxl") for stage in presets.get(family).stages]


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **options: pytest.fail("the hub was asked"))


@pytest.mark.parametrize(("family", "stage"), PUBLISHED)
def test_a_published_stage_plans_on_the_machine_that_it_was_published_for(family: str, stage: str) -> None:
    recipe = presets.get(family).stages[stage]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    machine = {"devices": recipe.published_devices, "num_nodes": recipe.published_nodes}
    estimate = stages.estimate(preset=family, stage=stage, **machine, price_per_device_hour=2.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10, "a network was allocated"
    assert estimate.samples == recipe.schedule_steps * recipe.global_batch_size
    assert estimate.world_size == recipe.published_devices * recipe.published_nodes
    assert estimate.options[0].memory.weights == 4 * estimate.parameters["unet"]
    for rate, cost in estimate.costs.values():
        assert cost.days * 86400 * rate == pytest.approx(estimate.samples) and cost.money == pytest.approx(2 * cost.device_hours)
    shown = repr(tables.estimate_table(estimate)) + repr(tables.memory_table(estimate))
    assert f"{family}/{stage}" in shown and f"{estimate.parameters['unet']:,}" in shown and "at the given price" in shown


def test_a_speed_that_is_known_takes_the_place_of_what_devices_should_make() -> None:
    estimate = stages.estimate(preset="sd15", stage="v1_1_512", devices=8, num_nodes=32, expected_samples_per_second=8192.0)
    ((rate, cost),) = estimate.costs.values()
    assert rate == 8192.0 and cost.days == pytest.approx(50_000 / 86400) and cost.money is None


def test_low_rank_and_checkpointing_take_less() -> None:
    plain, less, change = (
        stages.estimate(preset="sd15_finetune", stage=stage, devices=1, **options).options[0].memory
        for stage, options in (("finetune_512", {}), ("finetune_512", {"gradient_checkpointing": True}), ("lora_512", {}))
    )
    assert less.activations < plain.activations and less.moments == plain.moments
    assert change.moments < plain.moments / 100


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 3}, "global_batch_size=8192 is not a multiple of micro_batch_size=128 x world_size=3"),
        ({"stage": "v1_3_512"}, "stage 'v1_3_512' is not in preset 'sd15'"),
        ({"overrides": {"resolution": 200}}, "resolution=200 cannot be halved evenly: it has to be a multiple of 64"),
        ({"strategy": "zero"}, "strategy='zero' is not known"),
        ({"expected_samples_per_second": 0.0}, "expected_samples_per_second=0.0 cannot be used"),
        ({"num_nodes": 0}, "num_nodes=0 cannot be used; give a whole number from 1 up"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 cannot be used"),
        ({"max_steps": 0}, "max_steps=0 cannot be used"),
        ({"overrides": {"lora": {"rank": 4}}}, "lora changes a model that is there; take a stage with a parent"),
    ],
)
def test_what_does_not_go_together_is_refused_in_the_plan(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stages.estimate(**{"preset": "sd15", "stage": "pretrain_256", "devices": 1, **given})


def test_too_little_memory_names_what_would_fit(scenes_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"preset": "tiny", "stage": "stage1_32", "data_dir": str(scenes_dir)}
    memory = stages.plan(stages.configure(**given), scenes_dir / "run").memory
    monkeypatch.setattr(stages, "_available", lambda config: memory.total - memory.activations - 1)
    with pytest.raises(ConfigError, match=r"training needs .* before any activation, and there are .*; this would fit: .*'bfloat16'"):
        stages.configure(**given)


def test_eight_bit_moments_need_a_gpu(scenes_dir: Path) -> None:
    if launch.device().type == "cuda":
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"8bit.*bfloat16"):
        stages.configure(preset="tiny", stage="stage1_32", data_dir=str(scenes_dir), overrides={"optimizer_states": "8bit"})


@pytest.mark.parametrize(
    ("family", "unet", "text_encoders"),
    [("sd15", 859_520_964, 123_060_480), ("sd20", 865_910_724, 340_387_840), ("sdxl", 2_567_463_684, 123_060_480 + 694_659_840)],
)
def test_the_real_networks_have_their_published_sizes(family: str, unet: int, text_encoders: int) -> None:
    counts = models.count_parameters(presets.get(family))
    assert counts == {"unet": unet, "vae": 83_653_863, "text_encoders": text_encoders}
