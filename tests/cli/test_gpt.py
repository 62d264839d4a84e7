import pytest
import torch

from dshard.cli.gpt import GPT, GPTConfig

CONFIG = GPTConfig(block_size=12, num_layers=2, width=32, num_heads=4)


def _model(config=CONFIG):
    torch.manual_seed(0)
    return GPT(config)


def test_greedy_generate_picks_what_forward_ranks_first():
    model = _model()
    prompt = torch.randint(0, 256, (3, 5))
    tokens = model.generate(prompt, 15, temperature=0)
    assert tokens.shape == (3, 20)
    assert torch.equal(tokens[:, :5], prompt)
    for end in range(5, 20):
        seen = tokens[:, max(0, end - CONFIG.block_size) : end]
        assert torch.equal(model(seen)[:, -1].argmax(-1), tokens[:, end])


def test_generate_does_not_call_forward_of_the_root():
    model = _model()
    model.register_forward_pre_hook(lambda *_: pytest.fail("forward of the root was called"))
    assert model.generate(torch.zeros(1, 1, dtype=torch.long), 2).shape == (1, 3)


def test_equal_generators_sample_equal_text():
    model = _model()
    prompt = torch.zeros(1, 1, dtype=torch.long)
    samples = [model.generate(prompt, 8, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (5, 5, 6)]
    assert samples[0] == samples[1] != samples[2]


def test_a_position_does_not_see_what_follows_it():
    model = _model()
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = 0
    torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])


def test_the_head_is_tied_only_on_request():
    assert _model().head.weight is not _model().tokens.weight
    tied = _model(GPTConfig(block_size=4, num_layers=1, width=8, num_heads=2, tie_head=True))
    assert tied.head.weight is tied.tokens.weight


def test_the_first_loss_is_that_of_a_uniform_guess():
    logits = _model()(torch.randint(0, 256, (8, 12)))
    assert logits.shape == (8, 12, 256)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(0, 256, (96,)))
    assert abs(loss.item() - 5.545) < 0.2
