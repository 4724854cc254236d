"""`gradsync doctor`: facts are gathered, shared between the ranks, judged by checks, and told."""
