"""Moves bytes, in one order, with a bound on every wait."""
