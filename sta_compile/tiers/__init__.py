"""Precision tiers of attention as arithmetic: formats, operands, and what a tiered kernel computes, in PyTorch."""
