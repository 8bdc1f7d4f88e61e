import math
import re
import tomllib
from dataclasses import replace

import pytest
from pydantic import ValidationError

from feddpms import config
from feddpms.algorithms import METHODS, FedAvg, FedDPMS, FedMix, FedProx, Moon, Sharing, Training
from feddpms.config import Run
from feddpms.data import Data, Partition
from feddpms.engine import Engine
from feddpms.engine.loop import visible
from feddpms.errors import ConfigError, FeddpmsError
from feddpms.models import NetSettings, Plan, VaeSettings, build
from feddpms.privacy import Privacy
from feddpms.rng import Rng
from feddpms.synthesis import Drawing, Matching
from small import TASK

WRAPPERS = [name for name, cls in METHODS.items() if cls.about.family == "data"]
TRAINING = [n for n, cls in METHODS.items() if cls.about.family in ("aggregation", "drift")]
NAMES = [*METHODS, *(f"{outer}+{inner}" for outer in WRAPPERS for inner in TRAINING)]

every_name = pytest.mark.parametrize("name", NAMES)

CHANGED = Run(
    seed=7,
    rounds=9,
    method=FedDPMS(
        inner=Moon(mu=2.5, temperature=0.1),
        preliminary_rounds=3,
        decoder_period=0,
        vae=VaeSettings(weight=1e-5, prior_mean=-0.5),
        matching=Matching(kind="pair", top_n=3),
        synthesis=Drawing(per_class=0, spread=0.0),
    ),
    data=Data(name="npz", dir='/a b/"ü"\\x', fraction=0.1),
    partition=Partition(kind="shards", clients=3, beta=1e6, balance=False),
    net=NetSettings(width=0.1, norm="group"),
    local=Training(optimizer="sgd", lr=1e-300, momentum=0.0),
    privacy=Privacy(target_epsilon=0.1, target_delta=1e-12),
    engine=Engine(cohort=0.3),
)


def through_toml(run: Run) -> Run:
    return config.parse(tomllib.loads(config.text(run)))


def refused(values, *words: str) -> str:
    """The one line with which these values are refused."""
    with pytest.raises(ConfigError) as caught:
        config.parse(values)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line
    return line


def start(run: Run, kind: str = "conv") -> None:
    """Start a run's method on what it may see of a network."""
    net = build((1, 4, 4), 3, NetSettings(kind=kind, width=0.25, latent=6, hidden=8), Rng(0))
    plan = Plan((1, 4, 4), 3, NetSettings(kind=kind, width=0.25, latent=6, hidden=8))
    task = replace(TASK, rounds=run.rounds, network=plan)
    run.method.start(visible(run.method, net.state_dict()), task)


@every_name
def test_a_method_goes_through_plain_values_and_back(name):
    run = config.parse({"method": name})
    assert config.parse(config.dump(run)) == run
    assert through_toml(run) == run


def test_settings_that_differ_from_every_default_survive_toml():
    assert through_toml(CHANGED) == CHANGED
    assert config.text(through_toml(CHANGED)) == config.text(CHANGED)


def test_what_is_left_out_keeps_its_default():
    assert config.parse({}) == Run()
    assert config.parse({"method": {"inner": {"name": "moon"}}}) == Run(
        method=FedDPMS(inner=Moon())
    )
    assert config.parse({"method": {"name": "fedprox", "mu": 1}}).method == FedProx(mu=1.0)


def test_parsing_does_not_change_what_it_reads():
    values = config.dump(CHANGED)
    before = config.dump(CHANGED)
    config.parse(values)
    assert values == before


@every_name
def test_the_name_of_a_method_is_read_back(name):
    method = config.parse({"method": name}).method
    said = config.method_name(method)
    assert said == name.removesuffix("+fedavg")
    assert config.parse({"method": said}).method == method


@every_name
def test_the_template_is_the_same_run(name):
    run = config.parse({"method": name})
    assert config.parse(tomllib.loads(config.template(run))) == run


def test_the_template_of_changed_settings_is_the_same_run():
    assert config.parse(tomllib.loads(config.template(CHANGED))) == CHANGED


@every_name
def test_the_template_says_what_every_setting_means(name):
    lines = config.template(config.parse({"method": name})).splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if re.match(r"\w+ = ", line) and not line.startswith("name = "):
            assert re.match(r"# \w|\w", above), line


OVERRIDES = [
    ("net.width=2.5", Run(net=NetSettings(width=2.5))),
    ("net.width=1e-3", Run(net=NetSettings(width=0.001))),
    (" rounds = 7 ", Run(rounds=7)),
    ("partition.balance=false", Run(partition=Partition(balance=False))),
    ("net.norm=group", Run(net=NetSettings(norm="group"))),
    ('net.norm="group"', Run(net=NetSettings(norm="group"))),
    ("data.dir=/tmp/a=b", Run(data=Data(dir="/tmp/a=b"))),
    ("data.dir=", Run(data=Data(dir=""))),
    ('data.dir="12"', Run(data=Data(dir="12"))),
    ("data.name=hf:user/set", Run(data=Data(name="hf:user/set"))),
    ("method.synthesis.per_class=3", Run(method=FedDPMS(synthesis=Drawing(per_class=3)))),
    ("method=moon", Run(method=Moon())),
    ("method=sharing+fedprox", Run(method=Sharing(inner=FedProx()))),
    ("method=fedmix+moon", Run(method=FedMix(inner=Moon()))),
    ("method.inner=fedprox", Run(method=FedDPMS(inner=FedProx()))),
    ("method.inner.name=fedprox", Run(method=FedDPMS(inner=FedProx()))),
    ('method={name = "fedprox", mu = 2}', Run(method=FedProx(mu=2))),
]


@pytest.mark.parametrize(("assignment", "expected"), OVERRIDES)
def test_an_override(assignment, expected):
    assert config.parse(config.override({}, [assignment])) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("1.0", 1.0), ("true", True), ("[1, 'a']", [1, "a"]), ("a b", "a b"), ("'1'", "1")],
)
def test_a_value_is_read_as_toml_or_else_as_a_string(text, value):
    got = config.override({}, [f"a.b={text}"])["a"]["b"]
    assert got == value
    assert type(got) is type(value)


def test_overrides_apply_in_order_and_leave_the_rest_and_the_input_alone():
    values = {"net": {"width": 2, "latent": 5}, "rounds": 3}
    got = config.override(values, ["net.width=3", "net.width=4", "rounds=5"])
    assert got == {"net": {"width": 4, "latent": 5}, "rounds": 5}
    assert values == {"net": {"width": 2, "latent": 5}, "rounds": 3}


@pytest.mark.parametrize(
    "base",
    [
        {"method": "feddpms+fedprox"},
        {"method": {"name": "feddpms", "inner": {"name": "fedprox"}}},
        {"method": {"name": "feddpms", "inner": "fedprox"}},
        {"method": {"name": "feddpms+fedprox"}},
    ],
)
def test_a_setting_of_the_inner_method_is_set_whatever_way_it_was_named(base):
    got = config.parse(config.override(base, ["method.inner.mu=0.3"]))
    assert got.method == FedDPMS(inner=FedProx(mu=0.3))


def test_an_inner_method_without_a_name_is_the_default_one():
    assert config.parse({"method": {"name": "fedmix", "inner": {}}}).method == FedMix()


@pytest.mark.parametrize("assignment", ["rounds", "=3", " =3", ""])
def test_an_override_without_name_or_value_is_refused(assignment):
    with pytest.raises(ConfigError, match="expected SETTING=VALUE") as caught:
        config.override({}, [assignment])
    assert f'"{assignment}"' in str(caught.value)


@pytest.mark.parametrize(
    ("values", "got", "near"),
    [
        ({"round": 3}, "round", "rounds"),
        ({"net": {"widht": 1}}, "net.widht", "net.width"),
        ({"partition": {"client": 1}}, "partition.client", "partition.clients"),
        ({"method": {"decoder_perod": 0}}, "method.decoder_perod", "method.decoder_period"),
        ({"method": {"vae": {"wieght": 1}}}, "method.vae.wieght", "method.vae.weight"),
        (
            {"method": {"name": "feddpms", "inner": {"name": "moon", "temprature": 1}}},
            "method.inner.temprature",
            "method.inner.temperature",
        ),
        ({"method": {"name": "fedprox", "muu": 1}}, "method.muu", "method.mu"),
        ({"privacy": {"target_eps": 1}}, "privacy.target_eps", "privacy.target_epsilon"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(values, got, near):
    assert refused(values) == f'no setting "{got}"; did you mean "{near}"?'


def test_an_unknown_key_with_none_near_lists_those_of_its_level():
    line = refused({"qqq": 1})
    assert line.endswith(f"choose from {', '.join(sorted(config.dump(Run())))}")


@pytest.mark.parametrize(
    ("name", "near"), [("fedavgg", "fedavg"), ("feddpms+mooon", "moon"), ("FedAvg", "fedavg")]
)
def test_an_unknown_method_is_named_with_the_nearest_one(name, near):
    assert refused({"method": name}, "no method").endswith(f'did you mean "{near}"?')


OUT_OF_RANGE = [
    ("partition.beta", 0),
    ("partition.beta", math.nan),
    ("partition.beta", math.inf),
    ("partition.beta", -1),
    ("net.width", 0),
    ("net.hidden", 0),
    ("net.latent", -1),
    ("local.epochs", 0),
    ("local.batch_size", 1),
    ("local.lr", math.nan),
    ("local.lr", 0),
    ("local.momentum", 1),
    ("rounds", 0),
    ("rounds", 2.5),
    ("seed", -1),
    ("data.fraction", 0),
    ("data.fraction", 1.1),
    ("data.size", 30),
    ("engine.cohort", 0),
    ("engine.cohort", 1.1),
    ("privacy.target_epsilon", -math.inf),
    ("privacy.target_delta", 1),
    ("partition.clients", 0),
    ("partition.kind", "dirichlett"),
    ("method.decoder_period", -1),
    ("method.vae.prior_scale", 0),
    ("method.matching.kind", "both"),
    ("method.synthesis.tries", 0),
]
WRONG_KIND = [
    ("rounds", "many"),
    ("rounds", [1]),
    ("rounds", {"a": 1}),
    ("net.width", "wide"),
    ("net.width", {"a": 1}),
    ("net", 3),
    ("net", "wide"),
    ("net", [1]),
    ("data.dir", 3),
    ("partition.balance", "perhaps"),
    ("method.vae", 1),
    ("method.preliminary_rounds", "few"),
    ("method.inner", 3),
    ("method.inner", [1]),
    ("method", 3),
    ("method", [1]),
    ("method.name", 3),
    ("method.inner.name", 3),
]


@pytest.mark.parametrize(("path", "value"), [*OUT_OF_RANGE, *WRONG_KIND])
def test_a_bad_value_is_one_line_that_names_the_setting_and_the_value(path, value):
    values = value
    for key in reversed(path.split(".")):
        values = {key: values}
    refused(values, "method" if path.endswith(".name") else path, f"got {value!r}")


@pytest.mark.parametrize(
    "name", ["fedavg+moon", "moon+fedavg", "local+fedavg", "feddpms+", "+moon", "", "+"]
)
def test_a_composition_that_makes_no_sense_is_refused_by_name(name):
    refused({"method": name})


@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", [n for n in METHODS if n not in TRAINING])
def test_a_data_method_wraps_only_a_training_method(outer, inner):
    with pytest.raises(ConfigError, match="wraps a training method"):
        start(config.parse({"method": f"{outer}+{inner}"}))


REFUSED = {
    ("feddpms", "pfnm"): "clients of pfnm are not sent",
    ("feddpms", "fedma"): "clients of fedma are not sent",
    ("zdac", "pfnm"): "batch norm",  # a network that pfnm takes has none
    ("zdas", "pfnm"): "clients of pfnm are not sent",
    ("zdas", "fedma"): "clients of fedma are not sent",
}
"""combinations that have no meaning, and what the refusal says"""


@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", TRAINING)
def test_a_data_method_wraps_every_training_method_that_it_can(outer, inner):
    run, kind = config.parse({"method": f"{outer}+{inner}"}), "mlp" if inner == "pfnm" else "conv"
    if (outer, inner) not in REFUSED:
        start(run, kind)
        return
    with pytest.raises(ConfigError, match=REFUSED[outer, inner]) as told:
        start(run, kind)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("method", [FedDPMS, Sharing])
@pytest.mark.parametrize(("rounds", "first"), [(1, 0), (5, 5), (5, 9)])
def test_the_preliminary_rounds_must_leave_some(rounds, first, method):
    run = Run(rounds=rounds, method=method(preliminary_rounds=first))
    with pytest.raises(ConfigError, match="preliminary_rounds must be below rounds"):
        start(run)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Run(rounds=0),
        lambda: Run(method="moon"),
        lambda: Run(method=FedAvg),
        lambda: Run(nope=1),
        lambda: Run(net=3),
        lambda: Run(seed="many"),
        lambda: Partition(beta=math.nan),
        lambda: Partition(beta=0),
        lambda: FedProx(mu=-1),
        lambda: FedProx(muu=1),
        lambda: FedDPMS(inner=3),
        lambda: Training(lr=math.inf),
        lambda: replace(Run(), rounds=-1),
    ],
)
def test_settings_built_in_python_are_checked_too(build):
    with pytest.raises((ValidationError, FeddpmsError)):
        build()


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        Run().rounds = 3


def test_settings_from_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(config.text(CHANGED))
    assert config.parse(config.load(path)) == CHANGED


@pytest.mark.parametrize("content", [None, b"a = = 3", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_file_that_is_missing_or_no_toml_is_one_line(tmp_path, content):
    path = tmp_path / "run.toml"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml") as caught:
        config.load(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_settings_file(tmp_path):
    with pytest.raises(ConfigError, match="expected TOML"):
        config.load(tmp_path)


# Presets


@pytest.mark.parametrize(
    "method", ["feddpms", {"name": "feddpms"}, {}, "feddpms+moon", {"name": "feddpms+moon"}]
)
def test_the_papers_preset_is_under_what_is_given(method):
    values, (table,) = config.with_preset("paper", {"rounds": 7}, [method])
    run = config.parse({**values, "method": table})
    assert run.rounds == 7
    assert run.privacy.release == "paper"
    assert (run.method.matching.kind, run.method.matching.top_n, run.method.decoder_period) == (
        *("pair", 3),
        0,
    )
    assert (run.method.synthesis.spread, run.method.synthesis.amount) == (0.0, "per_class")
    assert config.method_name(run.method) == (
        "feddpms+moon" if "moon" in str(method) else "feddpms"
    )


def test_what_is_given_wins_over_a_preset():
    own = {"name": "feddpms", "matching": {"top_n": 10}, "synthesis": {"per_class": 50}}
    values, (other, table) = config.with_preset(
        "paper", {"privacy": {"release": "class_sum"}}, ["moon", own]
    )
    assert other == {"name": "moon"}, "a preset is one method's"
    run = config.parse({**values, "method": table})
    assert run.privacy.release == "class_sum"
    assert (run.method.matching.top_n, run.method.matching.bottom_n) == (10, 3)
    assert (run.method.synthesis.per_class, run.method.synthesis.amount) == (50, "per_class")


@pytest.mark.parametrize(
    ("preset", "method", "line"),
    [
        ("papre", "feddpms", 'no preset "papre"'),
        ("paper", "moon", "preset paper is one of feddpms, got moon"),
    ],
)
def test_a_preset_that_does_not_fit_is_one_line(preset, method, line):
    with pytest.raises(ConfigError, match=line) as told:
        config.with_preset(preset, {}, [method])
    assert "\n" not in str(told.value)
