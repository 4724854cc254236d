"""Parts of `gradsync report`: how findings are told to people and to machines."""
