from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

Refused = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def refused() -> Refused:
    """A block that must raise this error, in one line, with these words in it."""

    @contextmanager
    def check(kind: type[Exception], *words: str) -> Iterator[None]:
        with pytest.raises(kind) as caught:
            yield
        line = str(caught.value)
        assert type(caught.value) is kind
        assert "\n" not in line
        assert "; " in line, "says what to do"
        assert "got" in line
        for word in words:
            assert word in line, line

    return check
