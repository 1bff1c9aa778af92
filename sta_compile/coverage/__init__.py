"""Every diffusers transformer with attention over video or image tokens, small and random, and what becomes of it.

`python -m sta_compile coverage` prints the table and writes docs/coverage.md and docs/coverage.json. A row of the zoo
(`zoo.py`, one file per family) says how to build a model and which of its attentions have to be replaced; `examine.py`
traces it and compares; `table.py` shows the results; `baseline.py` tells whether a row got worse.
"""
