"""The command line: one file per command, found by its name; files with a leading _ are shared."""
