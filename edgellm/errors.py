"""Errors that a user can act on.

Every message is one sentence (or two: what is wrong, then what to do) and names the file, the field
or the flag. The command line prints it as it is and ends with exit code 2; the server maps it to a
4xx answer. They are ValueErrors so that library users need not know this module.
"""


class EdgeLLMError(ValueError):
    """Something outside this program is wrong: a file, an argument, a missing download."""
