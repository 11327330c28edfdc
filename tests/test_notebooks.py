"""Every notebook runs through papermill, alone and as the demo's walk, and refuses bad input in one sentence."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hostile
import nbformat
import pytest

from sdlab import runs

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd, timeout=400)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    done = run(BIN / "sdlab-run", "papermill_runs/demo.yaml", "--set", "size=smoke", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(out / "index.html") in done.stdout
    return out


def test_the_walk_leaves_data_runs_pictures_and_a_curve(walk: Path) -> None:
    there = walk / "smoke"
    preflight = json.loads((there / "data" / "preflight.json").read_text())
    assert preflight["scanned"] == preflight["used"] + sum(preflight["filtered"].values()) + sum(preflight["quarantined"].values())
    for stage in ("stage1_32", "stage2_64"):
        assert json.loads((there / "runs" / stage / "result.json").read_text())["status"] == "done"
        assert (there / "runs" / stage / "export" / "model_index.json").is_file()
    assert (there / "studies" / "sample" / "grid.png").is_file()
    results = json.loads((there / "studies" / "curve" / "results.json").read_text())
    assert (results["schema"], results["study"]) == (1, "fid_clip")
    assert [row["guidance_scale"] for row in results["rows"]] == [1, 3, 8]
    needed = {"model", "weights", "step", "frechet_distance", "frechet_low", "frechet_high", "clip_score", "clip_score_se", "num_images"}
    assert needed | {"identity_hash"} <= set(results["rows"][0])


def test_the_walk_shows_curve_grid_and_loss_in_one_page(walk: Path) -> None:
    page = (walk / "index.html").read_text()
    assert page.count("data:image/png;base64,") >= 5 and "://" not in page.replace("http://www.w3.org", "")
    for step in ("prepare", "train_1", "train_2", "sample", "curve"):
        assert step in page


def test_a_second_walk_finds_everything_done(walk: Path) -> None:
    again = run(BIN / "sdlab-run", "papermill_runs/demo.yaml", "--set", "size=smoke", "--out", walk)
    assert again.returncode == 0 and again.stdout.count("already done") == 5


def test_executed_notebooks_hold_effective_parameters_and_no_widget_states(walk: Path) -> None:
    for path in walk.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        assert path.stat().st_size < 5_000_000
        assert not notebook.metadata.papermill.exception
        assert not any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", []))


def test_training_on_two_ranks_through_papermill_shows_its_progress_loss_and_pictures(walk: Path, tmp_path: Path) -> None:
    run_dir, small = tmp_path / "run", {"devices": 2, "max_steps": 4, "global_batch_size": 4, "log_every": 1, "preview_every": 2}
    given = {**small, "data_dir": walk / "smoke/data", "run_dir": run_dir}
    settings = [part for name, value in given.items() for part in ("-p", name, str(value))]
    done = run(BIN / "papermill", "--engine", "sdlab", "notebooks/02_train_stage.ipynb", tmp_path / "out.ipynb", *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["step"], runs.read_config(run_dir).world_size) == ("done", 4, 2)
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "starts at step 1" in said and "16/16" in said
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_the_frozen_parts_can_be_made_again_at_smoke_size(tmp_path: Path) -> None:
    out = tmp_path / "parts"
    done = run(BIN / "sdlab-run", "notebooks/00_tiny_components.ipynb", "-p", "out_dir", out, "--out", tmp_path / "executed")
    assert done.returncode == 0, done.stdout + done.stderr
    about = json.loads((out / "parts" / "components.json").read_text())
    assert set(about["sha256"]) == {"vae", "text_encoder", "judge", "unet"}
    assert "AutoencoderKL" in (out / "parts" / "README.md").read_text()


def test_plain_papermill_trains_from_nothing(tmp_path: Path) -> None:
    settings = ["-p", "max_steps", "2", "-p", "data_dir", "None", "-p", "run_dir", str(tmp_path / "run"), "-p", "log_every", "1"]
    done = run(BIN / "papermill", ROOT / "notebooks" / "02_train_stage.ipynb", "out.ipynb", *settings, "--no-progress-bar", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_plain_papermill_also_refuses_an_unknown_name_with_the_nearest(tmp_path: Path) -> None:
    done = run(BIN / "papermill", "notebooks/02_train_stage.ipynb", tmp_path / "out.ipynb", "-p", "max_step", "2", "--no-progress-bar")
    assert done.returncode == 1
    assert "'max_step'" in done.stderr and "did you mean 'max_steps'" in done.stderr


@pytest.mark.parametrize(
    ("notebook", "name", "value", "code", "message"),
    [
        ("02_train_stage", "max_step", "2", 2, "did you mean 'max_steps'"),
        ("02_train_stage", "max_steps", "many", 2, "max_steps"),
        ("02_train_stage", "data_dir", "/nowhere", 1, "/nowhere"),
        ("02_train_stage", "preset", "tinny", 1, "did you mean 'tiny'"),
        ("01_prepare_data", "source", "/nowhere", 1, "/nowhere"),
        ("01_prepare_data", "resolution", "40", 1, "resolution=40 cannot be halved evenly"),
        ("04_fid_clip", "models", "/nowhere", 1, "/nowhere"),
    ],
)
def test_bad_input_stops_with_a_sentence(tmp_path: Path, notebook: str, name: str, value: str, code: int, message: str) -> None:
    done = run(BIN / "sdlab-run", f"notebooks/{notebook}.ipynb", "-p", name, value, "--out", tmp_path)
    assert done.returncode == code
    assert message in done.stdout + done.stderr


def test_the_data_notebook_tells_the_fate_of_every_hostile_picture(tmp_path: Path) -> None:
    """The whole pack at once, a root a kind: the figures in the tables are those that the kinds expect."""
    kinds, roots, fates = hostile.kinds(), [], Counter[str]()
    for kind in kinds:
        try:
            roots.append(str(hostile.build(kind, tmp_path / kind.name / "root")))
        except OSError:
            assert kind.picky
            continue
        fates.update([*kind.expect.values(), *kind.again.values()])
    settings = {"source": json.dumps(roots), "data_dir": tmp_path / "data", "resolution": 16, "max_bad_fraction": 1, "crop": "buckets"}
    options = [part for name, value in settings.items() for part in ("-p", name, value)]
    done = run(BIN / "sdlab-run", "notebooks/01_prepare_data.ipynb", *options, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "data" / "preflight.json").read_text())
    used = fates.pop("used")
    assert report["quarantined"] == dict(sorted(fates.items()))
    assert report["used"] >= used and report["scanned"] == report["used"] + fates.total()
    notebook = nbformat.read(tmp_path / "out" / "01_prepare_data.ipynb", 4)
    shown = " ".join(output.get("data", {}).get("text/html", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert all(f">{reason}</td>" in shown and f">{count:,}</td>" in shown for reason, count in fates.items())
    assert sum("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])) == 5
