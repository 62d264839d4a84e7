import torch
from hypothesis import given
from hypothesis import strategies as st

from dshard.cli import data


def _numbered(num_bytes):
    return torch.arange(num_bytes).remainder(251).to(torch.uint8).numpy().tobytes()


def _corpus(num_bytes=50_000, block_size=16):
    return data.split(_numbered(num_bytes), block_size=block_size, source="numbers")


@given(num_windows=st.integers(2, 3_000), extra=st.integers(0, 40), block_size=st.integers(1, 40))
def test_split_keeps_every_byte_once_and_leaves_a_window_on_both_sides(num_windows, extra, block_size):
    text = _numbered(num_windows * (block_size + 1) + extra)
    corpus = data.split(text, block_size=block_size, source="numbers")
    assert len(corpus.train) + len(corpus.validation) == len(text)
    both = torch.cat([corpus.train, corpus.validation]).bincount(minlength=256)
    assert torch.equal(both, torch.frombuffer(bytearray(text), dtype=torch.uint8).bincount(minlength=256))
    assert min(len(corpus.train), len(corpus.validation)) >= block_size + 1


def test_validation_bytes_are_never_trained_on():
    # Stretches are marked with a byte of their own in the part that must be held out.
    num_bytes = 64 * 400
    probe = data.split(b"a" * num_bytes, block_size=4, source="probe")
    held_out = len(probe.validation) // 64
    text = b"".join(b"t" * (400 - held_out) + b"v" * held_out for _ in range(64))
    corpus = data.split(text, block_size=4, source="marked")
    assert set(corpus.train.tolist()) == {ord("t")}
    assert set(corpus.validation.tolist()) == {ord("v")}


@given(seed=st.integers(0, 2**40), step=st.integers(0, 10**6), rank=st.integers(0, 64))
def test_a_batch_depends_on_seed_step_and_rank_alone(seed, step, rank):
    corpus = _corpus()
    torch.manual_seed(step)
    first = data.train_batch(corpus, seed=seed, step=step, rank=rank, batch_size=3, block_size=16)
    torch.manual_seed(seed % 1000 + 1)
    torch.rand(7)
    again = data.train_batch(corpus, seed=seed, step=step, rank=rank, batch_size=3, block_size=16)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)


def test_ranks_steps_and_seeds_draw_different_batches():
    corpus = _corpus()
    keys = [(seed, step, rank) for seed in range(3) for step in range(5) for rank in range(4)]
    drawn = {
        tuple(data.train_batch(corpus, seed=s, step=t, rank=r, batch_size=4, block_size=16).inputs.flatten().tolist())
        for s, t, r in keys
    }
    assert len(drawn) == len(keys)


def test_drawing_a_batch_leaves_the_default_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    data.train_batch(_corpus(), seed=0, step=0, rank=0, batch_size=4, block_size=16)
    assert torch.equal(before, torch.get_rng_state())


def test_targets_are_inputs_one_byte_later():
    corpus = _corpus()
    batch = data.train_batch(corpus, seed=0, step=0, rank=0, batch_size=4, block_size=16)
    assert batch.inputs.shape == batch.targets.shape == (4, 16)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_batches_reach_both_ends_of_the_text():
    corpus = data.split(_numbered(40), block_size=9, source="numbers")
    drawn = [data.train_batch(corpus, seed=0, step=t, rank=0, batch_size=8, block_size=9) for t in range(50)]
    assert min(int(b.inputs[:, 0].min()) for b in drawn) == int(corpus.train[0])
    assert max(int(b.targets[:, -1].max()) for b in drawn) == int(corpus.train[-1])


@given(num_windows=st.integers(1, 20), world_size=st.integers(1, 4), batch_size=st.integers(1, 5))
def test_validation_gives_every_rank_equally_many_windows(num_windows, world_size, batch_size):
    corpus = _corpus()
    counts = []
    for rank in range(world_size):
        batches = data.validation_batches(
            corpus,
            num_windows=num_windows,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            block_size=16,
        )
        counts.append(sum(len(batch.inputs) for batch in batches))
    assert len(set(counts)) == 1
    assert num_windows <= sum(counts) < num_windows + world_size


def test_validation_windows_are_the_same_for_every_world_size():
    corpus = _corpus()

    def windows(world_size):
        batches = [
            data.validation_batches(
                corpus, num_windows=12, rank=rank, world_size=world_size, batch_size=5, block_size=16
            )
            for rank in range(world_size)
        ]
        return sorted(tuple(row.tolist()) for share in batches for batch in share for row in batch.inputs)

    assert windows(1) == windows(2) == windows(3) == windows(4)


def test_the_default_text_is_the_standard_library_without_its_tests():
    text = data.read_text(None)
    assert len(text) > 4_000_000
    assert b"def namedtuple(" in text


def test_a_folder_is_read_in_sorted_order_without_binary_and_hidden_files(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    assert data.read_text(tmp_path) == b"first second"


def test_reading_stops_at_the_limit(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcdef")
    (tmp_path / "b.txt").write_bytes(b"ghijkl")
    assert data.read_text(tmp_path, max_bytes=8) == b"abcdefgh"
