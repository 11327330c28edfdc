"""Notebooks of a few lines for the tests of what runs notebooks."""

from pathlib import Path

import nbformat

from sdlab.parameters import FIRST_LINE

RESOLVE = "from sdlab import parameters\n\np = parameters.resolve()"


def write_notebook(path: Path, *cells: str, defaults: str | None = "n = 1") -> Path:
    """A notebook with a tagged cell of `defaults` (none if None), then `cells`; one that begins with "#" and a space is markdown."""
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
    if defaults is not None:
        tagged = nbformat.v4.new_code_cell(f"{FIRST_LINE}\n{defaults}", metadata={"tags": ["parameters"]})
        notebook.cells.append(tagged)
    for source in cells:
        make = nbformat.v4.new_markdown_cell if source.startswith("# ") else nbformat.v4.new_code_cell
        notebook.cells.append(make(source))
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path
