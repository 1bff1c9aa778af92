"""What all tests have in common."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine takes its time: how long an example takes says nothing of whether it is right.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
