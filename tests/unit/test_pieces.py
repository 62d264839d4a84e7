"""Pieces of tensors in files: whatever boxes are written, a box that is read is what slicing gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dshard.checkpoint import files, reading
from dshard.checkpoint.files import Box, Piece, write_file
from dshard.checkpoint.manifest import Manifest, tensors_of
from dshard.errors import CheckpointError

Cuts = list[tuple[int, int]]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], int, int, Cuts]:
    """A shape, a dim along which it is cut in how many files, and of each dim a start and a length."""
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append(draw(st.sampled_from([(0, size), (start, draw(st.integers(1, size - start)))])))
    return shape, draw(st.integers(0, max(0, len(shape) - 1))), draw(st.integers(1, 3)), box


def written(folder, full: torch.Tensor, dim: int, num_files: int) -> Manifest:
    parts = list(full.chunk(num_files, dim)) if full.dim() else [full]
    stored, at = [], 0
    for i, part in enumerate(parts):
        offsets = tuple(at if d == dim else 0 for d in range(full.dim()))
        piece = Piece("x", Box(tuple(full.shape), offsets, tuple(part.shape)), part)
        other = Piece(f"rank-{i}/y", Box.whole((3,)), torch.tensor([1.0, 2.0, 3.0]))
        stored.append(write_file(folder / f"shard-{i:05d}-of-{len(parts):05d}.01234567.safetensors", [piece, other]))
        at += part.shape[dim] if full.dim() else 0
    return Manifest({}, tuple(stored), tensors_of(stored), {})


@given(case=boxes(), block_bytes=st.sampled_from([8, 40, 1 << 18]), dtype=st.sampled_from([torch.int32, torch.bool]))
def test_a_box_is_what_slicing_gives_and_any_reader_of_the_format_opens_the_files(
    tmp_path_factory, case, block_bytes, dtype
):
    shape, dim, num_files, cuts = case
    folder = tmp_path_factory.mktemp("pieces")
    full = (torch.arange(torch.Size(shape).numel()) * 7 % 5).view(shape).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", block_bytes)
        patch.setattr(reading, "BLOCK_BYTES", block_bytes)
        manifest = written(folder, full, dim, num_files)
        box = Box(tuple(shape), tuple(start for start, _ in cuts), tuple(length for _, length in cuts))
        with reading.Reader(folder, manifest) as reader:
            found = reader.read("x", box)
    assert found.dtype == dtype
    assert torch.equal(found, full[tuple(slice(start, start + length) for start, length in cuts)])
    for file in manifest.files:
        with safe_open(folder / file.name, "pt") as opened:
            assert torch.equal(opened.get_tensor("x"), full[file.pieces["x"].box.within(Box.whole(shape))])
            start = file.pieces["x"].start
            assert (folder / file.name).read_bytes()[start:][: file.pieces["x"].num_bytes] == opened.get_tensor(
                "x"
            ).numpy().tobytes()


def test_every_byte_of_a_file_has_a_sum(tmp_path):
    manifest = written(tmp_path, torch.arange(40.0), 0, 1)
    path = tmp_path / manifest.files[0].name
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
        with reading.Reader(tmp_path, manifest) as reader, pytest.raises(CheckpointError, match=path.name):
            reader.verify(manifest.files[0])
    for other in (content[:-1], content + b"\0", b""):
        path.write_bytes(other)
        with (
            reading.Reader(tmp_path, manifest) as reader,
            pytest.raises(CheckpointError, match="bytes that were saved"),
        ):
            reader.verify(manifest.files[0])
