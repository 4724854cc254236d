"""The command line: one file per command, `entry` in front of them."""
