"""The examples of README.md and docs/PYTHON.md, run as they stand."""

import pathlib
import re

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def blocks(document):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(encoding="utf-8"), re.M | re.S)


EXAMPLES = [(document, i) for document in ("README.md", "docs/PYTHON.md") for i in range(len(blocks(document)))]


def cuda():
    try:
        import torch

        return torch.cuda.is_available()
    except ImportError:
        return False


def run(source, capsys):
    names = {}
    exec(compile(source, "example", "exec"), names)
    return names, capsys.readouterr().out


def test_the_readme_has_its_examples():
    assert sum(document == "README.md" for document, _ in EXAMPLES) == 1
    assert sum(document == "docs/PYTHON.md" for document, _ in EXAMPLES) >= 3


@pytest.mark.parametrize("document,i", EXAMPLES, ids=[f"{d}-{i}" for d, i in EXAMPLES])
def test_runs(document, i, capsys, monkeypatch, tmp_path):
    source = blocks(document)[i]
    if "import torch" in source:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    if "matplotlib" in source:
        pytest.importorskip("matplotlib")
    _, printed = run(source, capsys)
    # Each line of output is in the example, as a comment behind what prints it.
    wanted = re.findall(r"#> (.*)", source)
    assert printed.splitlines() == wanted and wanted


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_the_readme_example_on_a_gpu(library, capsys):
    """The same text with another library's name in it, and with arrays of that library on the GPU."""
    if not cuda():
        pytest.skip("no GPU here")
    pytest.importorskip(library)
    source = blocks("README.md")[0]
    if library == "cupy":
        names, printed = run(source.replace("import numpy as np", "import cupy as np"), capsys)
        assert printed.splitlines() == re.findall(r"#> (.*)", source)
        assert type(names["out"]).__module__.startswith("cupy")
        return
    import torch

    head, call = source.split("out, lse = ")
    names = {}
    exec(head, names)
    names |= {k: torch.from_numpy(v).cuda() for k, v in names.items() if isinstance(v, np.ndarray)}
    q, kv = (names[n].to(torch.bfloat16) for n in ("q", "kv"))
    names |= {"q": q, "kv": kv}
    exec("out, lse = " + call.replace("np.array(", "cuda(").replace('"int32"', "torch.int32"), names | {
        "torch": torch, "cuda": lambda a, dtype: torch.tensor(a, dtype=dtype, device="cuda")}, names)  # fmt: skip
    assert names["out"].is_cuda
    # The same in float32, in torch.
    rows = kv[[5, 2, 9, 7, 1, 3, 8], 0].float()
    for i, seen in enumerate(([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6])):
        s = 0.1447 * q[i].float() @ rows[seen].T
        want = s.softmax(-1) @ rows[seen][:, :512]
        assert (names["out"][i].float() - want).norm() <= 4e-3 * want.norm()
        assert torch.allclose(names["lse"][i], s.logsumexp(-1), atol=5e-5)
