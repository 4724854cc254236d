"""`gradsync probe`: the command, and how its findings are told."""
