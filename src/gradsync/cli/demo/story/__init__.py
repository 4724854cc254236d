"""What `gradsync demo` tells: a text, a model, arms that train it, what came of it."""
