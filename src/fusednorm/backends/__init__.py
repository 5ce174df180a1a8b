"""The ways to run a problem; no backend imports another."""
