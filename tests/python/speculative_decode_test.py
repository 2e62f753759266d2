"""The end-to-end example, in short: greedy decoding equals generate(), sampling has the model's distribution."""

import importlib.util
import os
import pathlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.deepseek_v3")

PATH = pathlib.Path(__file__).resolve().parents[2] / "examples" / "speculative_decode.py"
spec = importlib.util.spec_from_file_location("speculative_decode", PATH)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# In full where somebody asks for it; the whole of it is what the example itself does.
PROMPTS, TOKENS = map(int, os.environ.get("TREEMLA_DECODE", "8x32").split("x"))


@pytest.mark.parametrize("budget,depths", [(8, 5), (40, 4), (1, 1)])
def test_greedy_equals_generate(budget, depths):
    model = example.make_model(DEVICE)
    prompts = example.make_prompts(PROMPTS, model.config.vocab_size)
    want = example.reference(model, prompts, TOKENS)
    assert len({tuple(w) for w in want}) == len(want)  # the model does look at its prompt
    decoder = example.Decoder(model, len(prompts), 24 + TOKENS + depths + 1, budget, depths)
    got, stats = decoder.generate(prompts, TOKENS)
    decoder.restore()
    assert got == want
    assert stats["accepted"] > 0 and stats["steps"] < TOKENS  # trees were of use


def test_sampling_has_the_distribution_of_the_model():
    """Three tokens of 3,000 runs of one prompt, by pairs, against the model's own probabilities: chi-squared at 5 sigma."""
    vocab, count = 6, 3000
    model = example.make_model(DEVICE, vocab=vocab, layers=2, heads=2)
    model.lm_head.weight.data *= 3  # far from uniform, so that a wrong temperature of 1.2 would show
    prompt = [1, 2, 1, 2, 1]  # what followed before is drafted, and often rejected
    with torch.no_grad():
        first = model(torch.tensor([prompt], device=DEVICE)).logits[0, -1].double().softmax(-1)
        ids = torch.tensor([[*prompt, a] for a in range(vocab)], device=DEVICE)
        second = model(ids).logits[:, -1].double().softmax(-1)
        ids = torch.tensor([[*prompt, a, b] for a in range(vocab) for b in range(vocab)], device=DEVICE)
        third = model(ids).logits[:, -1].double().softmax(-1).view(vocab, vocab, vocab)
    decoder = example.Decoder(model, count, 16, 4, 3, sample=True)
    got, stats = decoder.generate([prompt] * count, 3, seeds=torch.arange(count) + 10_000)
    assert stats["accepted"] > count / 20
    expected = (first[:, None, None] * second[:, :, None] * third).reshape(-1).cpu() * count
    cells = torch.tensor([(a * vocab + b) * vocab + c for a, b, c in got])
    seen = torch.bincount(cells, minlength=vocab**3).double()
    large = expected >= 5
    seen, expected = (torch.cat([x[large], x[~large].sum()[None]]) for x in (seen, expected))
    chi2, degrees = ((seen - expected) ** 2 / expected.clamp(min=1e-9)).sum(), len(seen) - 1
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5, (float(chi2), degrees)
