"""Questions about a captured graph. Analyses return facts and never edit it."""
