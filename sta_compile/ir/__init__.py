"""Frozen values that the stages exchange: token grids, tilings, windows, specs. No torch in here."""
