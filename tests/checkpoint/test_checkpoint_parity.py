"""With parity, one file of a checkpoint may be lost: a load makes it from the others, and a repair writes it again."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard.checkpoint import check, load, repair, save
from dshard.testing import WorldPool


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(37, 16001), nn.Linear(16001, 5))
    dshard.fully_shard(model, strategy={"0.*": "full", "*": "ddp"})
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [
        t.full_tensor() if isinstance(t, dshard.ShardedTensor) else t for t in [*model.state_dict().values(), *states]
    ]


def saved(path: Path, asynchronous: bool) -> list[Tensor]:
    model, optimizer = made(0)
    model(torch.ones(3, 37)).square().sum().backward()
    optimizer.step()
    pending = save(path, model, optimizer, step=1, parity=1, asynchronous=asynchronous)
    if pending is not None:
        pending.result()
    return full(model, optimizer)


def loaded(path: Path) -> list[Tensor] | str:
    model, optimizer = made(1)
    before = full(model, optimizer)
    try:
        load(path, model, optimizer)
    except dshard.CheckpointError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, full(model, optimizer), strict=True))
        return str(error)
    return full(model, optimizer)


def is_same(results: list, expected: list) -> bool:
    return all(torch.equal(a, b) for found in results for a, b in zip(found, expected[0], strict=True))


@pytest.mark.parametrize(
    ("ranks", "asynchronous"), [(2, False), (3, True), pytest.param(4, False, marks=pytest.mark.slow)]
)
def test_each_file_may_be_lost_and_comes_back_bit_for_bit(worlds: WorldPool, tmp_path, ranks, asynchronous):
    path = tmp_path / "saved"
    expected = worlds.run(ranks, saved, path, asynchronous)
    content = {file.name: file.read_bytes() for file in path.iterdir()}
    assert len(content) == 2 * ranks + 2
    for name, right in content.items():
        (path / name).unlink()
        assert is_same(worlds.run(ranks, loaded, tmp_path), expected), name
        damaged = bytearray(right)
        damaged[len(right) // 2] ^= 4
        (path / name).write_bytes(damaged)
        assert is_same(worlds.run(2, loaded, path), expected), name
        assert [finding.file for finding in check(path)[0].findings] == [name]
        assert repair(path) == [path / name]
        assert (path / name).read_bytes() == right
    assert check(path)[0].findings == ()


def test_of_two_lost_files_all_ranks_are_told_and_nothing_is_changed(worlds: WorldPool, tmp_path):
    path = tmp_path / "saved"
    worlds.run(3, saved, path, False)
    lost = sorted(path.glob("shard-*"))[:2]
    for file in lost:
        file.unlink()
    for text in worlds.run(3, loaded, path):
        assert "Parity cannot stand in" in text
        assert lost[0].name in text
    with pytest.raises(
        dshard.CheckpointError, match="parity must be able to rebuild every damaged file, but it cannot"
    ):
        repair(path)


def alone(path: Path) -> str:
    model, optimizer = made(0)
    with pytest.raises(dshard.CheckpointError) as caught:
        save(path, model, optimizer, parity=1)
    assert dist.get_world_size() == 1
    return str(caught.value)


def test_one_rank_alone_has_nothing_to_make_a_file_from(worlds: WorldPool, tmp_path):
    (text,) = worlds.run(1, alone, tmp_path / "saved")
    assert text.startswith("checkpoint.save: parity needs files of other ranks, but there is one.")
    assert list(tmp_path.iterdir()) == []
