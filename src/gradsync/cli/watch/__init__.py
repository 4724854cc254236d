"""The parts of `gradsync watch`."""
