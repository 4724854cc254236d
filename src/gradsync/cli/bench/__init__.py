"""The measurements of `gradsync bench`: arms that add the same numbers in turn, and what came of it."""
