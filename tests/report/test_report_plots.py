import functools
import io
import re
import xml.etree.ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image
from run_folders import images

from feddpms.report import plots
from feddpms.report.plots import Curve

NASTY = ('<b>bird & "co"</b>', "truck$x$", "鳥", "plain", "a\x00b")


def curve(name: str, rounds: int = 20, seeds: int = 3, colour: int = 0) -> Curve:
    values = np.linspace(0.1, 0.8, rounds) + 0.01 * np.arange(seeds)[:, None]
    phases = tuple("vae" if i < 6 else "classify" for i in range(rounds))
    return Curve(name, values, phases, colour)


@functools.cache
def every_svg() -> dict[str, str]:
    counts = np.arange(15).reshape(3, 5).tolist()
    table = np.array([[0.1, 0.5, np.nan, 0.9, 1.0], [0.2, 0.3, 0.4, 0.5, 0.6]])
    curves = [curve("fedavg"), curve(NASTY[0], colour=1)]
    return {
        "accuracy": plots.accuracy_svg(curves, "p1"),
        "loss": plots.loss_svg(curves, "p2"),
        "classes": plots.per_class_svg(["fedavg", NASTY[0]], table, NASTY, "p3"),
        "partition": plots.partition_svg(counts, NASTY, "p4"),
        "large": plots.partition_svg(np.ones((60, 100), int).tolist(), ["k"] * 100, "p5"),
        "bytes": plots.bytes_svg(["fedavg", NASTY[0]], [1e6, 2e6], [3e6, 4e6], "p6"),
    }


def test_every_svg_is_well_formed_named_for_readers_and_free_of_scripts():
    for text in every_svg().values():
        root = ET.fromstring(text)

        assert root.get("role") == "img"
        assert len(root.get("aria-label", "")) > 20
        assert "<b>" not in text
        assert "<script" not in text
        assert "<metadata" not in text


def test_names_from_files_are_shown_as_they_are():
    texts = "".join(ET.fromstring(every_svg()["partition"]).itertext())

    assert '<b>bird & "co"<…' in texts  # the rest is cut, as it is long
    assert "truck$x$" in texts
    assert "鳥" in texts


def test_ids_of_all_pictures_differ_and_every_reference_is_met():
    seen: set[str] = set()
    for text in every_svg().values():
        ids = re.findall(r'\sid="([^"]+)"', text)
        used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
        assert len(ids) == len(set(ids))
        assert {a or b for a, b in used} <= set(ids)
        assert seen.isdisjoint(ids)
        seen |= set(ids)


def test_style_rules_stay_inside_their_picture():
    for text in every_svg().values():
        (rules,) = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
        assert re.fullmatch(r"#p\d \*\{[^{}]*\}", rules.strip())


def test_the_same_values_give_the_same_bytes_whatever_the_user_has_set():
    first = every_svg()
    with mpl.rc_context({"font.size": 30, "lines.linewidth": 9, "svg.fonttype": "path"}):
        again = every_svg.__wrapped__()
        assert mpl.rcParams["font.size"] == 30
    assert first == again


def test_a_change_of_phase_is_marked_once():
    text = plots.accuracy_svg([curve("a"), curve("b", colour=1)])

    assert text.count("vae → classify") == 1


def test_the_band_covers_the_seeds_and_one_seed_has_none():
    assert "FillBetween" in plots.accuracy_svg([curve("a", seeds=3)])
    assert "FillBetween" not in plots.accuracy_svg([curve("a", seeds=1)])


def test_curves_of_one_round_without_values_and_of_many_methods_can_be_drawn():
    gone = Curve("gone", np.full((1, 4), np.nan), ("train",) * 4, 1, faint=True)
    wide = Curve("wide", np.array([[1e-3, 1.0, 1e4]]), ("train",) * 3, 2)

    for curves in ([curve("a", rounds=1)], [gone], [wide, gone]):
        ET.fromstring(plots.loss_svg(curves))
    ET.fromstring(plots.accuracy_svg([curve(f"method {i}", colour=i) for i in range(16)]))


def test_counts_are_written_where_there_is_room():
    few = plots.partition_svg([[0, 17], [23, 4]], ["a", "b"])
    many = plots.partition_svg(np.full((40, 40), 4321).tolist(), ["k"] * 40)

    assert ">17<" in few
    assert ">23<" in few
    assert "4321<" not in many


def test_partition_png_is_a_picture():
    picture = Image.open(io.BytesIO(plots.partition_png([[0, 17], [23, 4]], ["a", "b"])))

    assert picture.format == "PNG"
    assert picture.width > 800


def opened(png: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (1, 28), (3, 32), (3, 96)])
def test_a_sheet_keeps_pixels_square_and_crisp(channels: int, side: int):
    data = images(10, [8] * 10, channels, side)
    sheet = opened(plots.sheet(data, list("abcdefghij")))
    scale = max(1, round(48 / side))
    tile = np.repeat(np.repeat(data["real"][0, 0], scale, -1), scale, -2)
    tile = np.broadcast_to(tile, (3, *tile.shape[1:])).transpose(1, 2, 0)

    rows = range(sheet.shape[1] - tile.shape[1])
    assert any((sheet[34 : 34 + len(tile), x : x + tile.shape[1]] == tile).all() for x in rows)
    assert sheet.shape[1] <= plots.SHEET_WIDTH or side > 90


def test_a_sheet_shows_no_more_synthetic_images_than_there_are():
    data = images(2, [2, 0])
    data["real"][:] = 255
    data["synthetic"][:] = 0
    sheet = opened(plots.sheet(data, ["", ""]))
    dark = (sheet[34:134] == 0).all(-1).sum(1)

    assert (dark[:48] == 2 * 48).all()
    assert dark[52:].max() == 0


def test_a_sheet_of_many_classes_shows_twenty_that_have_synthetic_images():
    few = images(100, [1 if k in (70, 80) else 0 for k in range(100)])
    many = images(100, [k % 2 for k in range(100)])
    names = [f"class {k}" for k in range(100)]

    assert len(opened(plots.sheet(few, names))) == 34 + 2 * 52 + 4
    assert len(opened(plots.sheet(many, names))) == 34 + 20 * 52 + 4


def test_a_sheet_without_synthetic_images_is_refused():
    with pytest.raises(ValueError, match="no synthetic images"):
        plots.sheet(images(10, [0] * 10), list("abcdefghij"))
    with pytest.raises(ValueError, match="no synthetic images"):
        plots.sheet({}, [])


def test_a_sheet_without_real_images_can_be_drawn():
    data = images(10, [8] * 10)
    del data["real"]

    assert opened(plots.sheet(data, list("abcdefghij"))).shape[1] < 700


def test_a_sheet_shows_reconstructed_images_between_real_and_synthetic_ones():
    data = images(2, [2, 2])
    grey = {"real": 200, "reconstructed": 120, "synthetic": 60}
    for kind, value in grey.items():
        data[kind] = np.full_like(data["real"], value)
    sheet = opened(plots.sheet(data, ["", ""]))[50]
    places = {kind: (sheet == value).all(-1).nonzero()[0] for kind, value in grey.items()}

    assert [len(places[kind]) for kind in grey] == [4 * 48, 4 * 48, 2 * 48]
    assert places["real"].max() < places["reconstructed"].min()
    assert places["reconstructed"].max() < places["synthetic"].min()


def test_a_logarithmic_loss_axis_has_plain_numbers():
    falling = plots.Curve("a", np.array([[20.0, 5.0, 1.0, 0.2, 0.05]]), ("train",) * 5, 0)
    drawn = plots.loss_svg([falling], "x")
    assert {"0.1", "1", "10"} <= set(re.findall(r">([\d.]+)</text>", drawn))
    assert "$" not in drawn
