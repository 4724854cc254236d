"""The story of `gradsync demo`: a text, a model, arms that train it, what came of it."""
