"""Parts of tensors in a file: whatever dims are cut, what is read is what slicing gives."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.checkpoint import parts
from dshard.checkpoint.file_format import Entry

START = 13  # values may start anywhere


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    """A shape, and of each dim a start and a length."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append(draw(st.sampled_from([(0, size), (start, draw(st.integers(0, size - start)))])))
    return shape, box


@given(
    case=boxes(), piece_bytes=st.sampled_from([1, 40, 200, 1 << 24]), dtype=st.sampled_from([torch.int32, torch.bool])
)
def test_a_part_is_what_slicing_gives(tmp_path_factory, case, piece_bytes, dtype):
    shape, box = case
    full = (torch.arange(torch.Size(shape).numel()) * 7 % 5).view(shape).to(dtype)
    path = tmp_path_factory.mktemp("part") / "file"
    path.write_bytes(b"x" * START + full.numpy().tobytes() + b"x" * 3)
    part, expected = torch.empty(shape, device="meta"), full
    for i, (start, length) in enumerate(box):
        part, expected = part.narrow(i, start, length), expected.narrow(i, start, length)
    opened = os.open(path, os.O_RDONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_PIECE_BYTES", piece_bytes)
        found = parts.read_part(opened, Entry("x", Path(path), dtype, tuple(shape), START), part)
    os.close(opened)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_a_file_that_ends_early_is_an_eof_error(tmp_path):
    (tmp_path / "x").write_bytes(bytes(10))
    opened = os.open(tmp_path / "x", os.O_RDONLY)
    with pytest.raises(EOFError, match="ends 2 bytes early"):
        parts.read_part(opened, Entry("x", tmp_path / "x", torch.int32, (3,), 0), torch.empty(3, device="meta"))
    os.close(opened)
