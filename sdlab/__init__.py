"""sdlab: train Stable Diffusion in stages, look at what it draws, and measure it."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
