"""Every matplotlib picture of sdlab, as figures that need no pyplot and show themselves in a notebook."""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from IPython.core.getipython import get_ipython
from IPython.display import display
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from sdlab import evaluate
from sdlab.config import near_path, resolve_path
from sdlab.trajectory import Trajectory

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Line colours that also colour-blind readers tell apart."""
GREY = "#666666"
MANY = 40
"""From so many points on a line has no markers, and a running mean where it is noisy."""
LIVE_EVERY_S = 2.0
"""Seconds that a curve in a running cell stays before it is drawn again."""
Row = Mapping[str, Any]


class Picture(Figure):
    """A figure that notebooks show as PNG although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure to `path` in the format of its suffix, making folders as needed, and return the absolute path."""
    path = resolve_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _figure(width: float, height: float, title: str) -> Picture:
    figure = Picture(figsize=(width, height), dpi=100, facecolor="white", layout="constrained")
    if title:
        per_line = max(20, int(width * 10))
        figure.suptitle(textwrap.fill(plain(title, 3 * per_line), per_line), fontsize=12, parse_math=False)
    return figure


@functools.cache
def _known_glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def plain(text: object, limit: int) -> str:
    """Text that can be drawn: one line, at most `limit` characters, control characters and glyphs that the font lacks replaced."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    shown = "".join(c if ord(c) in _known_glyphs() else "\u25a1" for c in line[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1].rstrip() + "\u2026"


def _label_axes(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(plain(title, 80), fontsize=11, parse_math=False)
    axes.set_xlabel(plain(xlabel, 80), parse_math=False)
    axes.set_ylabel(plain(ylabel, 80), parse_math=False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend_below(axes: Axes, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        legend = axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, frameon=False, fontsize=9)
        for text in legend.get_texts():
            text.set_parse_math(False)


def fid_clip_curve(
    rows: Sequence[Row],
    *,
    references: Sequence[Row] = (),
    title: str = "Quality against prompt agreement over the guidance scale",
    note: str = "",
) -> Picture:
    """The FID-CLIP curve of one or several models, with the guidance scale at each point and 95 % intervals on both axes.

    Pictures that the exact reader could read get a second panel: the share that is strictly right over the guidance scale.

    Args:
        rows: of `evaluate`, all measured alike.
        references: real pictures and VAE reconstructions, measured alike; one that would crush the curve is named with its numbers instead.
        title: of the whole.
        note: a sentence to print below, as from `tables.describe_curve`.

    Raises:
        ConfigError: no rows, or rows measured in different ways; the differing fields are named.
    """
    chosen = evaluate.best(rows)
    evaluate.refuse_mixed([*rows, *references])
    readable = evaluate.strict_share(chosen) is not None
    figure = _figure(12 if readable else 7.5, 5.4 + 0.2 * bool(note), title)
    panels = figure.subplots(1, 2 if readable else 1, squeeze=False, width_ratios=(1.25, 1)[: 2 if readable else 1])[0]
    _draw_curve(panels[0], rows, references, chosen)
    if readable:
        _draw_strict(panels[1], rows)
    if note:
        figure.supxlabel(textwrap.fill(plain(note, 600), 160 if readable else 96), fontsize=9, parse_math=False)
    return figure


def _draw_curve(axes: Axes, rows: Sequence[Row], references: Sequence[Row], chosen: Row) -> None:
    curves = _curves(rows)
    for (label, curve), colour in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
        _draw_points(axes, curve, "o-", label, color=colour, markersize=4)
    at = "most strictly right" if evaluate.strict_share(chosen) else "lowest distance"
    ring: dict[str, Any] = {"fmt": "o", "markersize": 13, "fillstyle": "none", "color": "black"}
    place, label = (chosen["clip_score"], chosen["frechet_distance"]), f"{at}: guidance scale {chosen['guidance_scale']:g}"
    axes.errorbar(*place, label=label, **ring)
    limits = axes.get_xlim(), axes.get_ylim()
    for row, marker in zip(references, itertools.cycle("*Ds^"), strict=False):
        _draw_reference(axes, row, marker, limits)
    for curve, colour in zip(curves.values(), itertools.cycle(COLOURS), strict=False):
        _name_points(axes, curve, colour)
    extractor = rows[0]["extractor"]
    _label_axes(
        axes,
        f"Guidance scales with 95 % intervals (n = {rows[0]['num_images']}, identity {rows[0]['identity_hash'][:8]})",
        f"CLIP score ({extractor}, mean cosine, higher is better)",
        f"Frechet distance ({extractor}, lower is better)",
    )
    _legend_below(axes, 1 if max(map(len, curves)) > 32 else 2)


def _draw_points(axes: Axes, rows: Sequence[Row], style: str, label: str, **look: Any) -> None:
    """Points with 95 % intervals: of the distance as bootstrapped, of the CLIP score 1.96 standard errors either way."""
    x, y = ([row[name] for row in rows] for name in ("clip_score", "frechet_distance"))
    around = np.array([[row["frechet_distance"] - row["frechet_low"], row["frechet_high"] - row["frechet_distance"]] for row in rows])
    across = [1.96 * row["clip_score_se"] for row in rows]
    axes.errorbar(x, y, xerr=across, yerr=around.T.clip(min=0), fmt=style, elinewidth=0.8, label=label, **look)


def _draw_reference(axes: Axes, row: Row, marker: str, limits: tuple[tuple[float, float], tuple[float, float]]) -> None:
    """A reference point, or only its numbers in the legend where drawing it would leave the curve a sixth of an axis or less."""
    place = row["clip_score"], row["frechet_distance"]
    label = f"{row['label']} ({place[0]:.3f}, {place[1]:.4f})"
    shares = [(high - low) / (max(high, value) - min(low, value)) for value, (low, high) in zip(place, limits, strict=True)]
    if min(shares) > 1 / 6:
        _draw_points(axes, [row], marker, label, color="black", markersize=8)
    else:
        axes.errorbar([], [], fmt=marker, color=GREY, markersize=8, label=f"{label}, outside this view")


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by model, weights and step, each in order of the guidance scale."""
    curves: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["guidance_scale"]):
        name = plain(near_path(row["model"]), 200)
        label = f"{name if len(name) <= 32 else chr(0x2026) + name[-31:]} ({row['weights']}, step {row['step']})"
        curves.setdefault(label, []).append(row)
    return curves


def _name_points(axes: Axes, rows: Sequence[Row], colour: str) -> None:
    """Write each guidance scale beside its point, at a right angle to the curve and on its outer side."""
    shown = axes.transData.transform([[row["clip_score"], row["frechet_distance"]] for row in rows])
    x, y = (shown - shown[0]).T
    outer = 1 if (x[:-1] * y[1:] - x[1:] * y[:-1]).sum() > 0 else -1
    along = np.gradient(shown, axis=0) if len(rows) > 1 else np.array([[1.0, 0.0]])
    normal = outer * np.stack([along[:, 1], -along[:, 0]], axis=1) / np.linalg.norm(along, axis=1, keepdims=True).clip(min=1e-9)
    for row, offset in zip(rows, 12 * normal, strict=True):
        place = row["clip_score"], row["frechet_distance"]
        name = axes.annotate(f"{row['guidance_scale']:g}", place, offset, textcoords="offset points", ha="center", va="center", zorder=5)
        name.set(fontsize=9, color=colour, path_effects=[withStroke(linewidth=2.5, foreground="white")])


def _draw_strict(axes: Axes, rows: Sequence[Row]) -> None:
    curves = _curves(rows)
    shares = (("strict_one", "o-", "one object"), ("strict_two", "s--", "two objects"), ("background_right", ":", "background alone"))
    for key, style, asked in shares:
        axes.plot([], [], style, markersize=4, color=COLOURS[0] if len(curves) == 1 else GREY, label=asked)
        for curve, colour in zip(curves.values(), itertools.cycle(COLOURS), strict=False):
            known = [(row["guidance_scale"], row[key]) for row in curve if row[key] is not None]
            axes.plot([scale for scale, _ in known], [share for _, share in known], style, markersize=4, color=colour)
    axes.set_ylim(-0.03, 1.03)
    _label_axes(axes, "What the exact reader finds right", "guidance scale (1 is off)", "share of pictures found right (higher is better)")
    _legend_below(axes, 3)


def loss_curve(metrics: Sequence[Row], title: str = "Training loss", *, num_train_timesteps: int = 1000) -> Picture:
    """Training and validation loss over optimizer steps, and in a second panel the validation loss of each quarter of the timesteps.

    Args:
        metrics: rows of `metrics.jsonl`, of which only `step` has to be there. `loss` and `val_loss` are drawn where they are finite,
            `val_loss_quartiles` (four means, low noise first) make the second panel, and a true `skipped` is a mark on the x axis.
        title: what was trained.
        num_train_timesteps: of the noise schedule; names the quarters.
    """
    quarters = [[(row["step"], row["val_loss_quartiles"][i]) for row in metrics if row.get("val_loss_quartiles")] for i in range(4)]
    wide = any(quarters)
    figure = _figure(12 if wide else 8, 4.8, title)
    panels = figure.subplots(1, 2 if wide else 1, squeeze=False, width_ratios=(1.35, 1)[: 2 if wide else 1])[0]
    _draw_losses(panels[0], metrics)
    _label_axes(panels[0], "All timesteps" if wide else "", _steps_label(metrics), "loss: mean squared error (lower is better)")
    if wide:
        _draw_quarters(panels[1], [_finite(points) for points in quarters], num_train_timesteps)
    for axes in panels:
        _whole_steps(axes, metrics)
        _legend_below(axes, 2)
    return figure


def _finite(points: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]


def _draw_losses(axes: Axes, metrics: Sequence[Row]) -> None:
    """Every logged loss, strong if few and else faint under a running mean; validation; and the steps that were skipped."""
    logged, checked = (_finite((row["step"], row.get(name)) for row in metrics) for name in ("loss", "val_loss"))
    window = max(5, len(logged) // 20) if len(logged) >= MANY else 1
    if not logged:
        axes.text(0.5, 0.5, "no finite loss was logged yet", transform=axes.transAxes, ha="center", color=GREY)
    _draw_line(axes, logged, "o", color=COLOURS[0], linewidth=1, alpha=0.35 if window > 1 else 1, label="logged steps")
    if window > 1:
        _draw_line(axes, _running_mean(logged, window), "", color=COLOURS[0], linewidth=2, label=f"mean of {window} neighbouring values")
    _draw_line(axes, checked, "D", color=COLOURS[1], linewidth=1.5, label="validation")
    if len(logged) <= 5 and not checked:
        _name_values(axes, logged)
    skipped = [row["step"] for row in metrics if row.get("skipped")]
    if skipped:
        look: dict[str, Any] = {"color": "black", "markersize": 5, "markeredgewidth": 1.2, "clip_on": False, "zorder": 5}
        label = f"skipped by the gradient scaler ({len(skipped):,})"
        axes.plot(skipped, [0] * len(skipped), "x", transform=axes.get_xaxis_transform(), label=label, **look)


def _draw_line(axes: Axes, points: Sequence[tuple[int, float]], marker: str, **look: Any) -> None:
    """A line, with a marker at each point while they are few; nothing without points."""
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, f"{marker}-" if len(points) < MANY else "-", markersize=4, **look)


def _running_mean(points: Sequence[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """The mean of each `window` neighbours, at the step of the middle one."""
    total = np.cumsum([0.0, *(value for _, value in points)])
    means = (total[window:] - total[:-window]) / window
    return [(step, mean) for (step, _), mean in zip(points[(window - 1) // 2 :], means.tolist(), strict=False)]


def _name_values(axes: Axes, points: Sequence[tuple[int, float]]) -> None:
    """Write its value above each point, for so few that a line says little."""
    for place in points:
        name = axes.annotate(f"{place[1]:.3g}", place, (0, 7), textcoords="offset points", ha="center", zorder=5)
        name.set(fontsize=9, color=GREY, path_effects=[withStroke(linewidth=2.5, foreground="white")])


def _draw_quarters(axes: Axes, quarters: Sequence[Sequence[tuple[int, float]]], num_train_timesteps: int) -> None:
    """Validation loss by quarter of the timesteps, dark for low noise; logarithmic where the quarters lie far apart."""
    ends = [math.ceil(i * num_train_timesteps / 4) for i in range(5)]
    shades = colormaps["viridis"]([0.0, 0.3, 0.55, 0.8])
    for points, (start, end), colour in zip(quarters, itertools.pairwise(ends), shades, strict=True):
        _draw_line(axes, points, "o", color=colour, linewidth=1.5, label=f"timesteps {start}-{end - 1}")
    values = [value for points in quarters for _, value in points]
    logarithmic = bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    scale = "log, " if logarithmic else ""
    _label_axes(axes, "Validation by timestep (0: least noise)", "optimizer step", f"validation loss ({scale}lower is better)")


def _steps_label(metrics: Sequence[Row]) -> str:
    seen = [row for row in metrics if row.get("samples_seen")]
    return f"optimizer step ({seen[-1]['samples_seen']:,} samples seen after step {seen[-1]['step']:,})" if seen else "optimizer step"


def _whole_steps(axes: Axes, metrics: Sequence[Row]) -> None:
    """Ticks at whole steps, from the start of the training on, so that also a single row stands where it belongs."""
    last = max((row["step"] for row in metrics), default=1)
    axes.set_xlim(-0.02 * last, 1.04 * last)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=(1, 2, 5, 10), integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


class LiveLoss:
    """A loss curve in the running cell, replaced as rows come in and kept in the saved notebook.

    Where SDLAB_HEADLESS is set only the last state is drawn, and outside of IPython nothing.
    """

    def __init__(self, title: str = "Training loss", *, num_train_timesteps: int = 1000) -> None:
        self.title, self.num_train_timesteps = title, num_train_timesteps
        self._rows: list[Row] = []
        self._shown: list[Row] = []
        self._handle: Any = None
        self._last = -math.inf

    def __call__(self, rows: Sequence[Row]) -> None:
        """Show these rows of metrics, unless the curve was drawn less than `LIVE_EVERY_S` seconds ago."""
        self._rows = list(rows)
        if not os.environ.get("SDLAB_HEADLESS") and time.monotonic() >= self._last + LIVE_EVERY_S:
            self._draw()

    def close(self) -> None:
        """Show the rows of the last call, if they are not shown yet."""
        self._draw()

    def _draw(self) -> None:
        if get_ipython() is None or self._rows == self._shown:
            return
        picture = loss_curve(self._rows, self.title, num_train_timesteps=self.num_train_timesteps)
        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)
        self._shown, self._last = self._rows, time.monotonic()


def shapes(preflight: Row, max_tokens: int) -> Picture:
    """How large, how wide and how long-captioned the pictures are: used ones, and on top of them those that filters took.

    Args:
        preflight: content of `preflight.json`.
        max_tokens: longest caption that the text encoder reads.
    """
    counts, captions = preflight["shapes"], preflight["captions"]
    figure = _figure(12, 3.8, f"{preflight['used']:,} used and {sum(preflight['filtered'].values()):,} filtered pictures")
    side, aspect, tokens = figure.subplots(1, 3)
    _draw_counts(side, counts, "smaller_side", logarithmic=True)
    _label_axes(side, "Before any resize", "smaller side, pixels (logarithmic)", "pictures")
    _draw_counts(aspect, counts, "aspect", logarithmic=True)
    _label_axes(aspect, "Portrait below 1, landscape above", "width / height (logarithmic)", "pictures")
    _draw_counts(tokens, counts, "tokens", logarithmic=False)
    tokens.axvline(max_tokens + 0.5, color=GREY, linestyle="--", linewidth=1)
    title = f"{captions['truncated']:,} of {captions['present']:,} are longer than {max_tokens} tokens (line)"
    _label_axes(tokens, title, "tokens a caption, start and end included", "pictures")
    handles, labels = side.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _draw_counts(axes: Axes, counts: Mapping[str, Mapping[str, int]], name: str, *, logarithmic: bool) -> None:
    """Stacked histograms of counted values."""
    states = [counts.get(f"{state}_{name}", {}) for state in ("used", "filtered")]
    values = [np.array([float(value) for value in state]) for state in states]
    weights = [np.array(list(state.values()), float) for state in states]
    there = np.concatenate(values)
    if not len(there):
        axes.text(0.5, 0.5, "nothing to count", transform=axes.transAxes, ha="center", color=GREY)
        return
    low, high = there.min(), there.max()
    if logarithmic:
        edges = np.geomspace(low / 1.1, high * 1.1, 31)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=12))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        edges = np.arange(low - 0.5, high + 1) if high - low < 60 else np.linspace(low, high, 41)
    look: dict[str, Any] = {"color": COLOURS[:2], "label": ["used", "filtered"], "edgecolor": "white", "linewidth": 0.4}
    axes.hist(values, bins=edges.tolist(), weights=weights, stacked=True, **look)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def losses(preflight: Row) -> Picture:
    """What share of the scanned pictures each filter and each reason of quarantine takes.

    Args:
        preflight: content of `preflight.json`.
    """
    bars = [("used", preflight["used"], COLOURS[0])]
    bars += [(f"filter: {name}", count, COLOURS[1]) for name, count in preflight["filtered"].items()]
    bars += [(f"quarantine: {name}", count, COLOURS[3]) for name, count in preflight["quarantined"].items()]
    figure = _figure(9, 1.5 + 0.32 * len(bars), f"What became of {preflight['scanned']:,} pictures")
    axes = figure.subplots()
    names, shares = [plain(name, 40) for name, _, _ in bars], [100 * count / max(1, preflight["scanned"]) for _, count, _ in bars]
    drawn = axes.barh(range(len(bars)), shares, color=[colour for _, _, colour in bars])
    axes.bar_label(drawn, [f"{count:,} ({share:.1f} %)" for (_, count, _), share in zip(bars, shares, strict=True)], padding=3, fontsize=9)
    axes.set_yticks(range(len(bars)), names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 118)
    _label_axes(axes, "", "share of scanned pictures, %", "")
    return figure


def image_grid(images: np.ndarray, row_labels: Sequence[object], column_labels: Sequence[object], title: str = "") -> Picture:
    """A labelled grid of pictures, small ones enlarged without smoothing.

    Args:
        images: uint8 (R, C, 3, H, W).
        row_labels: R texts, shown left of the rows in up to five lines.
        column_labels: C texts, shown above the columns.
        title: of the whole.

    Raises:
        ValueError: the array has another shape or type, or the labels do not fit it.
    """
    _check_images(images, dims=5)
    rows, columns, _, height, width = images.shape
    if (len(row_labels), len(column_labels)) != (rows, columns):
        raise ValueError(f"{len(row_labels)} row and {len(column_labels)} column labels do not fit a grid of {rows} x {columns} pictures")
    cell = max(0.7, min(1.5, 11 / columns))
    gap, tall = max(1, width // 16), cell * height / width
    figure = _figure(columns * cell + 2.5, rows * tall + 0.9, title)
    axes = figure.subplots()
    axes.imshow(_mosaic(images, gap), interpolation="nearest")
    axes.set_axis_off()
    for column, label in enumerate(column_labels):
        axes.text(column * (width + gap) + width / 2, -gap, plain(label, 16), ha="center", va="bottom", fontsize=10, parse_math=False)
    for row, label in enumerate(row_labels):
        wrapped = textwrap.fill(plain(label, 120), 18, max_lines=5, placeholder="\u2026")
        axes.text(-2 * gap, row * (height + gap) + height / 2, wrapped, ha="right", va="center", fontsize=9, parse_math=False)
    return figure


def trajectory(followed: Trajectory, title: str = "", *, columns: int = 10) -> Picture:
    """One image on its way, from left to right: the picture that is seen with and without the prompt, and how far guidance moves it.

    Args:
        followed: of `trajectory.follow`.
        title: of the whole.
        columns: steps shown, evenly spread, the first and the last among them.
    """
    shown = np.linspace(0, len(followed.at) - 1, min(columns, len(followed.at))).round().astype(int)
    height, width = followed.guided.shape[-2:]
    moved = followed.direction[shown] / max(float(followed.direction.max()), 1e-12)
    moved = moved.repeat(height // moved.shape[1], axis=1).repeat(width // moved.shape[2], axis=2)
    grey = np.repeat((moved[:, None] * 255).astype(np.uint8), 3, axis=1)
    rows = ["seen with the prompt, guided", "seen without the prompt", "how far guidance moves the latents (white: farthest)"]
    labels = [f"\u03c3 {followed.at[one].sigma:.2g}" for one in shown]
    return image_grid(np.stack([followed.guided[shown], followed.unguided[shown], grey]), rows, labels, title)


def contact_sheet(images: np.ndarray, captions: Sequence[object], title: str = "", *, columns: int = 8) -> Picture:
    """Pictures in reading order, each with the start of its caption below, small ones enlarged without smoothing.

    Args:
        images: uint8 (N, 3, H, W).
        captions: N texts of any length and content.
        title: of the whole.
        columns: pictures a row.

    Raises:
        ValueError: the array has another shape or type, or the numbers of pictures and captions differ.
    """
    _check_images(images, dims=4)
    if len(captions) != len(images):
        raise ValueError(f"{len(captions)} captions for {len(images)} pictures")
    columns = max(1, min(columns, len(images)))
    rows = max(1, math.ceil(len(images) / columns))
    height, width = images.shape[-2:]
    cell = max(1.35, min(2.2, 11 / columns))
    figure = _figure(columns * cell, rows * (cell * height / width + 0.5) + 0.35, title)
    cells = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in cells:
        axes.set_axis_off()
    if not len(images):
        cells[0].text(0.5, 0.5, "no pictures", transform=cells[0].transAxes, ha="center", color=GREY)
    for axes, image, caption in zip(cells, images, captions, strict=False):
        axes.imshow(image.transpose(1, 2, 0), interpolation="nearest")
        axes.set_anchor("N")
        per_line = int(cell * 12.5)
        text = textwrap.fill(plain(caption, 4 * per_line), per_line, max_lines=3, placeholder="\u2026")
        axes.text(0.5, -0.04, text, transform=axes.transAxes, ha="center", va="top", fontsize=7.5, parse_math=False)
    return figure


def _check_images(images: np.ndarray, *, dims: int) -> None:
    if images.dtype != np.uint8 or images.ndim != dims or images.shape[-3] != 3:
        wanted = "(R, C, 3, H, W)" if dims == 5 else "(N, 3, H, W)"
        raise ValueError(f"images are {images.dtype} {images.shape}; a picture wants uint8 {wanted}")


def _mosaic(images: np.ndarray, gap: int) -> np.ndarray:
    padded = np.pad(images.transpose(0, 1, 3, 4, 2), ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=255)
    rows, columns, height, width, _ = padded.shape
    return padded.transpose(0, 2, 1, 3, 4).reshape(rows * height, columns * width, 3)[: rows * height - gap, : columns * width - gap]
