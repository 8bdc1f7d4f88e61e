import io
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from feddpms.data import Data, available, load
from feddpms.errors import DataError
from feddpms.rng import Rng

rng = np.random.default_rng(0)
NAMES = [f"class {k}" for k in range(10)]
PIXELS = rng.integers(0, 256, (40, 32, 32, 3), np.uint8)
LABELS = np.arange(40) % 10


def encoded(array, form="PNG"):
    out = io.BytesIO()
    Image.fromarray(array).save(out, form, **({"lossless": True} if form == "WEBP" else {}))
    return out.getvalue()


BLOBS = [encoded(x, "WEBP" if i % 2 else "PNG") for i, x in enumerate(PIXELS)]


def write(path, blobs, labels, names=NAMES, image="img", label="label", group=7):
    images = [{"bytes": blob, "path": f"{i}.png"} for i, blob in enumerate(blobs)]
    table = pa.table(
        {image: pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))}
        | {label: pa.array(labels)}
    )
    if names:
        info = {"info": {"features": {label: {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)


TRAIN, TEST = "train-00000-of-00001.parquet", "test-00000-of-00001.parquet"


@pytest.fixture
def copy(tmp_path):
    write(tmp_path / TRAIN, BLOBS[:30], LABELS[:30])
    write(tmp_path / TEST, BLOBS[30:], LABELS[30:])
    return tmp_path


def read(folder, name="cifar10", **more):
    return load(Data(name=name, dir=str(folder), **more), Rng(0))


def pixels(shard):
    return (shard.x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def test_parquet_gives_every_pixel(copy):
    part = read(copy)
    assert np.array_equal(pixels(part.train), PIXELS[:30])
    assert np.array_equal(pixels(part.test), PIXELS[30:])
    assert part.train.x.is_contiguous()
    assert part.train.y.tolist() == LABELS[:30].tolist()
    assert part.classes == tuple(NAMES)


def test_several_files_in_a_folder_below_with_the_other_column_names(tmp_path):
    folder = tmp_path / "plain_text"
    write(folder / "train-00000-of-00002.parquet", BLOBS[:11], LABELS[:11], image="image")
    write(folder / "train-00001-of-00002.parquet", BLOBS[11:30], LABELS[11:30], image="image")
    write(folder / TEST, BLOBS[30:], LABELS[30:], None, image="image")
    write(folder / TEST, BLOBS[30:], LABELS[30:], image="image")
    assert np.array_equal(pixels(read(tmp_path).train), PIXELS[:30])


@pytest.mark.parametrize("fraction", [0.03, 0.2, 0.5])
def test_fraction_decodes_only_the_chosen_rows(copy, fraction, monkeypatch):
    from feddpms.data import images

    opened = []
    monkeypatch.setattr(
        images, "_open", lambda *a, _real=images._open: opened.append(a) or _real(*a)
    )
    part = read(copy, fraction=fraction)
    n = round(30 * fraction)
    assert (len(part.train), len(part.test)) == (n, 10)
    assert len(opened) == n + 10
    rows = [int(np.flatnonzero((x == PIXELS).all((1, 2, 3)))[0]) for x in pixels(part.train)]
    assert rows == sorted(rows)
    assert part.train.y.tolist() == LABELS[rows].tolist()
    assert part.classes == tuple(NAMES)


def test_no_names_in_the_metadata(copy):
    write(copy / TRAIN, BLOBS[:30], LABELS[:30], None)
    write(copy / TEST, BLOBS[30:], LABELS[30:], None)
    assert read(copy).classes == tuple("0123456789")


def test_cifar100_takes_fine_labels_and_a_part_is_enough(tmp_path):
    names = [f"fine {k}" for k in range(100)]
    for path, rows in ((TRAIN, slice(30)), (TEST, slice(30, 40))):
        write(tmp_path / path, BLOBS[rows], LABELS[rows] + 90, names, label="fine_label")
    part = read(tmp_path, "cifar100")
    assert len(part.classes) == 100
    assert part.train.y.min() == 90


def test_two_data_sets_side_by_side_are_told_apart_by_name(copy, tmp_path, refused):
    for name in ("cifar10", "other"):
        (tmp_path / "both" / name).mkdir(parents=True)
        for file in (TRAIN, TEST):
            (tmp_path / "both" / name / file).write_bytes((copy / file).read_bytes())
    assert len(read(tmp_path / "both").train) == 30
    (tmp_path / "both" / "cifar10").rename(tmp_path / "both" / "third")
    with refused(DataError, "one folder", "other", "third"):
        read(tmp_path / "both")


def rewrite(**changed):
    def change(path):
        write(path, **{"blobs": BLOBS[:30], "labels": LABELS[:30], **changed})

    return change


def with_blob(blob):
    return rewrite(blobs=[*BLOBS[:20], blob, *BLOBS[21:30]])


def cut(path):
    path.write_bytes(path.read_bytes()[:-50])


def corrupt(path):
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + b"\xff" * 3000 + raw[3004:])


def no_struct(path):
    pq.write_table(pa.table({"img": BLOBS[:30], "label": LABELS[:30]}), path)


LARGE = encoded(np.zeros((48, 40, 3), np.uint8))
PARQUET = {
    "truncated": (cut, ("whole parquet file",)),
    "corrupt": (corrupt, ("expected", "get it again")),
    "empty": (lambda path: path.write_bytes(b""), ("whole parquet file",)),
    "no label": (rewrite(label="fine_label"), ("column label", "img, fine_label")),
    "no image": (rewrite(image="picture"), ("img or image", "picture, label")),
    "no struct": (no_struct, ("struct<bytes, path>", "binary")),
    "text labels": (rewrite(labels=["cat"] * 30), ("label as integers", "string")),
    "no value": (
        rewrite(labels=[None, *LABELS[1:30].tolist()]),
        ("label in every row", "1 without"),
    ),
    "too large": (rewrite(labels=LABELS[:30] + 1), ("labels 0..9", "10 in row 9", "3 such")),
    "negative": (rewrite(labels=LABELS[:30] - 1), ("labels 0..9", "-1 in row 0")),
    "names": (rewrite(names=NAMES[:9]), ("10 class names", "got 9", "data.name")),
    "size": (with_blob(LARGE), ("column img, row 20", "32x32", "40x48")),
    "bytes": (with_blob(b"no image"), ("column img, row 20", "8 bytes", "not decode")),
    "cut": (with_blob(BLOBS[20][:200]), ("column img, row 20", "200 bytes", "not decode")),
    "no bytes": (with_blob(None), ("column img, row 20", "got none")),
    "16 bit": (with_blob(encoded(np.zeros((32, 32), np.uint16))), ("8 bits a channel", "row 20")),
}


@pytest.mark.parametrize(("change", "words"), PARQUET.values(), ids=PARQUET)
def test_broken_parquet_is_refused(copy, refused, change, words):
    change(copy / TRAIN)
    with refused(DataError, str(copy / TRAIN), *words):
        read(copy)


@pytest.mark.parametrize("change", ["label", "order"])
def test_errors_do_not_depend_on_the_rows_chosen(copy, refused, change):
    labels = LABELS[:30].copy()
    labels[29] = 10
    write(copy / TRAIN, BLOBS[:30], labels)
    for seed in range(5):
        with refused(DataError, "row 29"):
            load(Data(name="cifar10", dir=str(copy), fraction=0.04), Rng(seed))


def test_missing_parquet_files_are_named(copy, refused, tmp_path):
    with refused(DataError, "got nothing there", "nowhere", "huggingface.co", "python version"):
        read(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with refused(DataError, "got none", "empty", "huggingface.co", "python version"):
        read(tmp_path / "empty")
    (copy / TEST).rename(copy / "validation-00000-of-00001.parquet")
    with refused(DataError, "test-*.parquet", "1 file(s), got 0"):
        read(copy)
    (copy / TRAIN).rename(copy / "train-00001-of-00003.parquet")
    with refused(DataError, "train-*.parquet", "3 file(s), got 1"):
        read(copy)


def test_files_that_state_different_class_names_are_refused(copy, refused):
    write(copy / TEST, BLOBS[30:], LABELS[30:], NAMES[::-1])
    with refused(DataError, "same class names"):
        read(copy)


# The original batches


def old_pickle(x, labels, key="labels"):
    """A batch as Python 2 wrote it: byte strings, and the array's type with integer flags."""

    def string(value):
        return b"T" + struct.pack("<i", len(value)) + value

    def integer(value):
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        + b"(K\x01" + integer(len(x)) + integer(3072) + b"\x86"
        + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNN" + integer(-1) * 2 + b"K\x00tb"
        + b"\x89" + string(x.tobytes()) + b"tb"
    )  # fmt: skip
    numbers = b"".join(integer(label) for label in labels)
    return (
        b"\x80\x02}(" + string(b"batch_label") + string(b"training batch 1 of 5")
        + string(key.encode()) + b"](" + numbers + b"e" + string(b"data") + array + b"u."
    )  # fmt: skip


def flat(rows):
    return PIXELS[rows].transpose(0, 3, 1, 2).reshape(-1, 3072)


def new_pickle(x, labels, key="labels"):
    return pickle.dumps({key.encode(): labels.tolist(), b"data": x}, protocol=2)


@pytest.fixture(params=[old_pickle, new_pickle])
def batches(request, tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for i in range(5):
        rows = slice(6 * i, 6 * i + 6)
        (folder / f"data_batch_{i + 1}").write_bytes(request.param(flat(rows), LABELS[rows]))
    (folder / "test_batch").write_bytes(request.param(flat(slice(30, 40)), LABELS[30:]))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": NAMES}, protocol=2))
    return folder


def test_original_batches(batches):
    for folder in (batches, batches.parent):
        part = read(folder)
        assert np.array_equal(pixels(part.train), PIXELS[:30])
        assert np.array_equal(pixels(part.test), PIXELS[30:])
        assert part.train.y.tolist() == LABELS[:30].tolist()
        assert part.classes == tuple(NAMES)
    assert len(read(batches, fraction=0.1).train) == 3
    assert {row[0]: row[2] for row in available(str(batches))}["cifar10"]


def test_original_cifar100(tmp_path):
    for name, rows in (("train", slice(30)), ("test", slice(30, 40))):
        (tmp_path / name).write_bytes(old_pickle(flat(rows), LABELS[rows] + 50, "fine_labels"))
    names = {b"fine_label_names": [f"f{k}".encode() for k in range(100)]}
    (tmp_path / "meta").write_bytes(pickle.dumps(names, protocol=2))
    part = read(tmp_path, "cifar100")
    assert np.array_equal(pixels(part.train), PIXELS[:30])
    assert part.classes[51] == "f51"


class Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


OBJECTS = np.array([[None] * 3072] * 6, dtype=object)
BATCHES = {
    "text": (b"no pickle", ("not a CIFAR batch", "does not load")),
    "list": (pickle.dumps([1, 2]), ("not a CIFAR batch",)),
    "no data": (pickle.dumps({"labels": [0]}), ("not a CIFAR batch", "NoneType")),
    "width": (new_pickle(np.zeros((6, 1024), np.uint8), LABELS[:6]), ("[n, 3072]", "[6, 1024]")),
    "scalar": (new_pickle(np.zeros((), np.uint8), LABELS[:6]), ("[n, 3072]", "[]")),
    "type": (new_pickle(flat(slice(6)).astype(np.int64), LABELS[:6]), ("uint8", "int64")),
    "floats": (new_pickle(flat(slice(6)) / 255.0, LABELS[:6]), ("arrays of type f8",)),
    "objects": (new_pickle(OBJECTS, LABELS[:6]), ("arrays of type O8",)),
    "count": (new_pickle(flat(slice(6)), LABELS[:5]), ("6 integers in labels", "[5]")),
    "label": (new_pickle(flat(slice(6)), LABELS[5:11] + 5), ("labels 0..9", "10 in row 0")),
    "no label": (new_pickle(flat(slice(6)), LABELS[:6], "fine_labels"), ("6 integers in labels",)),
}


@pytest.mark.parametrize(("content", "words"), BATCHES.values(), ids=BATCHES)
def test_wrong_batches_are_refused(batches, refused, content, words):
    path = batches / "data_batch_3"
    path.write_bytes(content)
    with refused(DataError, str(path), *words):
        read(batches)


def test_cut_and_missing_batches_are_refused(batches, refused):
    path = batches / "data_batch_2"
    path.write_bytes(path.read_bytes()[:-500])
    with refused(DataError, str(path), "not a CIFAR batch"):
        read(batches)
    path.unlink()
    with refused(DataError, str(path), "no such file"):
        read(batches)


@pytest.mark.parametrize("names", [NAMES[:3], None])
def test_wrong_names_are_refused(batches, refused, names):
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    with refused(DataError, "batches.meta", "10 class names"):
        read(batches)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("call", [os.mkdir, eval, np.load, getattr])
def test_a_malicious_batch_does_not_run(batches, refused, tmp_path, protocol, call):
    mark = str(tmp_path / "mark")
    arguments = {os.mkdir: [mark], eval: [f"__import__('os').mkdir({mark!r})"]}
    arguments |= {np.load: [mark], getattr: [np.ndarray, "tofile"]}
    content = pickle.dumps({"data": Attack(call, *arguments[call])}, protocol)
    (batches / "data_batch_1").write_bytes(content)
    with refused(DataError, "data_batch_1", "not a CIFAR batch", "it asks for"):
        read(batches)
    assert not Path(mark).exists()


def test_the_malicious_batch_would_run_in_plain_pickle(tmp_path):
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps({"data": Attack(os.mkdir, str(mark))}, 2))
    assert mark.exists()


def test_only_latin1_bytes_are_decoded(batches, refused):
    (batches / "data_batch_1").write_bytes(
        b"\x80\x02}U\x04datac_codecs\nencode\nU\x01aU\x05utf16\x86Rs."
    )
    with refused(DataError, "bytes encoded as utf16"):
        read(batches)


@pytest.mark.parametrize(
    ("variable", "name", "shape", "classes"),
    [("FEDDPMS_CIFAR10", "cifar10", 50000, 10), ("FEDDPMS_CIFAR100", "cifar100", None, 100)],
)
def test_real_copy(variable, name, shape, classes):
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} names no folder with a copy of {name}")
    part = read(folder, name, fraction=0.02)
    assert part.train.x.shape[1:] == (3, 32, 32)
    assert shape is None or len(part.train) == shape / 50
    assert len(part.classes) == classes
    assert torch.bincount(part.test.y).tolist() == [10000 // classes] * classes
    assert 0.4 < part.test.x.mean() < 0.55
