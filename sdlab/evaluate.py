"""The FID-CLIP study of the built-in family: how near to real pictures and how true to its prompts a model draws, by guidance scale.

The prompts are captions of scenes, the judge is the built-in one, and the exact reader of scenes says which pictures are strictly right.
Its Frechet distance is never called FID: that name belongs to the 2015 Inception.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch.nn import functional as F

from sdlab import features, grids, launch, models, parts, runs, sample, scenes, solvers, statistics
from sdlab.config import ConfigError, Model, SamplePrecision, resolve_path

PROMPT_SEED, HELD_OUT_SEED, REFERENCE_SEED = 1_000_001, 2_000_002, 3_000_003
"""Seeds of scenes that no training set uses: of the prompts, of those kept for the best scale, and of the reference pictures."""
MIN_REFERENCE = 1024
"""Reference pictures at least."""
PART = 256
"""Pictures held in memory at a time, about."""
SHOWN = 16
"""Pictures of a guidance scale that are kept."""
Row = dict[str, Any]


class EvaluateConfig(Model):
    """What notebook 04 asks."""

    models: list[str] = Field(["tiny"], min_length=1)
    """Run folders, pipeline folders or "tiny": one curve each."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    checkpoint: int | Literal["latest"] = "latest"
    guidance_scales: list[float] = Field([1, 1.5, 2, 3, 4, 5, 6, 7, 8], min_length=1)
    num_images: int = Field(160, ge=2)
    """Prompts, and pictures a guidance scale."""
    solver: str = "dpmpp_2m"
    num_inference_steps: int = Field(10, ge=1)
    batch_size: int = Field(32, ge=1)
    precision: SamplePrecision = "32-true"
    """Number format of the UNet's forwards; judge, solver and VAE stay float32."""
    seed: int = Field(0, ge=0)
    """Of prompts and initial noise."""
    study_dir: str = "papermill_runs/out/studies/fid_clip"

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        for name in ("models", "guidance_scales"):
            twice = [value for value, count in Counter(getattr(self, name)).items() if count > 1]
            if twice:
                raise ValueError(f"{name} holds {twice[0]!r} more than once; give each once")
        wrong = [scale for scale in self.guidance_scales if not 0 <= scale < float("inf")]
        if wrong:
            raise ValueError(f"guidance_scales {wrong}: a scale is 0 or more (1 is off)")
        solvers.check(self.solver, self.num_inference_steps)
        return self


@dataclass(frozen=True)
class Yardstick:
    """What every picture of one study is measured with: prompts, their scenes, the judge and the reference."""

    judge: features.Judge
    drawn: list[scenes.Scene]
    resolution: int
    reference: statistics.Reference
    identity: dict[str, Any]

    @cached_property
    def prompts(self) -> list[str]:
        return [scene.caption for scene in self.drawn]

    @cached_property
    def text_features(self) -> np.ndarray:
        """Of the prompts, encoded once for all models and scales."""
        return self.judge.text_features(self.prompts)


def evaluate(cfg: EvaluateConfig) -> dict[str, Any]:
    """Draw the same prompts from the same noise with each model at each guidance scale, measure, and write `results.json`.

    Finished scales are kept in `study_dir/scales` and taken as they are when all that defines them is equal, so a killed study goes on
    where it was. The scale with the most strictly right pictures then draws as many held-out prompts.

    Args:
        cfg: what is measured.

    Returns:
        The content of `results.json`: `schema`, `study`, `created`, `machine`, `identity` (what all rows share), `rows` (a model at a scale
        each), `references` (real pictures and VAE reconstructions, measured alike), `held_out` (the best scale on other prompts), `notes`.

    Raises:
        ConfigError: a model is not there, or models draw at different resolutions.
    """
    folder = resolve_path(cfg.study_dir)
    loaded = [models.load(name, weights=cfg.weights, checkpoint=cfg.checkpoint) for name in cfg.models]
    resolution = _one_resolution(loaded)
    judge = features.load_judge(loaded[0].frozen.device)
    yardstick = _yardstick(cfg, judge, resolution)
    held_out = _ask(yardstick, HELD_OUT_SEED + cfg.seed)
    (folder / "scales").mkdir(parents=True, exist_ok=True)
    total = cfg.num_images * (len(loaded) * len(cfg.guidance_scales) + 1)
    with launch.progress(total=total, title="evaluate", unit=" pictures") as bar:
        rows = [_row(model, scale, yardstick, cfg, folder, bar.update) for model in loaded for scale in cfg.guidance_scales]
        chosen = best(rows)
        model = next(model for model in loaded if model.name == chosen["model"])
        checked = _row(model, chosen["guidance_scale"], held_out, cfg, folder, bar.update)
    results = {
        "schema": 1,
        "study": "fid_clip",
        "created": runs.now(),
        "machine": launch.machine(),
        "identity": yardstick.identity,
        "rows": _with_differences(rows, folder),
        "references": _references(loaded, yardstick),
        "held_out": checked,
        "notes": _notes(cfg, judge),
    }
    runs.write_json(folder / "results.json", results)
    return results


def _one_resolution(loaded: Sequence[models.TextToImage]) -> int:
    resolutions = {model.name: model.resolution for model in loaded}
    if len(set(resolutions.values())) > 1:
        raise ConfigError(f"models draw at different resolutions ({resolutions}), which no axis can share; evaluate each by itself")
    return loaded[0].resolution


def _yardstick(cfg: EvaluateConfig, judge: features.Judge, resolution: int) -> Yardstick:
    count = max(MIN_REFERENCE, cfg.num_images)
    pictures = at_resolution(scenes.render(scenes.draw(count, seed=REFERENCE_SEED)), resolution)
    identity = {
        "extractor": judge.name,
        "extractor_hash": judge.weights_hash,
        "features": "image embeddings of length 1",
        "pixel_path": judge.pixel_path(resolution),
        "num_images": cfg.num_images,
        "reference": f"{count} rendered scenes, seed {REFERENCE_SEED}",
        "reference_digest": hashlib.sha256(pictures.tobytes()).hexdigest(),
        "solver": cfg.solver,
        "num_inference_steps": cfg.num_inference_steps,
        "precision": cfg.precision,
    }
    reference = statistics.Reference.of(statistics.Statistics.of(judge.image_features(pictures)))
    return _ask(Yardstick(judge, [], resolution, reference, identity), PROMPT_SEED + cfg.seed)


def _ask(yardstick: Yardstick, seed: int) -> Yardstick:
    """The same yardstick with the prompts and the initial noise of a seed."""
    count = yardstick.identity["num_images"]
    drawn = scenes.draw(count, seed=seed)
    asked = {
        "prompts": f"captions of {count} scenes, seed {seed}",
        "prompts_digest": hashlib.sha256(json.dumps([scene.caption for scene in drawn]).encode()).hexdigest(),
        "noise_seed": seed * 1_000_000,
    }
    return replace(yardstick, drawn=drawn, identity={**yardstick.identity, **asked})


def at_resolution(images: np.ndarray, resolution: int) -> np.ndarray:
    """`images` (B, 3, H, W) uint8 brought to `resolution` pixels a side, bicubic with antialiasing; untouched if they have it."""
    if images.shape[-1] == resolution:
        return images
    resized = F.interpolate(torch.from_numpy(images).float(), (resolution, resolution), mode="bicubic", antialias=True)
    return resized.clamp(0, 255).round().byte().numpy()


def _row(
    model: models.TextToImage,
    guidance_scale: float,
    yardstick: Yardstick,
    cfg: EvaluateConfig,
    folder: Path,
    report: Callable[[int], object],
) -> Row:
    """The row of one model at one scale: kept from before if all that defines it is equal, else drawn and measured."""
    about = {
        "model": model.name,
        "weights": model.weights,
        "step": model.step,
        "weights_hash": model.weights_hash,
        "guidance_scale": guidance_scale,
    }
    defined = {**yardstick.identity, **about, "frozen": model.frozen.hashes, "batch_size": cfg.batch_size, "schema": 1}
    key = identity_hash({name: value for name, value in defined.items() if name != "model"})
    stem = folder / "scales" / f"guidance-{guidance_scale:g}-{key[:12]}"
    kept = _kept(stem.with_name(stem.name + ".json"), key)
    if kept is not None:
        report(cfg.num_images)
        return {**kept, "model": model.name}
    image_features, cosines, checks, drawn = _draw(model, guidance_scale, yardstick, cfg, report)
    row = {**about, **_scores(image_features, cosines, checks, yardstick), "contact_sheet": f"scales/{stem.name}.png"}
    row |= {"solver": cfg.solver, "num_inference_steps": cfg.num_inference_steps}
    row |= {"unet_evaluations": solvers.evaluations(cfg.solver, cfg.num_inference_steps)}
    grids.tile(drawn, columns=8).save(stem.with_name(stem.name + ".png"))
    arrays = {"features": image_features, "clip_scores": cosines, "pictures": drawn, "prompts": np.array(yardstick.prompts[: len(drawn)])}
    arrays["influence"] = statistics.frechet_influence(image_features, yardstick.reference)
    _save_arrays(stem.with_name(stem.name + ".npz"), **arrays, **checks)
    runs.write_json(stem.with_name(stem.name + ".json"), {"key": key, "row": row})
    return row


def _with_differences(rows: Sequence[Row], folder: Path) -> list[Row]:
    """Rows with their distance to the best point of the same model on each axis, and the standard errors of these differences.

    All scales share prompts and noise, so a difference is much surer than its two ends: its error is taken picture by picture.
    """
    stored = [np.load((folder / row["contact_sheet"]).with_suffix(".npz")) for row in rows]
    completed = []
    for row, arrays in zip(rows, stored, strict=True):
        same = [index for index, other in enumerate(rows) if other["model"] == row["model"]]
        lowest = min(same, key=lambda index: rows[index]["frechet_distance"])
        highest = max(same, key=lambda index: rows[index]["clip_score"])
        differences = {
            "frechet_above_lowest": row["frechet_distance"] - rows[lowest]["frechet_distance"],
            "frechet_above_lowest_se": _standard_error(arrays["influence"] - stored[lowest]["influence"]),
            "clip_below_highest": rows[highest]["clip_score"] - row["clip_score"],
            "clip_below_highest_se": _standard_error(arrays["clip_scores"] - stored[highest]["clip_scores"]),
        }
        completed.append({**row, **differences})
    return completed


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1, dtype=np.float64) / len(values) ** 0.5)


def _kept(path: Path, key: str) -> Row | None:
    """The row of a finished scale, if its key is equal and its arrays can be read."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        with np.load(path.with_suffix(".npz")) as arrays:
            whole = stored["key"] == key and arrays["influence"].size > 0 and arrays["pictures"].size > 0
        return dict(stored["row"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None


def _draw(
    model: models.TextToImage, guidance_scale: float, yardstick: Yardstick, cfg: EvaluateConfig, report: Callable[[int], object]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """Features, CLIP scores, the reader's verdicts and the first pictures; pictures are held for one part of the prompts at a time."""
    batch_size = min(cfg.batch_size, cfg.num_images)
    part = batch_size * max(1, PART // batch_size)
    parts = []
    for start in range(0, cfg.num_images, part):
        prompts = yardstick.prompts[start : start + part]
        first = yardstick.identity["noise_seed"] + start
        images = sample.sample(
            model,
            prompts,
            guidance_scale=guidance_scale,
            seeds=range(first, first + len(prompts)),
            solver=cfg.solver,
            num_inference_steps=cfg.num_inference_steps,
            batch_size=batch_size,
            precision=cfg.precision,
            report=report,
        )
        parts.append((*_look(images, slice(start, start + part), yardstick), images[:SHOWN] if start == 0 else images[:0]))
    image_features, cosines, checks, pictures = zip(*parts, strict=True)
    joined = {name: np.concatenate([check[name] for check in checks]) for name in checks[0]}
    return np.concatenate(image_features), np.concatenate(cosines), joined, np.concatenate(pictures)[:SHOWN]


def _look(images: np.ndarray, which: slice, yardstick: Yardstick) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Features (B, D), CLIP scores (B,) and the reader's verdicts (none at other sizes than its own) of the pictures of some prompts."""
    image_features = yardstick.judge.image_features(images)
    cosines = (image_features * yardstick.text_features[which]).sum(1)
    readable = yardstick.resolution == scenes.SIDE
    return image_features, cosines, scenes.check(images, yardstick.prompts[which]) if readable else {}


def _scores(image_features: np.ndarray, cosines: np.ndarray, checks: Mapping[str, np.ndarray], yardstick: Yardstick) -> Row:
    reference, count = yardstick.reference, len(cosines)
    distance = statistics.frechet_distance(statistics.Statistics.of(image_features), reference)
    influence = statistics.frechet_influence(image_features, reference)
    low, high = statistics.bootstrap(influence)
    return {
        "frechet_distance": distance,
        "frechet_low": max(0.0, distance + low),
        "frechet_high": distance + high,
        "frechet_se": _standard_error(influence),
        "clip_score": float(cosines.mean(dtype=np.float64)),
        "clip_score_se": _standard_error(cosines),
        **_shares(checks),
        "num_images": count,
        "extractor": yardstick.judge.name,
        "identity": yardstick.identity,
        "identity_hash": identity_hash(yardstick.identity),
    }


def _shares(checks: Mapping[str, np.ndarray]) -> Row:
    """Shares that the reader finds right, with counts; None where nothing can be read or no such prompt was asked."""
    names = ("background_right", "strict_one", "strict_two", "num_one_object", "num_two_objects")
    if not checks:
        return dict.fromkeys(names)
    two, strict = checks["two"], checks["strict"]
    shares = [float(right.mean()) if len(right) else None for right in (checks["background"], strict[~two], strict[two])]
    return dict(zip(names, [*shares, int((~two).sum()), int(two.sum())], strict=True))


def _references(loaded: Sequence[models.TextToImage], yardstick: Yardstick) -> list[Row]:
    """The prompts' own scenes as rendered, and as each VAE among the models gives them back."""
    real = at_resolution(scenes.render(yardstick.drawn), yardstick.resolution)
    every = slice(0, len(real))
    rows = [{"kind": "real", "label": "real pictures", **_scores(*_look(real, every, yardstick), yardstick)}]
    for frozen in {model.frozen.hashes["vae"]: model.frozen for model in loaded}.values():
        measured = _scores(*_look(reconstruct(frozen, real), every, yardstick), yardstick)
        rows.append({"kind": "vae", "label": "VAE reconstructions", "vae_hash": frozen.hashes["vae"], **measured})
    return rows


def reconstruct(frozen: parts.Frozen, images: np.ndarray) -> np.ndarray:
    """`images` encoded to the VAE's mean and decoded again, in batches of 64."""
    batches = torch.from_numpy(images).split(64)
    means = (frozen.encode_moments(parts.to_pixel_values(batch)).chunk(2, dim=1)[0] for batch in batches)
    return np.concatenate([frozen.decode(mean * frozen.scaling_factor).numpy() for mean in means])


def _save_arrays(path: Path, **arrays: np.ndarray) -> None:
    scratch = path.with_name(f".{os.getpid()}-{path.name}")
    np.savez(scratch, allow_pickle=False, **arrays)
    os.replace(scratch, path)


def pictures(study_dir: str | Path, rows: Sequence[Mapping[str, Any]], *, count: int = 4) -> tuple[np.ndarray, list[str]]:
    """The first pictures behind rows of a study, a line a prompt and a column a row, and their prompts.

    Args:
        study_dir: folder of the study.
        rows: that were drawn for the same prompts.
        count: prompts; at most `SHOWN` are kept.

    Returns:
        uint8 (count, len(rows), 3, H, W), and `count` prompts.
    """
    stored = [np.load(resolve_path(study_dir) / Path(row["contact_sheet"]).with_suffix(".npz")) for row in rows]
    prompts = [str(prompt) for prompt in stored[0]["prompts"][:count]]
    return np.stack([arrays["pictures"][:count] for arrays in stored], axis=1), prompts


def best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row with the largest share of strictly right pictures, of equals the one with the lowest Frechet distance.

    Where nothing could be read, the lowest Frechet distance decides alone.

    Raises:
        ConfigError: there are no rows.
    """
    if not rows:
        raise ConfigError("there are no rows to choose from; evaluate at least one guidance scale")
    return min(rows, key=lambda row: (-(strict_share(row) or 0), row["frechet_distance"]))


def strict_share(row: Mapping[str, Any]) -> float | None:
    """Share of all pictures of a row that are strictly right, in [0, 1]; None if they could not be read."""
    counts = [(row.get("strict_one"), row.get("num_one_object")), (row.get("strict_two"), row.get("num_two_objects"))]
    known = [(share, count) for share, count in counts if share is not None and count]
    return sum(share * count for share, count in known) / sum(count for _, count in known) if known else None


def identity_hash(identity: Mapping[str, Any]) -> str:
    """SHA-256 of an identity, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def explain(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields in which two identities (or the identities of two rows) differ, with both values; empty means comparable.

    What is measured (model, weights, step, guidance scale) is no part of an identity: only how it is measured.
    """
    first, second = a.get("identity", a), b.get("identity", b)
    names = dict.fromkeys([*first, *second])
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def refuse_mixed(rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows that were measured in different ways: they cannot share an axis.

    Raises:
        ConfigError: with each differing field and both values.
    """
    for row in rows[1:]:
        differing = explain(rows[0], row)
        if differing:
            listed = "; ".join(f"{name}: {a!r} and {b!r}" for name, (a, b) in differing.items())
            raise ConfigError(
                f"these rows were not measured alike and cannot share an axis ({listed}); show them apart or measure them alike"
            )


def _notes(cfg: EvaluateConfig, judge: features.Judge) -> list[str]:
    """What a reader of the numbers has to know, in sentences."""
    notes = []
    if cfg.num_images < judge.width:
        notes.append(
            f"Only {cfg.num_images} pictures a scale, fewer than the {judge.width} numbers of a feature: the Frechet distance is far above "
            "its value for many pictures. Compare it only at this very count, and use num_images=160 or more for figures to keep."
        )
    notes.append(
        "Prompts, noise and reference come from seeds that training never uses, but there are only 120 different captions of one object, "
        "so most of those also occur in training; their pictures do not repeat exactly."
    )
    return notes
