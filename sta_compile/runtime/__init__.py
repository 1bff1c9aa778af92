"""Devices and launches: from a KernelSpec to a running kernel."""
