"""What can go wrong, and how it is said.

    FeddpmsError
    ├── ConfigError      a setting is unknown, out of range, or does not fit another
    ├── DataError        a file is missing, broken, or not what it claims to be
    ├── RunFolderError   a folder already holds a run, or holds none
    └── PrivacyError     a release would break what the ledger promises

Every message is one line: what was expected, what was got, what to do. The command prints it and
exits with 2; anything that is not a FeddpmsError is our mistake and keeps its traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class FeddpmsError(Exception):
    """A mistake that the user can mend; its text is one line."""


class ConfigError(FeddpmsError):
    """A setting is unknown, out of range, or does not fit another."""


class DataError(FeddpmsError):
    """A data file is missing, broken, or not what it claims to be."""


class RunFolderError(FeddpmsError):
    """A folder already holds a run, or holds none."""


class PrivacyError(FeddpmsError):
    """A release would break what the ledger promises."""


def unknown(what: str, got: str, known: Iterable[str], where: str = "") -> str:
    """The line for a name that does not exist, with the nearest one that does.

    Args:
        what: what the name stands for, such as "method".
        got: the name as given.
        known: the names that exist.
        where: what stands before each name, such as "partition.".

    Returns:
        One line; it ends with the nearest name, or with all of them if none is near; it says so
        if there are none.
    """
    names = sorted(known)
    if not names:
        return f'no {what} "{where}{got}"; {where.removesuffix(".")} has none; leave it out'
    near = get_close_matches(got.lower(), names, n=1, cutoff=0.5)
    every = ", ".join(f"{where}{name}" for name in names)
    hint = f'did you mean "{where}{near[0]}"?' if near else f"choose from {every}"
    return f'no {what} "{where}{got}"; {hint}'
