"""The repository keeps its own promises: light import, equal dependency lists, clean notebooks."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_environment_and_pyproject_name_the_same_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert f"python{project['requires-python']}" in listed
    (pip,) = [entry["pip"] for entry in listed if isinstance(entry, dict)]
    assert pip == project["dependencies"]


def test_importing_sdlab_is_light_and_sets_the_thread_spin() -> None:
    code = (
        "import sys, time, os; before = set(sys.modules); start = time.perf_counter(); import sdlab; took = time.perf_counter() - start;"
        "loaded = sorted(set(sys.modules) - before); import json; print(json.dumps([took, loaded, os.environ['GOMP_SPINCOUNT']]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    took, loaded, spin = json.loads(done.stdout)
    assert loaded == ["sdlab"] and spin == "2000"
    assert took < 0.5


def test_the_words_of_config_and_parameters_need_no_torch() -> None:
    code = "import sys, sdlab.parameters, sdlab.presets, sdlab.engine, sdlab.jobs, sdlab.scenes; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_clean_and_parameterised(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.cells[0].source.startswith("# ") and notebook.cells[0].source.splitlines()[0].endswith("?")
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert all(len(cell.source.splitlines()) <= 15 for cell in code if "parameters" not in cell.metadata.get("tags", []))
    assert not any(line.lstrip().startswith(("!", "%")) for cell in code for line in cell.source.splitlines())
    nodes = [node for cell in code for node in ast.walk(ast.parse(cell.source))]
    assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) for node in nodes)
    (tagged,) = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    for statement in ast.parse(tagged.source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)


def test_the_readme_tells_every_notebooks_parameters_with_their_defaults() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme
    for path in NOTEBOOKS:
        table = readme[readme.index(f"<code>{path.name}</code>") :].split("</details>")[0]
        (tagged,) = [cell for cell in nbformat.read(path, as_version=4).cells if "parameters" in cell.metadata.get("tags", [])]
        for statement in ast.parse(tagged.source).body:
            name, default = statement.targets[0].id, repr(ast.literal_eval(statement.value))
            (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
            assert f"| `{default}` |" in row or name == "prompts", (path.name, name, default)


def test_no_file_is_too_heavy_to_ship() -> None:
    shipped = [path for path in (ROOT / "sdlab" / "assets" / "tiny").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in shipped) <= 32_000_000
