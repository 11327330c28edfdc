"""The page of a job: its steps, and every picture of its executed notebooks, in one file that opens offline."""

from __future__ import annotations

import base64
import html
import json
import re
import string
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

TEMPLATE = Path(__file__).parent / "assets" / "job.html"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class PageStep:
    """What the page says of one step."""

    name: str
    notebook: str
    output: Path
    """The executed notebook; it need not be there."""
    status: str
    """"done", "failed", "stopped" or "not run"."""
    duration_s: float | None


def write_page(folder: Path, *, title: str, subtitle: str, steps: Sequence[PageStep]) -> Path:
    """Write `folder/index.html`; everything that comes from notebooks is escaped."""
    template = string.Template(TEMPLATE.read_text(encoding="utf-8"))
    text = template.substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        rows="".join(_row(step) for step in steps),
        sections="".join(_section(step, folder) for step in steps if step.output.is_file()),
    )
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    page.write_text(text, encoding="utf-8")
    return page


def clock(seconds: float) -> str:
    """Seconds as 0:07, 1:43 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def traceback_end(lines: Sequence[str], *, count: int = 15) -> list[str]:
    """The last lines of a notebook's traceback, without colours."""
    return ANSI.sub("", "\n".join(lines)).rstrip().splitlines()[-count:]


def _row(step: PageStep) -> str:
    time = clock(step.duration_s) if step.duration_s is not None else ""
    kind = step.status if step.status in ("done", "failed", "stopped") else "open"
    name, notebook, status = html.escape(step.name), html.escape(step.notebook), html.escape(step.status)
    cells = f'<td><a href="#{name}">{name}</a></td><td>{notebook}</td><td class="{kind}">{status}</td><td class="number">{time}</td>'
    return f"<tr>{cells}</tr>\n"


def _section(step: PageStep, folder: Path) -> str:
    cells = json.loads(step.output.read_text(encoding="utf-8"))["cells"]
    errors = "".join(f"<pre>{html.escape(text)}</pre>\n" for text in _errors(cells))
    figures = "".join(_figure(caption, data) for caption, data in _pictures(cells, step.name))
    name = html.escape(step.name)
    link = quote(step.output.relative_to(folder).as_posix())
    body = errors + (f'<div class="figures">\n{figures}</div>\n' if figures else "")
    return f'<section id="{name}">\n<h2>{name}<a href="{link}">executed notebook</a></h2>\n{body}</section>\n' if body else ""


def _figure(caption: str, data: str) -> str:
    text = html.escape(caption)
    image = f'<img alt="{text}" src="data:image/png;base64,{html.escape(data)}">'
    return f'<figure class="{_shape(data)}"><figcaption>{text}</figcaption>{image}</figure>\n'


def _shape(data: str) -> str:
    """How a figure is laid out, from the size in the PNG's header: small ones side by side, others half a page or a whole one."""
    width, height = struct.unpack(">II", base64.b64decode(data[:32])[16:24])
    if width < 540:
        return "small"
    return "wide" if width > 2 * height else "half"


def _pictures(cells: Sequence[Any], caption: str) -> Iterator[tuple[str, str]]:
    """Every PNG output as base64, with the markdown heading above it."""
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"^#+\s+(.+?)\s*#*$", source, flags=re.MULTILINE)
            caption = headings[-1] if headings else caption
        for output in cell.get("outputs", []):
            data = output.get("data", {}).get("image/png")
            if data is not None:
                yield caption, "".join("".join(data).split())


def _errors(cells: Sequence[Any]) -> Iterator[str]:
    for cell in cells:
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                yield "\n".join(traceback_end(output["traceback"]))
