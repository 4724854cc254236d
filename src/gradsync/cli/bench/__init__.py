"""What `gradsync bench` measures and how: arms that add the same numbers in turn, and what came of it."""
