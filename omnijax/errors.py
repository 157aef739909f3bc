"""The one kind of error a user can mend."""


class UserError(ValueError):
    """A mistake in a config, a table, a file or an argument.

    The message is one line: the thing, its value, what was allowed and the mend. Commands print it alone and exit
    with code 2; from Python it is an ordinary `ValueError`. Faults of ours are never raised as `UserError`.
    """
