"""What all benchmarks share: rates in turns, and the file and lines in which they are told."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

CORES = len(os.sched_getaffinity(0))


def rate(count: float, work: Callable[[], Any]) -> float:
    """So many in the seconds that the work takes."""
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def in_turns(baseline: Callable[[], float], ours: Callable[[], float], repeats: int, unit: str) -> dict[str, Any]:
    """Medians of rates that are measured in turns, after a turn of each that does not count."""
    _, *turns = [(ours(), baseline()) for _ in range(repeats + 1)]
    our, base = (statistics.median(rates) for rates in zip(*turns, strict=True))
    ratios = [one / other for one, other in turns]
    spread = (max(ratios) - min(ratios)) / 2 / statistics.median(ratios)
    return {"ratio": our / base, "baseline": base, "ours": our, "unit": unit, "repeats": repeats, "spread": spread}


def parse(about: str) -> argparse.Namespace:
    """What the command line says: `out` and `quick`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    return parser.parse_args()


def tell(out: Path, headline: str, measured: dict[str, Any], *, sizes: dict[str, Any], notes: dict[str, str]) -> None:
    """Write what was measured, and print it."""
    model = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    machine = {"cpu": model, "cores": CORES, "load": os.getloadavg()[0]}
    machine |= {name: version(name) for name in ("torch", "numpy", "pillow", "pyarrow")}
    content = {"schema": 1, "headline": headline, "machine": machine, "sizes": sizes, "notes": notes, **measured}
    out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name, one in measured["ratios"].items():
        rates = f"{one['ours']:,.4g} against {one['baseline']:,.4g} {one['unit']}"
        print(f"{name:<24}{one['ratio']:>9.2f}  {rates}, {one['repeats']} repeats, ±{one['spread']:.0%}")
    for name, figure in measured["figures"].items():
        print(f"{name:<24}{figure:>9.3g}")
