"""The FID-CLIP study of the built-in family: how near to real pictures and how true to its prompts a model draws, by guidance scale.

The prompts are captions of scenes, the judge is the built-in one, and the exact reader of scenes says which pictures are strictly right.
Its Frechet distance is never called FID: that name belongs to the 2015 Inception.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from sdlab import features, grids, launch, measure, parts, runs, scenes, statistics, stored
from sdlab.config import ConfigError, resolve_path
from sdlab.measure import EvaluateConfig

PROMPT_SEED, HELD_OUT_SEED, REFERENCE_SEED = 1_000_001, 2_000_002, 3_000_003
"""Seeds of scenes that no training set uses: of the prompts, of those kept for the best scale, and of the reference pictures."""
MIN_REFERENCE = 1024
"""Reference pictures at least."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Yardstick:
    """What every picture of one study is measured with: the judge, the reference, and the prompts."""

    judge: features.Judge
    reference: statistics.Reference
    resolution: int
    asked: measure.Asked
    shared: dict[str, Any]
    """What is part of an identity whatever the prompts."""

    @property
    def identity(self) -> dict[str, Any]:
        """What has to be equal for two numbers to be compared."""
        asked = self.asked
        told = {"prompts": f"captions of {len(asked.drawn)} scenes, seed {asked.seed}", "prompts_digest": asked.digest}
        return {**self.shared, **told, "noise_seed": asked.noise_seed}


@dataclass(frozen=True)
class _Measured:
    """A row, and the arrays behind it."""

    row: Row
    influence: np.ndarray
    clip_scores: np.ndarray


def evaluate(cfg: EvaluateConfig) -> dict[str, Any]:
    """Draw the same prompts from the same noise with each model at each guidance scale, measure, and write `results.json`.

    Ranks share the work by shards of prompts. Finished shards are kept in `study_dir/shards` and taken as they are when all that they
    depend on is equal, so a killed study goes on where it was. The scale with the most strictly right pictures then draws as many held-out
    prompts.

    Args:
        cfg: what is measured.

    Returns:
        The content of `results.json`: `schema`, `study`, `created`, `machine`, `identity` (what all rows share), `rows` (a model at a scale
        each), `references` (real pictures and VAE reconstructions, measured alike), `held_out` (the best scale on other prompts), `notes`.

    Raises:
        ConfigError: a model is not there, models draw at different resolutions, or a value that cannot be used, before anything is drawn.
    """
    folder, found, judge = resolve_path(cfg.study_dir), measure.find(cfg), features.load_judge(launch.device())
    yardstick = _yardstick(cfg, judge, found[0].resolution)
    points = [measure.point(cfg, one, scale, yardstick.asked, judge) for one in found for scale in cfg.guidance_scales]
    measure.run(cfg, points, yardstick.asked, judge)
    measured = [_row(point, yardstick, folder) for point in points]
    rows = _with_differences(measured)
    chosen = points[rows.index(best(rows))]  # type: ignore[arg-type]
    held_out = replace(yardstick, asked=measure.Asked.of(cfg.num_images, seed=HELD_OUT_SEED + cfg.seed))
    other = measure.point(cfg, chosen.found, chosen.guidance_scale, held_out.asked, judge)
    measure.run(cfg, [other], held_out.asked, judge, title="evaluate held-out prompts")
    results = {
        "schema": 1,
        "study": "fid_clip",
        "created": runs.now(),
        "machine": launch.machine(),
        "identity": yardstick.identity,
        "rows": rows,
        "references": _references(found, yardstick),
        "held_out": _row(other, held_out, folder).row,
        "notes": _notes(cfg, judge),
    }
    runs.write_json(folder / "results.json", results)
    return results


def _yardstick(cfg: EvaluateConfig, judge: features.Judge, resolution: int) -> Yardstick:
    count = max(MIN_REFERENCE, cfg.num_images)
    pictures = at_resolution(scenes.render(scenes.draw(count, seed=REFERENCE_SEED)), resolution)
    shared = {
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
    return Yardstick(judge, reference, resolution, measure.Asked.of(cfg.num_images, seed=PROMPT_SEED + cfg.seed), shared)


def at_resolution(images: np.ndarray, resolution: int) -> np.ndarray:
    """`images` (B, 3, H, W) uint8 brought to `resolution` pixels a side, bicubic with antialiasing; untouched if they have it."""
    if images.shape[-1] == resolution:
        return images
    resized = F.interpolate(torch.from_numpy(images).float(), (resolution, resolution), mode="bicubic", antialias=True)
    return resized.clamp(0, 255).round().byte().numpy()


def _row(point: measure.Point, yardstick: Yardstick, folder: Path) -> _Measured:
    """The row of a point, from its shards; its first pictures are laid out in `study_dir/scales`."""
    arrays, found = point.collect(yardstick.asked), point.found
    pictures, stem = arrays.pop("pictures"), f"scales/{point.folder.name}"
    row = {"model": found.name, "weights": found.weights, "step": found.step, "weights_hash": found.weights_hash}
    row |= {"guidance_scale": point.guidance_scale, **_scores(arrays, yardstick), "contact_sheet": f"{stem}.png"}
    row |= {"solver": point.how.solver, "num_inference_steps": point.how.num_inference_steps}
    row |= {"unet_evaluations": point.how.work(point.guidance_scale).evaluations}
    (folder / "scales").mkdir(parents=True, exist_ok=True)
    grids.tile(pictures, columns=8).save(folder / f"{stem}.png")
    measure.save(folder / f"{stem}.npz", pictures=pictures, prompts=np.array(yardstick.asked.prompts[: len(pictures)]))
    return _Measured(row, statistics.frechet_influence(arrays["features"], yardstick.reference), arrays["clip_scores"])


def _with_differences(measured: Sequence[_Measured]) -> list[Row]:
    """Rows with their distance to the best point of the same model on each axis, and the standard errors of these differences.

    All scales share prompts and noise, so a difference is much surer than its two ends: its error is taken picture by picture.
    """
    completed = []
    for one in measured:
        same = [other for other in measured if other.row["model"] == one.row["model"]]
        lowest = min(same, key=lambda other: other.row["frechet_distance"])
        highest = max(same, key=lambda other: other.row["clip_score"])
        differences = {
            "frechet_above_lowest": one.row["frechet_distance"] - lowest.row["frechet_distance"],
            "frechet_above_lowest_se": statistics.difference(one.influence, lowest.influence),
            "clip_below_highest": highest.row["clip_score"] - one.row["clip_score"],
            "clip_below_highest_se": statistics.standard_error(one.clip_scores - highest.clip_scores),
        }
        completed.append({**one.row, **differences})
    return completed


def _scores(arrays: Mapping[str, np.ndarray], yardstick: Yardstick) -> Row:
    """What is told of pictures that were measured, see `measure.look`."""
    image_features, cosines, reference = arrays["features"], arrays["clip_scores"], yardstick.reference
    distance = statistics.frechet_distance(statistics.Statistics.of(image_features), reference)
    influence = statistics.frechet_influence(image_features, reference)
    low, high = statistics.bootstrap(influence)
    return {
        "frechet_distance": distance,
        "frechet_low": max(0.0, distance + low),
        "frechet_high": distance + high,
        "frechet_se": statistics.standard_error(influence),
        "clip_score": float(cosines.mean(dtype=np.float64)),
        "clip_score_se": statistics.standard_error(cosines),
        **_shares(arrays),
        "num_images": len(cosines),
        "extractor": yardstick.judge.name,
        "identity": yardstick.identity,
        "identity_hash": identity_hash(yardstick.identity),
    }


def _shares(checks: Mapping[str, np.ndarray]) -> Row:
    """Shares that the reader finds right, with counts; None where nothing can be read or no such prompt was asked."""
    names = ("background_right", "strict_one", "strict_two", "num_one_object", "num_two_objects")
    if "strict" not in checks:
        return dict.fromkeys(names)
    two, strict = checks["two"], checks["strict"]
    shares = [float(right.mean()) if len(right) else None for right in (checks["background"], strict[~two], strict[two])]
    return dict(zip(names, [*shares, int((~two).sum()), int(two.sum())], strict=True))


def _references(found: Sequence[stored.Stored], yardstick: Yardstick) -> list[Row]:
    """The prompts' own scenes as rendered, and as each VAE among the models gives them back."""
    real = at_resolution(scenes.render(yardstick.asked.drawn), yardstick.resolution)
    rows = [{"kind": "real", "label": "real pictures", **_looked_at(real, yardstick)}]
    for networks in {one.frozen_hashes["vae"]: one.networks for one in found}.values():
        frozen = parts.load_frozen(networks)
        told = {"kind": "vae", "label": "VAE reconstructions", "vae_hash": frozen.hashes["vae"]}
        rows.append({**told, **_looked_at(reconstruct(frozen, real), yardstick)})
    return rows


def _looked_at(images: np.ndarray, yardstick: Yardstick) -> Row:
    prompts = yardstick.asked.prompts
    return _scores(measure.look(images, prompts, yardstick.judge.text_features(prompts), yardstick.judge), yardstick)


def reconstruct(frozen: parts.Frozen, images: np.ndarray) -> np.ndarray:
    """`images` encoded to the VAE's mean and decoded again, in batches of 64."""
    batches = torch.from_numpy(images).split(64)
    means = (frozen.encode_moments(parts.to_pixel_values(batch)).chunk(2, dim=1)[0] for batch in batches)
    return np.concatenate([frozen.decode(mean * frozen.scaling_factor).numpy() for mean in means])


def pictures(study_dir: str | Path, rows: Sequence[Mapping[str, Any]], *, count: int = 4) -> tuple[np.ndarray, list[str]]:
    """The first pictures behind rows of a study, a line a prompt and a column a row, and their prompts.

    Args:
        study_dir: folder of the study.
        rows: that were drawn for the same prompts.
        count: prompts; at most `measure.SHOWN` are kept.

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
    return runs.digest(identity)


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
