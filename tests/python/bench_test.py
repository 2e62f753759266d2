"""treemla.bench and treemla.plot: a record comes out, charts are drawn from it, nonsense is named. No time is judged."""

import csv
import os
import subprocess
import sys

import pytest

import treemla.bench
import treemla.plot


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "record.csv"
    grid = ["--h_q", "2,4", "--s_q", "5", "--prefix", "16,64", "--d_v", "32", "--d_rope", "16", "--seconds", "0.01"]
    assert treemla.bench.main([*grid, "--out", str(path)]) == 0
    return path


def test_a_record_has_a_row_a_shape(record):
    rows = list(csv.DictReader(record.open()))
    assert [(r["h_q"], r["prefix"]) for r in rows] == [("2", "16"), ("2", "64"), ("4", "16"), ("4", "64")]
    for row in rows:
        assert row["backend"] == "cpu_simd" and row["checked"] == "yes" and float(row["warm_us"]) > 0
        flop, num_bytes = treemla.bench.cost(1, 5, int(row["h_q"]), int(row["prefix"]), 32, 16, "float32")
        assert flop == 2 * 5 * int(row["h_q"]) * (int(row["prefix"]) + 5) * (48 + 32)
        assert num_bytes == (int(row["prefix"]) + 5) * 48 * 4
        assert float(row["tflop_per_s"]) == pytest.approx(flop / float(row["warm_us"]) / 1e6, rel=0.01, abs=1e-5)


def test_python_m(record):
    done = subprocess.run(
        [sys.executable, "-m", "treemla.bench", "--h_q", "1", "--prefix", "8", "--d_v", "32", "--d_rope", "16",
         "--seconds", "0.01"], capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0 and "cpu_simd" in done.stderr, done.stderr


@pytest.mark.parametrize("suffix,magic", [("svg", b"<?xml"), ("png", b"\x89PNG")])
@pytest.mark.parametrize("kind", ["speed", "ratio", "roofline"])
def test_charts(record, tmp_path, kind, suffix, magic):
    pytest.importorskip("matplotlib")
    out = tmp_path / f"chart.{suffix}"
    more = {"ratio": ["--base", str(record)], "roofline": ["--read_tb_s", "0.02", "--tflop_s", "0.3"]}.get(kind, [])
    assert treemla.plot.main([kind, str(record), "--out", str(out), *more]) == 0
    assert out.read_bytes().startswith(magic)
    if suffix == "svg":
        assert "h_q 2" in out.read_text() and "h_q 4" in out.read_text()
        again = tmp_path / "again.svg"
        treemla.plot.main([kind, str(record), "--out", str(again), *more])
        assert again.read_bytes() == out.read_bytes()


def test_the_ratio_is_to_the_fastest(record):
    pytest.importorskip("matplotlib")
    rows = treemla.plot.read(str(record))
    slower = [dict(r, warm_us=r["warm_us"] * 3) for r in rows] + [dict(r, warm_us=r["warm_us"] * 2) for r in rows]
    lines = treemla.plot.ratio(rows, slower).axes[0].lines
    assert all(y == pytest.approx(2) for line in lines[:2] for y in line.get_ydata())


BAD = [
    (["speed", "RECORD", "--where", "h_q=3", "--out", "x.svg"], "no row has h_q = 3"),
    (["speed", "RECORD", "--where", "h_q", "--out", "x.svg"], "must be COLUMN=VALUE"),
    (["speed", "missing.csv", "--out", "x.svg"], "missing.csv"),
    (["ratio", "RECORD", "--out", "x.svg"], "needs --base"),
    (["roofline", "RECORD", "--out", "x.svg"], "needs --read_tb_s"),
]


@pytest.mark.parametrize("arguments,message", BAD, ids=range(len(BAD)))
def test_bad_options(record, arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert treemla.plot.main([str(record) if a == "RECORD" else a for a in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not os.path.exists("x.svg")
