"""Finding the files of a data set, and saying what is wrong when they are not there."""

from pathlib import Path

from feddpms.errors import ConfigError, DataError


def place(name: str, given: str, accepts: str) -> Path:
    """The path that the user gave for a data set.

    Args:
        name: the data set.
        given: `data.dir` as given; "~" is the home folder.
        accepts: what may lie there and how to get it, for the error.

    Returns:
        The path; it exists.

    Raises:
        ConfigError: no path was given.
        DataError: nothing is there.
    """
    if not given:
        raise ConfigError(
            f'data set "{name}": expected data.dir (--data-dir), got none; give {accepts}'
        )
    path = Path(given).expanduser()
    if not path.exists():
        raise DataError(f'data set "{name}": looked for {path}, got nothing there; give {accepts}')
    return path


def first_line(error: BaseException) -> str:
    """The first line of what a library said, for use inside our one line."""
    text = str(error).strip()
    return text.splitlines()[0].strip() if text else type(error).__name__
