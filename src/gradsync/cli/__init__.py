"""The command line: a folder per command, `main` in front of them."""
