"""The job files of the families: checked without running, and held to their presets."""

from pathlib import Path
from typing import Any

import pytest

from sdlab import plan, presets
from sdlab.config import Stage, accumulation_steps, parse_filters

ROOT = Path(__file__).parents[1]
FAMILIES = ("sd15", "sd20", "sdxl")
SIZES = ("one_node", "published", "tiny")


def planned(family: str, size: str, *sets: str) -> dict[str, plan.Step]:
    job = plan.plan(ROOT / "papermill_runs" / f"{family}.yaml", sets=[f"size={size}", *sets])
    return {step.name: step for step in job.steps}


def of(steps: dict[str, plan.Step], notebook: str) -> dict[str, plan.Step]:
    return {name: step for name, step in steps.items() if step.notebook.stem == notebook}


def ancestors(step: plan.Step, steps: dict[str, plan.Step]) -> set[str]:
    return {name for need in step.needs for name in (need, *ancestors(steps[need], steps))}


def prepared(steps: dict[str, plan.Step], training: plan.Step) -> dict[str, Any]:
    """What prepares the data that a step trains on; the step waits for it."""
    found = [step for step in of(steps, "01_prepare_data").values() if step.given["data_dir"] == training.given["data_dir"]]
    assert len(found) == 1 and found[0].name in ancestors(training, steps)
    return found[0].effective


def accumulated(recipe: Stage, *, nodes: int, devices: int) -> int:
    return accumulation_steps(recipe.global_batch_size, recipe.micro_batch_size, world_size=nodes * devices)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_job_trains_all_its_stages_each_from_its_parent(family: str, size: str) -> None:
    steps = planned(family, size)
    preset = presets.get(f"{family}_tiny" if size == "tiny" else family)
    training = of(steps, "02_train_stage")
    assert [step.given["stage"] for step in training.values()] == list(training) == list(preset.stages)
    for name, step in training.items():
        parent = preset.stages[name].parent
        assert step.given["preset"] == preset.name
        assert step.given.get("init_from") == (training[parent].given["run_dir"] if parent else None)
        assert parent is None or parent in ancestors(step, steps)
    assert len({step.given["run_dir"] for step in training.values()}) == len(training)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_job_prepares_the_pictures_that_its_recipes_ask_for(family: str, size: str) -> None:
    steps = planned(family, size)
    preset = presets.get(f"{family}_tiny" if size == "tiny" else family)
    for name, step in of(steps, "02_train_stage").items():
        recipe, data = preset.stages[name], prepared(steps, step)
        assert (data["preset"], data["resolution"], data["crop"]) == (preset.name, recipe.resolution, recipe.crop)
        assert data["min_resolution"] == (None if size == "tiny" else recipe.min_resolution)
        assert parse_filters(data["filters"]) == parse_filters(recipe.filters)
        assert data["source"] == ("scenes" if size == "tiny" else "pictures")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_published_size_is_the_published_machine(family: str) -> None:
    stages = presets.get(family).stages
    for name, step in of(planned(family, "published"), "02_train_stage").items():
        given = (step.given["num_nodes"], step.given["devices"])
        assert given == (stages[name].published_nodes, stages[name].published_devices)
        assert accumulated(stages[name], nodes=given[0], devices=given[1]) == 1


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_devices_accumulate_to_the_same_batch(family: str, nodes: int, devices: int) -> None:
    stages = presets.get(family).stages
    for name, step in of(planned(family, "one_node", f"nodes={nodes}", f"devices={devices}"), "02_train_stage").items():
        assert (step.given["num_nodes"], step.given["devices"], step.given["micro_batch_size"]) == (nodes, devices, None)
        steps = accumulated(stages[name], nodes=nodes, devices=devices)
        assert steps * stages[name].micro_batch_size * nodes * devices == stages[name].global_batch_size


@pytest.mark.parametrize("family", FAMILIES)
def test_a_twins_batch_fits_one_process(family: str) -> None:
    for name, step in of(planned(family, "tiny"), "02_train_stage").items():
        assert (step.given["num_nodes"], step.given["devices"]) == (1, 1)
        assert accumulated(presets.get(f"{family}_tiny").stages[name], nodes=1, devices=1) == 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_job_ends_with_pictures_of_its_last_stage(family: str, size: str) -> None:
    steps = planned(family, size)
    training, (sample,) = of(steps, "02_train_stage"), of(steps, "03_sample_guidance").values()
    last = list(training)[-1]
    keeps_average = presets.get(family).stages[last].ema_decay is not None
    assert list(steps)[-1] == sample.name and sample.given["model"] == training[last].given["run_dir"]
    assert sample.given["weights"] == ("ema" if keeps_average else "raw")


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_that_stay_are_among_those_that_are_written(family: str) -> None:
    for size in SIZES:
        for step in of(planned(family, size), "02_train_stage").values():
            assert step.given["keep_every"] % step.given["save_every"] == 0
