import base64
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml
from tiny_notebooks import RESOLVE, write_notebook

from sdlab import jobs, plan
from sdlab.config import ConfigError
from sdlab.engine import Progress
from sdlab.page import PageStep, clock, write_page

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a notebook `a.ipynb` that has five kinds of parameters, and the user in its root."""
    (tmp_path / "papermill_runs").mkdir()
    defaults = "seed = 0\nmax_steps = None\nguidance_scales = [1.0]\nrun_dir = None\nmodel = 'tiny'"
    write_notebook(tmp_path / "notebooks" / "a.ipynb", RESOLVE, defaults=defaults)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_job(project, steps, **values):
    path = project / "papermill_runs" / "job.yaml"
    path.write_text(yaml.safe_dump({"values": values, "steps": steps}, sort_keys=False))
    return path


def step(name, notebook="notebooks/a.ipynb", **fields):
    return {"name": name, "notebook": notebook, **fields}


def refusal(capsys, *arguments):
    """What sdlab-run says when it refuses, one line a problem."""
    assert jobs.main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err.splitlines()


def test_references_keep_their_type_nest_and_refer_on(project):
    parameters = {
        "seed": "${values.${values.size}.seed}",
        "guidance_scales": "${values.scales}",
        "max_steps": "${values.full.steps}",
        "run_dir": "${out}/runs/${values.size}_${values.full.seed}",
        "model": "${values.again}",
    }
    values = {"size": "full", "full": {"seed": 5, "steps": None}, "scales": [1, 2.5], "again": "${values.size}"}
    job = plan.plan(write_job(project, [step("one", parameters=parameters)], **values))
    assert job.out == project / "papermill_runs" / "out" / "job"
    assert job.steps[0].given == {
        "seed": 5,
        "guidance_scales": [1.0, 2.5],
        "max_steps": None,
        "run_dir": f"{job.out}/runs/full_5",
        "model": "full",
    }


def test_numbers_with_an_exponent_are_numbers(project):
    path = project / "papermill_runs" / "job.yaml"
    path.write_text("values: {x: 1e-5}\nsteps: [{name: a, notebook: notebooks/a.ipynb, parameters: {guidance_scales: ['${values.x}']}}]")
    assert plan.plan(path).steps[0].given == {"guidance_scales": [1e-5]}
    assert plan.plan(path, sets=["x=2e-3"]).steps[0].given == {"guidance_scales": [2e-3]}


def test_set_reaches_into_tables_and_refuses_unknown_names(project, capsys):
    path = write_job(project, [step("one", parameters={"seed": "${values.full.seed}"})], size="full", full={"seed": 1})
    assert plan.plan(path, sets=["full.seed=9"]).steps[0].given == {"seed": 9}
    assert "did you mean 'size'" in refusal(capsys, path, "--set", "sise=smoke")[0]
    assert "NAME=VALUE" in refusal(capsys, path, "--set", "size")[0]
    assert "is not a table" in refusal(capsys, path, "--set", "size.x=1")[0]


def test_a_matrix_makes_a_step_of_every_combination_and_needs_mean_all_of_them(project):
    grid = {"seed": [0, 1], "guidance_scales": [[1, 2], [3]]}
    path = write_job(
        project,
        [
            step("end", needs=["grid"]),
            step("grid", matrix=grid, parameters={"run_dir": "r${matrix.seed}"}),
            step("pick", needs=["grid-seed-1-guidance_scales-2"]),
        ],
    )
    steps = plan.plan(path).steps
    names = [f"grid-seed-{seed}-guidance_scales-{number}" for seed in (0, 1) for number in (1, 2)]
    assert [planned.name for planned in steps] == [*names, "end", "pick"]
    assert steps[3].given == {"seed": 1, "guidance_scales": [3.0], "run_dir": "r1"}
    assert steps[4].needs == tuple(names) and steps[5].needs == (names[3],)


def test_problems_of_all_steps_are_reported_before_anything_runs(project, capsys):
    steps = [
        step("one", parameters={"sede": 1}),
        step("two", parameters={"seed": "many"}),
        step("three", notebook="notebooks/b.ipynb"),
        step("four", parameters={"seed": 1}),
    ]
    lines = refusal(capsys, write_job(project, steps))
    assert [re.search(r"step '(\w+)'", line)[1] for line in lines] == ["one", "two", "three"]
    assert "did you mean 'seed'" in lines[0] and "a whole number" in lines[1] and "is not there" in lines[2]
    assert not (project / "papermill_runs" / "out").exists()


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([], "at least 1 item"),
        ([step("a", neds=["b"])], "did you mean 'needs'"),
        ([step("a b")], "steps.0.name"),
        ([step("a"), step("a")], "used twice"),
        ([step("a", needs=["c"]), step("b")], "needs 'c', which is no step"),
        ([step("a", needs=["b"]), step("b", needs=["a"]), step("c")], "the needs of a, b go round in a circle"),
        ([step("a", matrix={"seed": 3})], "matrix"),
        ([step("a", matrix={"seed": []})], "give a list of values"),
        ([step("a", parameters={"seed": "${values.sed}"})], "did you mean 'seed'"),
        ([step("a", parameters={"seed": "${values.loop}"})], "refers to itself"),
        ([step("a", parameters={"model": "x ${values.scales}"})], "cannot stand within a text"),
        ([step("a", parameters={"model": "${values.seed"})], "is not closed"),
    ],
)
def test_a_wrong_job_file_is_refused_in_one_sentence(project, capsys, steps, problem):
    lines = refusal(capsys, write_job(project, steps, seed=1, scales=[1], loop="${values.loop}"))
    assert len(lines) == 1 and problem in lines[0]


def test_what_is_no_job_is_refused(project, capsys):
    (project / "list.yaml").write_text("- a")
    (project / "bad.yaml").write_text("a: [")
    assert "has to hold 'values' and 'steps'" in refusal(capsys, "list.yaml")[0]
    assert "not valid YAML" in refusal(capsys, "bad.yaml")[0]
    assert "is not there" in refusal(capsys, "none.yaml")[0]
    assert "neither a notebook" in refusal(capsys, "notes.txt")[0]
    assert "--set" in refusal(capsys, "list.yaml", "-p", "seed", "1")[0]
    assert "-p NAME VALUE" in refusal(capsys, "notebooks/a.ipynb", "--only", "a")[0]
    assert "did you mean 'seed'" in refusal(capsys, "notebooks/a.ipynb", "-p", "seeed", "1")[0]


def test_the_digest_follows_source_parameters_needs_and_preset_files(project):
    write_notebook(project / "notebooks" / "b.ipynb", defaults="preset = 'mine.yaml'")
    (project / "mine.yaml").write_text("a: 1")
    path = write_job(project, [step("a"), step("b", notebook="notebooks/b.ipynb", needs=["a"]), step("c")], s=0)
    digests = lambda: [planned.digest for planned in plan.plan(path).steps]  # noqa: E731
    first = digests()
    assert digests() == first and first[0] == first[2]
    (project / "mine.yaml").write_text("a: 2")
    second = digests()
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]
    write_job(project, [step("a", parameters={"seed": 1}), step("b", notebook="notebooks/b.ipynb", needs=["a"]), step("c")])
    third = digests()
    assert [a == b for a, b in zip(second, third, strict=True)] == [False, False, True]
    write_notebook(project / "notebooks" / "a.ipynb", RESOLVE, "p.seed", defaults="seed = 0")
    write_job(project, [step("a"), step("b", notebook="notebooks/b.ipynb", needs=["a"]), step("c")])
    assert digests()[2] != first[2]


def test_a_job_runs_skips_what_is_done_stops_at_a_failure_and_shows_its_pictures(project, capsys):
    picture = f"import base64\nfrom IPython.display import Image, display\ndisplay(Image(data=base64.b64decode('{PIXEL}'), format='png'))"
    makes = "from pathlib import Path\nPath(p.run_dir).mkdir(parents=True, exist_ok=True)"
    write_notebook(project / "notebooks" / "draw.ipynb", RESOLVE, makes, "# Loss <now>", picture, defaults="run_dir = None")
    write_notebook(project / "notebooks" / "break.ipynb", RESOLVE, "for i in range(3):\n    1 / (2 - i)", defaults="seed = 0")
    steps = [
        step("draw", notebook="notebooks/draw.ipynb", parameters={"run_dir": "${out}/run"}),
        step("break", notebook="notebooks/break.ipynb", needs=["draw"], parameters={"seed": "${values.seed}"}),
        step("never", needs=["break"]),
    ]
    path = write_job(project, steps, seed=0)
    out = project / "papermill_runs" / "out" / "job"

    assert jobs.main([str(path)]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^\[1/3\] draw  done in 0:\d\d$", shown, re.M)
    assert re.search(r"^\[2/3\] break  failed after 0:\d\d$", shown, re.M)
    assert "ZeroDivisionError: division by zero" in shown and "1 / (2 - i)" in shown and "break.ipynb" in shown
    assert "\x1b" not in shown and "never" not in shown
    page = (out / "index.html").read_text()
    assert f"data:image/png;base64,{PIXEL}" in page and "Loss &lt;now&gt;" in page and "<now>" not in page
    assert "ZeroDivisionError" in page and "not run" in page
    assert json.loads((out / "steps" / "break.json").read_text())["status"] == "failed"

    assert jobs.main([str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "[1/3] draw  already done" in shown and "[3/3] never  to run" in shown and "seed = 0" in shown
    assert "needs 'break', which is not done" in refusal(capsys, path, "--only", "never")[0]
    assert "did you mean 'never'" in refusal(capsys, path, "--from", "nevr")[0]

    assert jobs.main([str(path), "--only", "draw"]) == 0
    assert "[1/3] draw  already done (to run it again, delete papermill_runs/out/job/draw.ipynb)" in capsys.readouterr().out
    (out / "run").rmdir()
    assert jobs.main([str(path), "--only", "draw"]) == 0
    assert "draw  done in" in capsys.readouterr().out and (out / "run").is_dir()


def test_a_stopped_job_exits_with_3_and_its_step_is_not_done(project, capsys):
    busy = f"import time\nopen({str(project / 'busy')!r}, 'w').close()\nfor _ in range(600):\n    time.sleep(0.1)"
    write_notebook(project / "notebooks" / "slow.ipynb", busy)
    path = write_job(project, [step("slow", notebook="notebooks/slow.ipynb")])

    def interrupt():
        deadline = time.monotonic() + 180
        while not (project / "busy").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=interrupt)
    sender.start()
    assert jobs.main([str(path)]) == 3
    sender.join()
    shown = capsys.readouterr().out
    assert "slow  stopped after" in shown and "the same command goes on from here" in shown
    assert not jobs.is_done(plan.plan(path), plan.plan(path).steps[0])


def test_one_notebook_runs_where_the_user_is_with_text_as_its_types_say(project, capsys):
    write_notebook(project / "notebooks" / "one.ipynb", RESOLVE, "p.save('here')", defaults="seed = 0\nmodel = ''\nmax_steps = 3")
    assert jobs.main(["notebooks/one.ipynb", "-p", "model", "007", "-p", "max_steps", "none"]) == 0
    assert json.loads((project / "here" / "parameters.json").read_text()) == {"seed": 0, "model": "007", "max_steps": None}
    executed = list((project / "papermill_runs" / "out" / "one").glob("*/one.ipynb"))
    assert len(executed) == 1 and str(executed[0].parent.relative_to(project)) in capsys.readouterr().out


def test_an_interrupted_cell_stops_a_job_resumably(project):
    write_notebook(project / "notebooks" / "b.ipynb", "raise KeyboardInterrupt")
    assert jobs.main(["notebooks/b.ipynb", "--out", "there"]) == 3
    assert (project / "there" / "index.html").is_file()


def test_one_notebook_runs_again_even_into_the_same_folder(project, capsys):
    for _ in range(2):
        assert jobs.main(["notebooks/a.ipynb", "--out", "there"]) == 0
        assert "a  done in" in capsys.readouterr().out


def test_the_line_of_progress_shows_cell_rate_and_time_left(monkeypatch, capsys):
    line = jobs._Line("[3/5] train_2")
    line.update(Progress(5, 8, "train:  62%|######2   | 62/100 [01:02<00:41, 212.00samples/s]"))
    line.update(Progress(5, 8, "a line that is no bar"))
    assert line.text() == "[3/5] train_2  cell 5/8  62% [01:02<00:41, 212.00samples/s]"
    line.update(Progress(6, 8, ""))
    assert line.text() == "[3/5] train_2  cell 6/8  [0:00]"


def test_clocks_are_read_like_clocks():
    assert [clock(seconds) for seconds in (7.4, 103, 3723)] == ["0:07", "1:43", "1:02:03"]


def test_the_page_escapes_what_notebooks_say_and_needs_no_network(tmp_path):
    hostile = '"><script>alert(1)</script>'
    picture = {"output_type": "display_data", "data": {"image/png": f"{PIXEL}\n"}, "metadata": {}}
    cells = [
        {"cell_type": "markdown", "source": ["## First\n", f"### {hostile}"]},
        {"cell_type": "code", "source": "", "outputs": [picture, {"output_type": "error", "traceback": ["\x1b[31m<b>Error</b>"]}]},
    ]
    (tmp_path / "odd name.ipynb").write_text(json.dumps({"cells": cells}))
    steps = [
        PageStep(hostile, "n.ipynb", tmp_path / "odd name.ipynb", "failed", 61.0),
        PageStep("missing", "n.ipynb", tmp_path / "none.ipynb", "not run", None),
    ]
    page = write_page(tmp_path, title="<demo>", subtitle="now", steps=steps).read_text()
    assert "<script" not in page and "<b>Error" not in page and "\x1b" not in page and "<demo>" not in page
    assert base64.b64decode(re.search(r"base64,([^\"]+)", page)[1]) == base64.b64decode(PIXEL)
    assert 'href="odd%20name.ipynb"' in page and "1:01" in page
    assert "http" not in page


def test_the_demo_is_a_job_for_both_sizes():
    demo = Path(__file__).parents[1] / "papermill_runs" / "demo.yaml"
    full, smoke = plan.plan(demo), plan.plan(demo, sets=["size=smoke"])
    assert [planned.name for planned in full.steps] == ["prepare", "train_1", "train_2", "sample", "curve"]
    assert full.steps[2].given["init_from"] == full.steps[1].given["run_dir"]
    assert (full.steps[1].given["max_steps"], smoke.steps[1].given["max_steps"]) == (None, 6)
    with pytest.raises(ConfigError, match="did you mean 'smoke'"):
        plan.plan(demo, sets=["size=smoka"])
