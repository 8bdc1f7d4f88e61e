import pytest

from feddpms import errors
from feddpms.errors import FeddpmsError, unknown

NAMES = ["fedavg", "fedprox", "moon"]


@pytest.mark.parametrize(
    ("got", "near"), [("fedavgg", "fedavg"), ("FEDPROX", "fedprox"), ("mon", "moon")]
)
def test_the_nearest_name_is_offered(got, near):
    assert unknown("method", got, NAMES) == f'no method "{got}"; did you mean "{near}"?'


def test_all_names_are_listed_in_order_when_none_is_near():
    line = unknown("data set", "zzz", reversed(NAMES))
    assert line == 'no data set "zzz"; choose from fedavg, fedprox, moon'


def test_where_nothing_is_known_the_line_says_so():
    line = unknown("setting", "mu", [], where="method.")
    assert line == 'no setting "method.mu"; method has none; leave it out'


@pytest.mark.parametrize("name", ["ConfigError", "DataError", "RunFolderError", "PrivacyError"])
def test_every_mistake_of_the_user_has_one_root(name):
    assert issubclass(getattr(errors, name), FeddpmsError)
