"""Parts of `gradsync plan`: the question, its answer, and how both are told."""
