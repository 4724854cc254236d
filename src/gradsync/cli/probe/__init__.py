"""`gradsync probe`: how its ranks come to be, and how its findings are told."""
