"""treemla.import_batch: what the engines' backends pass wrongly is said with the argument's name."""

from __future__ import annotations

import pytest
import torch

import treemla


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mask_layout": "packed"}, 'mask_layout = "packed": must be full or qlen_only'),
        ({"mask_layout": None}, "mask_layout = None: must be full or qlen_only"),
        ({"row_index": None}, r"row_index is None: must be \[b\]"),
        ({"row_index": 3}, r"row_index is int: must be \[b\]"),
        ({"out": []}, "out is list: must be an Imported"),
    ],
)
def test_arguments_that_make_no_sense(changes, message):
    good = {
        "token_table": torch.zeros(2, 8, dtype=torch.int32),
        "row_index": torch.tensor([1]),
        "seq_len": torch.tensor([3]),
        "q_len": 2,
    }
    treemla.import_batch(**good)
    with pytest.raises(treemla.InvalidArgument, match=message) as caught:
        treemla.import_batch(**(good | changes))
    assert caught.value.argument == next(iter(changes))
