"""Charts of benchmark records: time against prefix, ratio to another record, roofline. Needs matplotlib.

    python -m treemla.plot speed record.csv --where b=1,s_q=9 --out speed.svg
    python -m treemla.plot ratio record.csv --base other.csv --where b=1,s_q=9 --out ratio.png
    python -m treemla.plot roofline record.csv --read_tb_s 4.54 --tflop_s 700 --out roofline.svg

Records are CSV or JSON files of `treemla bench`, `bench_kernels` or `python -m treemla.bench`; any CSV with the columns b, s_q,
h_q, prefix and cold_us or warm_us will do as a base.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from typing import Any

Row = dict[str, Any]
#: One series, one marker and shade: readable without colour.
_STYLES = [("o", "#0b3c5d"), ("s", "#d9622b"), ("^", "#3a7d44"), ("D", "#8c4a9e"), ("v", "#b08900"), ("P", "#555555")]


def read(path: str) -> list[Row]:
    """The rows of a record that were run; numbers are numbers."""
    with open(path, encoding="utf-8") as file:
        if path.endswith(".json"):
            data = json.load(file)
            rows = data if isinstance(data, list) else data.get("rows", data.get("results", []))
        else:
            rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path}: no rows")
    missing = {"b", "s_q", "h_q", "prefix"} - set(rows[0])
    if missing:
        raise ValueError(f"{path}: no column {', '.join(sorted(missing))}")
    result = []
    for row in rows:
        if row.get("not_run"):
            continue
        row = dict(row)
        for name in ("b", "s_q", "h_q", "prefix", "warm_us", "cold_us", "gb_per_s", "tflop_per_s"):
            if row.get(name) not in (None, ""):
                row[name] = float(row[name])
        result.append(row)
    return result


def time_of(row: Row, column: str | None = None) -> float:
    """Microseconds: cold where there is a cold time."""
    for name in (column,) if column else ("cold_us", "warm_us"):
        if isinstance(row.get(name), float):
            return row[name]
    raise ValueError(f"a row has no {column or 'cold_us or warm_us'}: {row}")


def select(rows: list[Row], where: dict[str, str]) -> list[Row]:
    """Rows whose columns have the given values, numbers compared as numbers."""

    def same(a: Any, b: str) -> bool:
        try:
            return float(a) == float(b)
        except (TypeError, ValueError):
            return str(a) == b

    picked = [row for row in rows if all(same(row.get(name), value) for name, value in where.items())]
    if not picked:
        raise ValueError(f"no row has {', '.join(f'{n} = {v}' for n, v in where.items())}")
    return picked


def series(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows that differ only in the prefix, by a label that says what else varies."""
    vary = [n for n in ("device", "backend", "kernel", "dtype", "page_size", "b", "s_q", "h_q")
            if len({row.get(n) for row in rows}) > 1]  # fmt: skip
    groups: dict[str, list[Row]] = {}
    for row in rows:
        label = ", ".join(
            f"{n} {int(row[n])}" if isinstance(row.get(n), float) else str(row.get(n)) for n in vary
        ) or str(row.get("backend") or row.get("kernel") or "time")  # fmt: skip
        groups.setdefault(label, []).append(row)
    return {label: sorted(group, key=lambda row: row["prefix"]) for label, group in groups.items()}


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "treemla", "svg.fonttype": "none"}  # the same record gives the same file, with text
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _lines(axes: Any, groups: dict[str, list[tuple[float, float]]]) -> None:
    for i, (label, points) in enumerate(groups.items()):
        marker, colour = _STYLES[i % len(_STYLES)]
        dashes = "-" if i < len(_STYLES) else "--"
        axes.plot(*zip(*points), marker=marker, color=colour, linestyle=dashes, label=label, markersize=5, linewidth=1.6)
    axes.legend(frameon=False, fontsize=9)


def _prefix_axis(axes: Any, prefixes: list[float]) -> None:
    ticks = sorted(set(prefixes))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{int(t) // 1024}K" if t >= 1024 and t % 1024 == 0 else str(int(t)) for t in ticks])
    axes.minorticks_off()


def _log_axis(axis: Any) -> None:
    """1, 2, 5, 10, ... as plain numbers."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_minor_locator(ticker.NullLocator())


def speed(rows: list[Row], title: str = "") -> Any:
    """Microseconds against the cached prefix, both logarithmic."""
    figure, axes = _axes(title, "cached prefix, tokens", "time, us")
    _lines(axes, {label: [(r["prefix"], time_of(r)) for r in group] for label, group in series(rows).items()})
    _prefix_axis(axes, [r["prefix"] for r in rows])
    axes.set_yscale("log")
    _log_axis(axes.yaxis)
    return figure


def ratio(rows: list[Row], base: list[Row], title: str = "", base_name: str = "the other") -> Any:
    """How many times faster than the fastest row of the base with the same b, s_q, h_q and prefix."""
    best: dict[tuple, float] = {}
    for row in base:
        key = tuple(row[n] for n in ("b", "s_q", "h_q", "prefix"))
        best[key] = min(best.get(key, float("inf")), time_of(row))
    groups: dict[str, list[tuple[float, float]]] = {}
    for label, group in series(rows).items():
        points = [(r["prefix"], best[k] / time_of(r)) for r in group
                  if (k := tuple(r[n] for n in ("b", "s_q", "h_q", "prefix"))) in best]  # fmt: skip
        if points:
            groups[label] = points
    if not groups:
        raise ValueError("the base has no shape in common with the record")
    figure, axes = _axes(title, "cached prefix, tokens", f"times as fast as {base_name}")
    _lines(axes, groups)
    axes.axhline(1, color="black", linewidth=0.8)
    _prefix_axis(axes, [x for points in groups.values() for x, _ in points])
    axes.set_ylim(bottom=0)
    return figure


def roofline(rows: list[Row], read_tb_s: float, tflop_s: float, title: str = "") -> Any:
    """TFLOP/s against FLOP a byte, below what memory and arithmetic allow."""
    groups = {
        label: [(1e3 * r["tflop_per_s"] / r["gb_per_s"], r["tflop_per_s"]) for r in group]
        for label, group in series(rows).items()
    }
    figure, axes = _axes(title, "FLOP a byte of cache", "TFLOP/s")
    xs = [x for points in groups.values() for x, _ in points]
    low, high = min(xs) / 2, max(*xs, tflop_s / read_tb_s) * 2
    knee = tflop_s / read_tb_s
    roof = [(low, low * read_tb_s), (knee, tflop_s), (high, tflop_s)]
    axes.plot(*zip(*roof), color="black", linewidth=1.2)
    axes.annotate(f"{read_tb_s:g} TB/s", (low, low * read_tb_s), textcoords="offset points", xytext=(14, -2))
    axes.annotate(f"{tflop_s:g} TFLOP/s", (high, tflop_s), textcoords="offset points", xytext=(-4, 5), ha="right")
    for i, (label, points) in enumerate(groups.items()):
        marker, colour = _STYLES[i % len(_STYLES)]
        axes.scatter(*zip(*points), marker=marker, color=colour, label=label, s=24)
    axes.legend(frameon=False, fontsize=9)
    axes.set(xscale="log", yscale="log")
    _log_axis(axes.xaxis)
    _log_axis(axes.yaxis)
    return figure


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m treemla.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("speed", "ratio", "roofline"))
    parser.add_argument("records", nargs="+", metavar="RECORD")
    parser.add_argument("--where", default="", metavar="b=1,s_q=9", help="only rows with these values")
    parser.add_argument("--base", metavar="RECORD", help="ratio: what to compare with")
    parser.add_argument("--base_name", default="the other")
    parser.add_argument("--base_where", default="", metavar="kernel=NAME")
    parser.add_argument("--read_tb_s", type=float, help="roofline: what memory reads")
    parser.add_argument("--tflop_s", type=float, help="roofline: what arithmetic reaches")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", required=True, metavar="FILE", help=".png or .svg")
    options = parser.parse_args(arguments)

    def conditions(text: str) -> dict[str, str]:
        for part in text.split(",") if text else []:
            if "=" not in part:
                raise ValueError(f"{part!r}: must be COLUMN=VALUE")
        return dict(part.split("=", 1) for part in text.split(",")) if text else {}

    try:
        rows = select([row for path in options.records for row in read(path)], conditions(options.where))
        if options.kind == "speed":
            figure = speed(rows, options.title)
        elif options.kind == "ratio":
            if not options.base:
                raise ValueError("ratio needs --base")
            base = select(read(options.base), conditions(options.base_where))
            figure = ratio(rows, base, options.title, options.base_name)
        else:
            if not options.read_tb_s or not options.tflop_s:
                raise ValueError("roofline needs --read_tb_s and --tflop_s")
            figure = roofline(rows, options.read_tb_s, options.tflop_s, options.title)
        figure.savefig(options.out, dpi=150, metadata={"Date": None} if options.out.endswith(".svg") else None)
    except ImportError:
        print("treemla.plot: needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"treemla.plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
