"""The benchmarks run and write what they should; how fast anything is depends on the machine and is not asserted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name: str, out: Path) -> dict[str, Any]:
    """What a benchmark writes when it is run quickly."""
    script = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--out", str(out)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads(out.read_text())
    assert written["schema"] == 1 and written["headline"] in written["ratios"] and written["machine"]["cores"] >= 1
    for one in written["ratios"].values():
        assert abs(one["ratio"] - one["ours"] / one["baseline"]) < 1e-6 * one["ratio"]
        assert one["ours"] > 0 and one["baseline"] > 0 and one["repeats"] >= 5 and one["spread"] >= 0 and one["unit"].endswith("/s")
    assert all(figure > 0 for figure in written["figures"].values())
    assert all(told in done.stdout for told in (*written["ratios"], *written["figures"]))
    return written


def test_the_benchmark_of_the_data_runs_and_writes_its_figures(tmp_path):
    written = run("data", tmp_path / "data.json")
    assert set(written["ratios"]) == {"random_batches_vs_tar", "preflight_vs_pillow"}
    assert {name.rsplit("_", 1)[0] for name in written["figures"]} == {"open_seconds", "anonymous_mb", "decide_mb"}


def test_the_benchmark_of_training_runs_and_writes_its_figures(tmp_path):
    assert set(run("training", tmp_path / "training.json")["ratios"]) == {"step_vs_plain", "save_vs_plain"}


def test_the_benchmark_of_the_full_step_runs_and_writes_its_figures(tmp_path):
    assert set(run("full_step", tmp_path / "full_step.json")["ratios"]) == {"step_vs_parts"}


def test_the_benchmark_of_sampling_runs_and_its_pictures_are_those_of_diffusers(tmp_path):
    written = run("sampling", tmp_path / "sampling.json")
    assert {"one_scale_vs_diffusers", "sweep_vs_diffusers"} < set(written["ratios"])
    assert written["figures"]["largest_difference"] < 1e-3
    assert [rung["rung"] for rung in written["ladder"]] == [name for name in written["ratios"] if name.startswith("ladder")]
    assert written["ladder"][0]["above_first"] == 0 and all(rung["frechet"] > 0 for rung in written["ladder"])
