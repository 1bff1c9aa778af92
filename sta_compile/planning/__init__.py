"""Decisions as pure functions of grids and requests: no graph, no device, the same on every machine."""
