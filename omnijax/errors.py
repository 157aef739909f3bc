"""The one kind of error a user can mend, and its form for a row of data."""


class UserError(ValueError):
    """A mistake in a config, a table, a file or an argument.

    The message is one line: the thing, its value, what was allowed and the mend. Commands print it alone and exit
    with code 2; from Python it is an ordinary `ValueError`. Faults of ours are never raised as `UserError`.
    """


class BadRow(UserError):
    """A row of data that cannot be used; the message begins with the row's id.

    Who reads the rows decides: go no further, or drop the row and count it. It can be pickled, so it leaves a worker.
    """

    def __init__(self, row: object, reason: str):
        super().__init__(row, reason)
        self.row, self.reason = row, reason

    def __str__(self) -> str:
        return " ".join(f"{self.row}: {self.reason}".split())  # one line, whatever a decoder said
