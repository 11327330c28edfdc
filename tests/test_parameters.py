import json
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
from tiny_notebooks import write_notebook

from sdlab import parameters
from sdlab.config import ConfigError
from sdlab.parameters import FIRST_LINE, VOCABULARY, check, fit, resolve


def take(name, value):
    return fit({name: value}, {name: None}, where="test")[name]


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("allow_uncaptioned", "false", False),
        ("allow_uncaptioned", "True", True),
        ("seed", "3", 3),
        ("seed", 3.0, 3),
        ("seed", "1e3", 1000),
        ("max_bad_fraction", "1e-5", 1e-5),
        ("guidance_scales", "[1,2.5]", [1.0, 2.5]),
        ("guidance_scales", "1,2,3", [1.0, 2.0, 3.0]),
        ("guidance_scales", 4, [4.0]),
        ("guidance_scales", ["1e0", 2], [1.0, 2.0]),
        ("resolution", "64", 64),
        ("resolution", "[32, 64]", [32, 64]),
        ("prompts", "a cat, on a red background", ["a cat, on a red background"]),
        ("prompts", "[a cat, 'an owl']", ["a cat", "an owl"]),
        ("source", "scenes", "scenes"),
        ("source", '["a", "b"]', ["a", "b"]),
        ("stage", 512, "512"),
        ("max_steps", "none", None),
        ("max_steps", "auto", None),
        ("init_from", "null", None),
        ("devices", "auto", "auto"),
        ("devices", "2", 2),
        ("interactive", "true", True),
        ("checkpoint", "100", 100),
        ("overrides", '{"learning_rate": 1e-5}', {"learning_rate": 1e-5}),
        ("overrides", "{lr_schedule: cosine}", {"lr_schedule": "cosine"}),
    ],
)
def test_text_means_what_the_type_says(name, given, taken):
    assert take(name, given) == taken
    assert type(take(name, given)) is type(taken)


@pytest.mark.parametrize(
    ("name", "given", "allowed"),
    [
        ("allow_uncaptioned", "yes", "true or false"),
        ("allow_uncaptioned", "", "true or false"),
        ("allow_uncaptioned", 1, "true or false"),
        ("seed", 3.5, "a whole number"),
        ("seed", True, "a whole number"),
        ("seed", None, "a whole number"),
        ("max_bad_fraction", float("nan"), "a number"),
        ("guidance_scales", "1, two", "a list"),
        ("overrides", "fast", "a table"),
        ("weights", "emma", "did you mean 'ema'"),
        ("precision", "bf16", "'32-true' or 'bf16-mixed' or '16-mixed' or none"),
        ("preset", 1.5, "text"),
    ],
)
def test_what_is_not_of_the_type_is_refused_with_what_is_allowed(name, given, allowed):
    with pytest.raises(ConfigError, match=allowed) as refusal:
        take(name, given)
    assert name in str(refusal.value)


def test_a_name_outside_the_vocabulary_takes_the_type_of_its_default():
    defaults = {"mine": 2, "sizes": [1, 2], "anything": None}
    assert fit({"mine": "5", "sizes": "3,4", "anything": "x"}, defaults, where="t") == {"mine": 5, "sizes": [3, 4], "anything": "x"}
    with pytest.raises(ConfigError, match="mine='five'"):
        fit({"mine": "five"}, defaults, where="t")


def test_all_problems_are_reported_together_with_the_nearest_name():
    with pytest.raises(ConfigError) as refusal:
        fit({"sede": 1, "limit": "many"}, {"seed": 0, "limit": None}, where="job")
    assert "did you mean 'seed'" in str(refusal.value) and "limit='many'" in str(refusal.value)


def test_check_coerces_what_a_notebook_is_given(tmp_path):
    notebook = write_notebook(tmp_path / "a.ipynb", defaults="seed = 0\nlimit: int | None = None  # pictures")
    assert check(notebook, {"seed": "7"}) == {"seed": 7}
    with pytest.raises(ConfigError, match=r"a\.ipynb.*did you mean 'limit'"):
        check(notebook, {"limmit": 3})


def test_check_says_what_is_wrong_with_a_notebook(tmp_path):
    with pytest.raises(ConfigError, match="is not there"):
        check(tmp_path / "none.ipynb", {})
    for text in ("[", "[1]", '{"cells": 3}', '{"cells": [{}]}'):
        (tmp_path / "b.ipynb").write_text(text)
        with pytest.raises(ConfigError, match="is not a notebook"):
            check(tmp_path / "b.ipynb", {})
    with pytest.raises(ConfigError, match="no cell tagged 'parameters'"):
        check(write_notebook(tmp_path / "c.ipynb", "n = 1", defaults=None), {})


@pytest.mark.parametrize("line", ["import os", "n = 2 * 3", "n =", "n, m = 1, 2", "print(1)", "n = float('nan')"])
def test_the_tagged_cell_holds_literals_only(tmp_path, line):
    with pytest.raises(ConfigError, match="only lines 'name = literal'"):
        check(write_notebook(tmp_path / "a.ipynb", defaults=line), {})


def test_a_parameter_cannot_hide_what_the_resolved_object_offers(tmp_path):
    with pytest.raises(ConfigError, match="'values' cannot be a parameter's name"):
        check(write_notebook(tmp_path / "a.ipynb", defaults="values = 1"), {})


@pytest.fixture
def run_cells(monkeypatch):
    """Resolve as a notebook would after it has executed these cells."""

    def after(*cells):
        monkeypatch.setattr(parameters, "_shell", lambda: SimpleNamespace(user_ns={"In": ["", *cells, "p = parameters.resolve()"]}))
        return resolve()

    return after


TAGGED = f"{FIRST_LINE}\nseed = 0\nprompts = ['<b>a cat</b>']\nmax_steps = None"


def test_resolve_puts_papermills_values_over_the_defaults(run_cells):
    p = run_cells("import sdlab", TAGGED, '# Parameters\nseed = "7"\nmax_steps = 5.0\n')
    assert p.values == {"seed": 7, "prompts": ["<b>a cat</b>"], "max_steps": 5}
    assert p.seed == 7


def test_resolve_outside_the_first_run_of_a_notebook_is_the_same(run_cells):
    injected = "# Parameters\nseed = 7"
    assert run_cells(TAGGED, injected, "r = 1", "seed = 99; other = 3").seed == 7
    assert run_cells(TAGGED, injected, "r = 1", TAGGED.replace("seed = 0", "seed = 5")).seed == 5
    assert run_cells(TAGGED + "\nmine = 2").mine == 2


def test_resolve_refuses_unknown_names_and_a_missing_tagged_cell(run_cells):
    with pytest.raises(ConfigError, match="did you mean 'seed'"):
        run_cells(TAGGED, "# Parameters\nsed = 1")
    with pytest.raises(ConfigError, match="run the cell tagged 'parameters' first"):
        run_cells("seed = 1")
    assert run_cells(TAGGED, "# Parameters\nPAPERMILL_INPUT_PATH = 'a.ipynb'").seed == 0


def test_resolve_outside_a_notebook_says_so():
    with pytest.raises(ConfigError, match=r"parameters\.check"):
        resolve()


def test_the_resolved_object_is_frozen_shows_itself_escaped_and_saves_itself(run_cells, tmp_path):
    p = run_cells(TAGGED, "# Parameters\nseed = 7")
    with pytest.raises(AttributeError, match="frozen"):
        p.seed = 8
    with pytest.raises(AttributeError, match="did you mean 'seed'"):
        _ = p.sede
    p.prompts.append("more")
    p.values["seed"] = 1
    assert (p.seed, p.prompts) == (7, ["<b>a cat</b>"])
    assert "&lt;b&gt;a cat" in p._repr_html_() and "<b>a" not in p._repr_html_()
    assert "* seed" in repr(p)
    assert json.loads(p.save(tmp_path / "new").read_text()) == p.values


def test_the_vocabulary_knows_every_solver():
    from sdlab.solvers import SOLVERS

    assert set(get_args(VOCABULARY["solver"].annotation)) == set(SOLVERS)


def test_importing_parameters_loads_nothing_heavy():
    code = "import sys, sdlab.parameters; print([m for m in ('torch', 'IPython', 'numpy', 'diffusers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
