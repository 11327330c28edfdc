"""Small tables and sentences that notebooks show: HTML where it can be seen, plain text elsewhere, every cell escaped."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdlab import album, costs, evaluate, presets, stages
from sdlab.config import Preset, TrainConfig, near_path

Row = Mapping[str, Any]
MISSING = "\u2013"


@dataclass(frozen=True)
class Table:
    """Cells by row, shown as `shown` does; numbers stand right, text left."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    marked: frozenset[int] = frozenset()
    """Rows in bold (in text: with a star)."""

    def _repr_html_(self) -> str:
        head = "".join(_cell("th", name) for name in self.columns)
        body = "".join(self._line(index, row) for index, row in enumerate(self.rows))
        return f'<table style="font-size:90%"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

    def _line(self, index: int, row: Sequence[Any]) -> str:
        style = ' style="font-weight:bold"' if index in self.marked else ""
        return f"<tr{style}>{''.join(_cell('td', value) for value in row)}</tr>"

    def __repr__(self) -> str:
        lines = [self.columns, *(tuple(" ".join(shown(value).split()) for value in row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        left = [not all(_is_number(row[column]) for row in self.rows) for column in range(len(self.columns))]
        marks = ["  ", *("* " if index in self.marked else "  " for index in range(len(self.rows)))]
        return "\n".join(mark + _padded(line, widths, left) for mark, line in zip(marks, lines, strict=True))


def shown(value: Any) -> str:
    """A value as people read it: a dash for None, thousands apart, four significant digits."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def percent(share: float | None) -> str:
    """A share in [0, 1] in percent with one decimal; a dash for None."""
    return MISSING if share is None else f"{100 * share:.1f} %"


def _is_number(value: Any) -> bool:
    """Whether a value stands right: no letters, as in 3, "12.5 %" and a dash."""
    text = shown(value)
    return bool(text) and not any(letter.isalpha() for letter in text)


def _cell(tag: str, value: Any) -> str:
    return f'<{tag} style="text-align:{"right" if _is_number(value) else "left"}">{html.escape(shown(value))}</{tag}>'


def _padded(line: Sequence[str], widths: Sequence[int], left: Sequence[bool]) -> str:
    cells = (cell.ljust(width) if to_left else cell.rjust(width) for cell, width, to_left in zip(line, widths, left, strict=True))
    return "  ".join(cells).rstrip()


def preflight_table(preflight: Row) -> Table:
    """What became of every picture that was looked at, and of the captions.

    Args:
        preflight: content of `preflight.json`.
    """
    scanned = preflight["scanned"]
    parts = [("used", "", preflight["used"])]
    parts += [(kind, reason, count) for kind in ("filtered", "quarantined") for reason, count in sorted(preflight[kind].items())]
    parts += [("captions", state, count) for state, count in preflight["captions"].items()]
    rows = [(what, why, count, percent(count / scanned) if scanned else MISSING) for what, why, count in parts]
    return Table(("pictures", "why", "count", "share of scanned"), (("scanned", "", scanned, ""), *rows))


def shards_table(shards: Sequence[Row], n: int = 12) -> Table:
    """What listing has counted, shard by shard, and over all of them.

    Args:
        shards: rows of `index/shards.jsonl`.
        n: shards that are shown: those with the most to tell.
    """
    counted = ("pictures", "captions", "pictures_without_caption", "captions_without_picture", "duplicates", "unreadable")
    odd = sorted(range(len(shards)), key=lambda row: (-sum(shards[row][name] for name in counted[2:]), row))[:n]
    rows = [(shards[row]["shard"], *(shards[row][name] for name in counted), _ignored(shards[row])) for row in sorted(odd)]
    more = [(f"and {len(shards) - n:,} more", *([""] * 7))] if len(shards) > n else []
    total = (f"all {len(shards):,}", *(sum(shard[name] for shard in shards) for name in counted), "")
    return Table(
        ("shard", *(name.replace("_", " ") for name in counted), "passed over"), (*rows, *more, total), frozenset({len(rows) + len(more)})
    )


def _ignored(shard: Row) -> str:
    kinds = [f"{count:,} {kind}" for kind, count in shard["ignored"].items()]
    return ", ".join(kinds[:4]) + (" ..." if len(kinds) > 4 else "")


NOTES = {
    "caption_cp1252": "captions in neither UTF-8 nor UTF-16, read as Windows-1252",
    "caption_nul": "captions with NULs, which became spaces",
    "caption_line_breaks": "captions of several lines, which became one",
    "caption_from_folder": "captions taken from the name of an N_concept folder",
    "exif_turned": "pictures turned upright by their EXIF orientation",
    "transparency_flattened": "transparent pictures laid on the background",
    "icc_converted": "pictures converted to sRGB by their colour profile",
    "icc_broken": "pictures with a colour profile that cannot be used, taken for sRGB",
    "cmyk_converted": "CMYK pictures",
    "depth_reduced": "pictures of 16 bits or floats, scaled to 8 bits",
    "wrong_extension": "pictures of another format than their suffix says",
    "same_bytes_as_another": "used pictures with the same bytes as another one",
}


def notes_table(preflight: Row) -> Table:
    """What was done to pictures and captions to make them plain, and what else a person should know of them.

    Args:
        preflight: content of `preflight.json`.
    """
    examples = preflight["examples"]
    rows = ((NOTES.get(name, name), count, ", ".join(examples.get(name, []))) for name, count in preflight["notes"].items())
    return Table(("note", "count", "for example"), tuple(rows))


def bucket_table(manifest: Row) -> Table:
    """What of each bucket is used, enlarged, cut away on average, dropped, and shown twice an epoch to fill its last micro-batch.

    Args:
        manifest: content of `manifest.json`; its preset's stages say how large micro-batches are.
    """
    stages = {stage.resolution: stage for stage in presets.get(manifest["config"]["preset"]).stages.values()}
    rows = []
    for resolution, entry in manifest["resolutions"].items():
        micro = stages[int(resolution)].micro_batch_size if int(resolution) in stages else None
        several = len(entry["buckets"]) > 1
        for one in entry["buckets"]:
            filled = (-one["count"] % micro if several else 0) if micro else None
            name = f"{resolution}: {one['height']} x {one['width']}"
            rows.append((name, one["pictures"], one["count"], one["upscaled"], percent(one["cut_away"]), 0, micro, filled))
    columns = ("resolution: height x width", "pictures", "rows", "enlarged", "area cut away", "dropped", "micro-batch", "filled an epoch")
    return Table(columns, tuple(rows))


def estimate_table(estimate: stages.Estimate) -> Table:
    """What a stage takes before it runs: parameters, work, and time on devices whose speed is known."""
    parameters = ", ".join(f"{name} {count:,}" for name, count in estimate.parameters.items())
    flops, ranks = estimate.forward_flops, f"{estimate.world_size:,} device{'s' if estimate.world_size > 1 else ''}"
    rows: list[tuple[str, Any, str]] = [
        ("recipe", estimate.label, ""),
        ("parameters", parameters, ""),
        ("steps", f"{estimate.steps:,}", f"optimizer steps, {_rounded(estimate.samples)} samples"),
        ("work", f"{flops / 1e9:,.4g}", "GFLOP a forward of the UNet for one sample; training takes three times as much"),
    ]
    for device, (rate, cost) in estimate.costs.items():
        time = f"{_time(cost.days)}, {shown(cost.device_hours)} device-hours"
        price = "" if cost.money is None else f", {shown(cost.money)} at the given price"
        rows.append((f"{ranks}, {device}", f"{shown(rate)} samples/s", time + price))
    return Table(("what", "value", ""), tuple(rows))


def _time(days: float) -> str:
    """A duration in the largest unit of which it is at least one."""
    for unit, each in (("days", 1.0), ("hours", 24.0), ("minutes", 1440.0)):
        if days * each >= 1:
            return f"{shown(days * each)} {unit}"
    return f"{shown(days * 86400)} seconds"


def memory_table(estimate: stages.Estimate) -> Table:
    """Memory that a stage takes on each device, in GB: as it was asked for, and other ways that take less.

    With gradient checkpointing activations are computed again in the backward pass; fsdp shards weights, gradients and moments.
    """
    names = tuple(field.name for field in dataclasses.fields(costs.Memory))
    rows = [
        (option.name, *(getattr(option.memory, name) / 1e9 for name in names), option.memory.total / 1e9) for option in estimate.options
    ]
    return Table(("GB a device", *names, "total"), tuple(rows))


def run_table(config: TrainConfig, plan: stages.Plan) -> Table:
    """What a run is about to do and to take, field by field with units; fields that were overridden are marked."""
    recipe = config.recipe
    ranks = f"{config.devices} on each of {config.num_nodes} nodes" if config.num_nodes > 1 else f"{config.devices}"
    rows: list[tuple[str, Any, str]] = [
        ("recipe", presets.label(config.preset, config.stage, config.overrides), ""),
        ("parameters", f"{plan.parameters:,}", "of the UNet"),
        ("resolution", recipe.resolution, "pixels a side"),
        ("run_dir", plan.run_dir, f"goes on from step {plan.step:,}" if plan.step else "starts at step 1"),
        ("starts from", config.init_from or "random weights", f"SHA-256 {config.parent_hash[:12]}" if config.parent_hash else ""),
        ("data_dir", config.data_dir, f"content key {config.data_key[:12]}"),
        ("val_data_dir", config.val_data_dir or "no validation", f"every {config.val_every} steps" if config.val_every else ""),
        ("max_steps", f"{config.max_steps:,}", "optimizer steps"),
        ("samples in all", f"{plan.samples:,}", f"samples, {plan.epochs:,.2f} epochs"),
        ("global_batch_size", recipe.global_batch_size, "samples an optimizer step"),
        ("ranks", ranks, f"strategy {config.strategy}" if config.world_size > 1 else "process"),
        ("micro_batch_size", config.micro_batch_size, "samples a rank a forward"),
        ("accumulation_steps", config.accumulation_steps, "forwards a rank an optimizer step"),
        ("learning_rate", recipe.learning_rate, f"{recipe.lr_schedule} after {recipe.warmup_steps} steps of warm-up"),
        ("schedule_steps", recipe.schedule_steps, "optimizer steps"),
        ("precision", recipe.precision, ""),
        ("prediction_type", config.networks.prediction_type, ""),
        ("caption_drop_prob", recipe.caption_drop_prob, "share of captions"),
        ("noise_offset", recipe.noise_offset, "standard deviation a channel"),
        ("min_snr_gamma", recipe.min_snr_gamma, ""),
        ("ema_decay", recipe.ema_decay, "a step"),
        ("seed", config.seed, ""),
        ("memory", f"{plan.memory.total / 1e9:.2f}", f"GB a rank, of {plan.available_bytes / 1e9:.1f}; by estimate"),
        ("gradient_checkpointing", config.gradient_checkpointing, ""),
        ("disk", f"{plan.disk_bytes / 1e9:.2f}", "GB at most for checkpoints and pipeline"),
    ]
    marked = frozenset(index for index, (name, _, _) in enumerate(rows) if name in config.overrides)
    return Table(("setting", "value", "unit"), tuple(rows), marked)


def work_table(grid: album.Grid) -> Table:
    """What the pictures of each column of a grid take of the UNet, on average."""
    columns = list(zip(*grid.work, strict=True))
    rows = [
        (label, *(sum(getattr(one, name) for one in column) / len(column) for name in ("evaluations", "rows")))
        for label, column in zip(grid.column_labels, columns, strict=True)
    ]
    return Table(("pictures", "UNet evaluations", "UNet rows"), tuple(rows))


def reader_table(verdicts: Sequence[Row]) -> Table:
    """What the exact reader says of a grid of pictures: a row a prompt, a column a guidance scale.

    Args:
        verdicts: of `grids.read_grid`: rows with equal names.
    """
    columns = tuple(verdicts[0]) if verdicts else ("nothing to read: the reader knows captions of scenes at 64 pixels",)
    return Table(columns, tuple(tuple(verdict[name] for name in columns) for verdict in verdicts))


def fid_clip_table(rows: Sequence[Row], references: Sequence[Row] = ()) -> Table:
    """The numbers behind the curve; the best row is marked, references come last.

    Args:
        rows: of `evaluate`, all measured alike.
        references: likewise.

    Raises:
        ConfigError: no rows, or rows measured in different ways.
    """
    evaluate.refuse_mixed([*rows, *references])
    extractor, best = rows[0]["extractor"] if rows else "", evaluate.best(rows)
    columns = (
        *("pictures of", "guidance scale", f"Frechet distance ({extractor})", "95 % interval", "CLIP score (mean cosine)"),
        *("standard error", "one object right", "two objects right", "background right", "UNet evaluations a picture"),
    )
    marked = frozenset(index for index, row in enumerate(rows) if row is best)
    return Table(columns, tuple(_measured(row) for row in (*rows, *references)), marked)


def _measured(row: Row) -> tuple[Any, ...]:
    who = row["label"] if "label" in row else _curve_name(row)
    return (
        *(who, row.get("guidance_scale"), f"{row['frechet_distance']:.4f}", f"{row['frechet_low']:.4f} to {row['frechet_high']:.4f}"),
        *(f"{row['clip_score']:.4f}", f"{row['clip_score_se']:.4f}"),
        *(percent(row[name]) for name in ("strict_one", "strict_two", "background_right")),
        row.get("unet_evaluations"),
    )


def _curve_name(row: Row) -> str:
    return f"{near_path(row['model'])} ({row['weights']}, step {row['step']})"


def describe_curve(rows: Sequence[Row]) -> str:
    """What the curve of each model does, in sentences made from its numbers.

    A difference to the best point counts as clear when it is more than two of its standard errors, taken picture by picture.

    Args:
        rows: of `evaluate`, all measured alike.
    """
    curves: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["guidance_scale"]):
        curves.setdefault(_curve_name(row), []).append(row)
    return " ".join(_describe(name, curve) for name, curve in curves.items())


def _describe(name: str, curve: Sequence[Row]) -> str:
    nearest = min(curve, key=lambda row: row["frechet_distance"])
    truest = max(curve, key=lambda row: row["clip_score"])
    text = f"{name}: the Frechet distance is lowest at guidance scale {nearest['guidance_scale']:g} ({nearest['frechet_distance']:.4f}), "
    text += f"the CLIP score highest at {truest['guidance_scale']:g} ({truest['clip_score']:.3f})."
    for end in dict.fromkeys((0, len(curve) - 1)):
        row, clauses = curve[end], []
        if row is not nearest:
            clauses.append(f"the distance is {row['frechet_distance']:.4f} ({_clearly(row, 'frechet_above_lowest', 'higher')})")
        if row is not truest:
            clauses.append(f"the CLIP score is {row['clip_score']:.3f} ({_clearly(row, 'clip_below_highest', 'lower')})")
        if clauses:
            text += f" At {row['guidance_scale']:g} {' and '.join(clauses)}."
    return text + _describe_strict(evaluate.best(curve))


def _describe_strict(best: Row) -> str:
    share = evaluate.strict_share(best)
    if share is None:
        return ""
    if share == 0:
        return " No picture is strictly right at any scale."
    return f" Most pictures are strictly right at {best['guidance_scale']:g} ({percent(share)} of all)."


def _clearly(row: Row, difference: str, direction: str) -> str:
    return f"clearly {direction}" if row[difference] > 2 * row[f"{difference}_se"] else "not clearly different"


def describe_held_out(held_out: Row) -> str:
    """How often the best guidance scale is right on prompts that did not choose it, with counts."""
    text = f"At guidance scale {held_out['guidance_scale']:g}, on {held_out['num_images']} other prompts: "
    asked = (("one-object", "strict_one", "num_one_object"), ("two-object", "strict_two", "num_two_objects"))
    parts = [
        f"{percent(held_out[share])} of {name} prompts strictly right ({round(held_out[share] * held_out[count])} of {held_out[count]})"
        for name, share, count in asked
        if held_out[share] is not None
    ]
    if held_out["background_right"] is None:
        return text + "pictures of this size cannot be read."
    return text + ", ".join([f"background right in {percent(held_out['background_right'])}", *parts]) + "."


def recipes_table(name: str) -> Table:
    """The stages of a preset, to be read against the pages and files that they were taken from.

    Args:
        name: a built-in preset or a YAML file.

    Raises:
        ConfigError: as `presets.get`.
    """
    preset = presets.get(name)
    columns = (
        *("stage", "starts from", "resolution", "pictures", "crop", "nodes x devices", "micro-batch", "global batch", "steps", "samples"),
        *("learning rate", "warm-up", "precision", "captions dropped", "EMA", "predicts", "besides"),
    )
    return Table(columns, tuple(_recipe(preset, stage_name) for stage_name in preset.stages))


def _recipe(preset: Preset, stage_name: str) -> tuple[Any, ...]:
    stage = preset.stages[stage_name]
    pictures = [*([f"{stage.min_resolution} pixels and more"] if stage.min_resolution else []), *stage.filters]
    ranks = f"{stage.published_nodes} x {stage.published_devices}" if stage.published_nodes else None
    dropped = percent(stage.caption_drop_prob) + (" of each" if stage.condition_drop == "each" else "")
    offset = [f"offset noise {stage.noise_offset}"] if stage.noise_offset else []
    low_rank = [f"LoRA of rank {stage.lora.rank}"] if stage.lora else []
    return (
        *(stage_name, stage.parent or "random weights", str(stage.resolution), ", ".join(pictures) or "all", stage.crop, ranks),
        *(stage.micro_batch_size, stage.global_batch_size, stage.schedule_steps, _rounded(stage.schedule_steps * stage.global_batch_size)),
        *(f"{stage.learning_rate:g}, {stage.lr_schedule}", stage.warmup_steps, stage.precision, dropped, stage.ema_decay),
        *(presets.networks(preset, stage_name).prediction_type, ", ".join([*offset, *low_rank])),
    )


def sources_table(name: str) -> Table:
    """Where the recipes of a preset come from, on what pictures they were published, and where sources disagree.

    Args:
        name: a built-in preset or a YAML file.

    Raises:
        ConfigError: as `presets.get`.
    """
    stages = presets.get(name).stages
    return Table(
        ("stage", "pictures", "source", "note"), tuple((name, stage.data, stage.source, stage.note) for name, stage in stages.items())
    )


def _rounded(number: int) -> str:
    """A number as pages print it: four digits and K, M or B."""
    for power, letter in ((9, "B"), (6, "M"), (3, "K")):
        if number >= 10**power:
            return f"{number / 10**power:.4g} {letter}"
    return str(number)
