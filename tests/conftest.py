"""Session-wide settings: one torch thread (two are far slower here), hypothesis profiles."""

import os

from hypothesis import HealthCheck, settings

# Before anything imports torch, and without importing it: the core's tests pass without it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
