"""Edits of a captured graph, and the check that an edited graph still computes the same shapes."""
