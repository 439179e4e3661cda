"""Measures `bidmatch serve` under load, beside its own ceiling and beside other services."""
