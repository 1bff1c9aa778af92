"""Decisions as pure functions of grids and requests: no graph, no device, same on every machine."""
